"""The backend "torch_xla": the model's own torch module, with its weights on a torch_xla device. Imports no JAX."""
