"""Small configs and inputs for any model: for tests, doctor, the support matrix and structure tracing."""
