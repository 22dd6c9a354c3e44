"""Quantization of checkpoints with calibration data, one layer in memory at a time."""
