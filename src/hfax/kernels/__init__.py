"""What models spend their time on, written for each platform: products with weights, attention, experts.

Each module here computes one thing in several ways and chooses among them by the platform that a program is compiled for and by
the shapes (`target`). Every way has the same meaning, and plain JAX, which runs and differentiates everywhere, is the one that the
others are tested against.
"""
