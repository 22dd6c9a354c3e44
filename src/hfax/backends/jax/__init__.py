"""The backend "jax": transformers' modules traced into pure JAX functions."""
