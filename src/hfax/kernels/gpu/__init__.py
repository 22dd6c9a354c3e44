"""Kernels for GPUs that ship with JAX."""
