"""The `hfax` command: one verb a file. Importing it imports neither torch nor jax nor transformers."""
