"""Training on optax: a pure step, and a loop around it."""
