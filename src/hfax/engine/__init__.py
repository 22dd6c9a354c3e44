"""Continuous batching: many requests at once through one model, on programs of fixed shapes.

The way of a request: `sampling_params` → `sequence` → `scheduler` (with `pages`) → a runner's forward pass → `sampler` →
`detokenizer` → outputs. `core` is the loop, `engine` what a user calls. The scheduler, pages and sequences import neither jax nor
torch.
"""
