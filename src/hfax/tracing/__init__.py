"""Tracing a transformers module's PyTorch code into a pure JAX function: tensors, lowerings and inputs."""
