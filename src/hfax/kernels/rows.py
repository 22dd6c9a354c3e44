"""Mapping of tokens to sequences in a step of continuous batching, which packs all tokens into one row of the model's input."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TABLE_BYTES = 768 << 10
"""Of page tables on TPU, where kernels have them in scalar memory: 1 MB on v5e and v6e, with everything else."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Maps the rows (tokens) of a step to sequences. Sequences have one or more consecutive rows; rows after the last are padding.

    Args:
        starts: [sequences + 1] int32, first row of each sequence; for unused ones, and at the end, the number of rows in use.
        lengths: [sequences] int32, length of each sequence, including the tokens of the step; 0 for unused ones.
        tables: [sequences, pages] int32, page tables: the page of each block of `page_size` tokens.
    """

    starts: jax.Array
    lengths: jax.Array
    tables: jax.Array

    def sequences(self, num_rows: int) -> jax.Array:
        """[num_rows] int32: the sequence of each row; the last one for padding."""
        index = jnp.arange(num_rows, dtype=jnp.int32)
        # one small operation; a binary search would be a loop of several
        found = jnp.searchsorted(self.starts, index, side="right", method="compare_all") - 1
        return jnp.clip(found, 0, self.lengths.shape[0] - 1).astype(jnp.int32)

    def positions(self, num_rows: int) -> jax.Array:
        """[num_rows] int32: the position of each row's token in its sequence; negative for padding."""
        of = self.sequences(num_rows)
        index = jnp.arange(num_rows, dtype=jnp.int32)
        return jnp.where(index < self.starts[-1], self.lengths[of] - self.starts[of + 1] + index, -1)


def size_of_pages(size: int, sequences: int, tokens: int) -> int:
    """Tokens of a page on TPU: `size`, or so many times 2 as much that page tables of long sequences fit its scalar memory.

    Args:
        size: a power of two.
        sequences: rows of page tables.
        tokens: of the longest sequence.
    """
    while 4 * sequences * -(-tokens // size) > TABLE_BYTES:
        size *= 2
    return size
