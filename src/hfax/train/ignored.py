"""The label of tokens without loss."""

IGNORED = -100
"""As in torch's cross-entropy, and in transformers."""
