"""Platform-specific implementations of a model's most expensive operations: matrix products, attention, experts.

Each module has several implementations of one operation and selects among them by the target platform and the shapes (`target`).
All are equivalent; plain JAX, which runs and differentiates everywhere, is the reference that the others are tested against.
"""
