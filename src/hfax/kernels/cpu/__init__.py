"""C++ kernels for XLA on CPU, compiled on the machine that runs them."""
