"""Small configurations and inputs for any model: for tests, the doctor, the support matrix and traces of structure."""
