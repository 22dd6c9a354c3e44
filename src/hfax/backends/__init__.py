"""What runs a model: the protocol of backends, and those that hfax has."""
