"""Whose tokens a step of continuous batching has: the tokens of all its sequences stand in one row of the model's input."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Whose tokens a step has. Sequences have one row or more, in the order of the sequences; rows after the last are padding.

    Args:
        starts: [sequences + 1] int32, the first row of each sequence; for unused ones, and at the end, the number of rows in use.
        lengths: [sequences] int32, tokens of each, the step's included; 0 for unused ones.
        tables: [sequences, pages] int32, the page of each `page_size` tokens.
        count: [1] int32, sequences in use.
    """

    starts: jax.Array
    lengths: jax.Array
    tables: jax.Array
    count: jax.Array

    def sequences(self, num_rows: int) -> jax.Array:
        """[num_rows] int32: the sequence of each row; of padding the last."""
        found = jnp.searchsorted(self.starts, jnp.arange(num_rows, dtype=jnp.int32), side="right") - 1
        return jnp.clip(found, 0, self.lengths.shape[0] - 1).astype(jnp.int32)

    def positions(self, num_rows: int) -> jax.Array:
        """[num_rows] int32: where each row's token stands in its sequence; of padding below 0."""
        of = self.sequences(num_rows)
        index = jnp.arange(num_rows, dtype=jnp.int32)
        return jnp.where(index < self.starts[-1], self.lengths[of] - self.starts[of + 1] + index, -1)
