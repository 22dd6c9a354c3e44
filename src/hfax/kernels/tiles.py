"""The registers of a TPU: the smallest parts of arrays that are copied and multiplied.

A register holds 8 rows of 128 numbers of 32 bits; of smaller ones as many rows more
(https://docs.jax.dev/en/latest/pallas/tpu/details.html).
"""

from __future__ import annotations

import jax.numpy as jnp

LANES = 128
SUBLANES = 8


def rows_of(dtype: jnp.dtype) -> int:
    """Rows of a register of numbers of that dtype."""
    return SUBLANES * 4 // dtype.itemsize


def in_lanes(count: int) -> int:
    """`count` numbers in whole registers."""
    return -(-count // LANES) * LANES
