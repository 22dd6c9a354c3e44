"""Continuous batching: many concurrent requests through one model, with fixed-shape programs.

Request path: `sampling_params` → `sequence` → `scheduler` (with `pages`) → a runner's forward pass → `sampler` → `detokenizer` →
outputs. `core` is the engine loop, `engine` the public API. The scheduler, pages and sequences import neither jax nor torch.
"""
