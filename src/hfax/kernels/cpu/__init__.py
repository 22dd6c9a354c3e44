"""C++ kernels for XLA on CPU, from a wheel or compiled on the machine that runs them."""
