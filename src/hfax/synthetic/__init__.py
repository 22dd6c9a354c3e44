"""Small configs and inputs for any model, used by tests, doctor, the support matrix and structure tracing."""
