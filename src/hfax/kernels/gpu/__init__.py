"""GPU kernels that ship with JAX."""
