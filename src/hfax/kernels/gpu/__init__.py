"""GPU kernels: cuDNN's and JAX's, and hfax's own in Triton."""
