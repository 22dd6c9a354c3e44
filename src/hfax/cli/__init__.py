"""The `hfax` command: one file per subcommand. Importing it imports neither torch nor jax nor transformers."""
