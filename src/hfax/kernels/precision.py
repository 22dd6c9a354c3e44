"""The precision of products of float32 arrays: that of torch, unless the user has told JAX another.

XLA multiplies float32 in bfloat16 on a TPU and in TF32 on a GPU unless told otherwise (relative errors of 4e-3 and 3e-4), torch in
float32 unless told otherwise: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html,
https://docs.jax.dev/en/latest/_autosummary/jax.default_matmul_precision.html.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from hfax.float32_products import told_torch
from hfax.kernels import target


def setting() -> str:
    """`jax_default_matmul_precision` if it is set, else what torch was told."""
    config: Any = jax.config
    if (chosen := config.jax_default_matmul_precision) is not None:
        return chosen
    return told_torch()


def as_torch() -> AbstractContextManager[Any]:
    """Within the block float32 products of a trace have the precision of `setting`. On CPU they always are float32 products."""
    return nullcontext() if _platform() == "cpu" else jax.default_matmul_precision(setting())


def of_half() -> AbstractContextManager[Any]:
    """Within the block a product of arrays of half precision is traced.

    It has one precision. Asked for that of float32, libtpu fails where it makes a kernel of a batched product.
    """
    return nullcontext() if _platform() == "cpu" else jax.default_matmul_precision("default")


def of_products(dtype: jnp.dtype) -> AbstractContextManager[Any]:
    """Within the block products of arrays of a dtype are traced, see `of_half`."""
    return of_half() if dtype in (jnp.bfloat16, jnp.float16) else nullcontext()


def _platform() -> str:
    where = target.current()
    return jax.default_backend() if where is None else where.platform


def of_kernel(*operands: jax.Array) -> AbstractContextManager[Any]:
    """Within the block a Pallas kernel is traced, whose products take `operands`.

    Half precision has one precision, and Mosaic refuses others; float32 has that of `setting`.
    """
    is_half = any(operand.dtype in (jnp.bfloat16, jnp.float16) for operand in operands)
    return jax.default_matmul_precision("default" if is_half else setting())
