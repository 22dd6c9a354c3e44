"""Backends, which run models: the protocol and hfax's implementations."""
