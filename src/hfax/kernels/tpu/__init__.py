"""Kernels for TPU, in Pallas."""
