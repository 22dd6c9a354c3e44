"""A transformers module's PyTorch code as a pure JAX function: the tensors, lowerings and inputs of a trace."""
