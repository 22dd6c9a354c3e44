"""Training with optax: a pure training step and a loop around it."""
