"""Inputs for any model, from its forward's signature and its config: for the support matrix, the doctor and traces of structure."""
