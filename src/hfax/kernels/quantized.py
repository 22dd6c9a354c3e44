"""Weights of 8 or 4 bits with scales, and products with them.

A `QuantizedArray` stands where a weight's array would: it has the weight's shape and the dtype of the numbers that it stands for,
and is a pytree of its integers and its scales, so that programs move those and nothing larger. Whoever knows it multiplies with the
integers; everyone else asks for `dequantize()`. How a weight is quantized is in `hfax.load.quantize`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from hfax.kernels import target
from hfax.kernels.cpu import calls, library

INT4_GROUP = 128
"""Columns that share a scale, and a word layout, in 4-bit weights."""
_KERNEL_ROWS = 128
"""Up to so many rows, CPU programs multiply with the integers; for more, making the weight's numbers once costs less. Where the
processor multiplies pairs of bfloat16, the kernel makes them bit by bit itself, for any number of rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedArray:
    """A weight, [..., out, in], as integers times scales.

    Args:
        values: [..., out, in] int8; or, for 4 bits, [..., out, in / 2] uint8: of each 128 columns, word i of 32 little-endian
            words of 16 bits holds columns i, 32 + i, 64 + i and 96 + i, from its lowest bits up, each plus 8.
        scale: [..., out, in / group] bfloat16.
        bits: 8 or 4.
        dtype: of the numbers that it stands for.
    """

    values: jax.Array
    scale: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *lead, last = self.values.shape
        return (*lead, last * 8 // self.bits)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """How many numbers it stands for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the integers and the scales."""
        return self.values.nbytes + self.scale.nbytes

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    def integers(self) -> jax.Array:
        """[..., out, in] int8."""
        if self.bits == 8:
            return self.values
        pairs = self.values.reshape(*self.values.shape[:-1], -1, 32, 2)
        nibbles = jnp.stack([pairs[..., 0] & 15, pairs[..., 0] >> 4, pairs[..., 1] & 15, pairs[..., 1] >> 4], axis=-2)
        return nibbles.reshape(self.shape).astype(jnp.int8) - jnp.int8(8)

    def dequantize(self) -> jax.Array:
        """[..., out, in] in `dtype`; the products are rounded once."""
        groups = self.integers().reshape(*self.scale.shape, -1).astype(jnp.float32)
        return (groups * self.scale[..., None].astype(jnp.float32)).astype(self.dtype).reshape(self.shape)

    def rows(self, index: jax.Array) -> jax.Array:
        """`weight[index]` in `dtype`, for an embedding table; only those rows are made."""
        picked = dataclasses.replace(self, values=self.values[index], scale=self.scale[index])
        return picked.dequantize()


def linear(x: jax.Array, weight: QuantizedArray, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` with float32 accumulation, as `hfax.kernels.linear.linear`.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].

    Returns:
        [..., out_features] in the dtype of `x`.
    """
    rows = math.prod(x.shape[:-1])
    is_unbounded = x.dtype == jnp.bfloat16 and library.has_matmul()
    is_kernels = x.dtype in (jnp.bfloat16, jnp.float32) and (rows <= _KERNEL_ROWS or is_unbounded)
    if is_kernels and library.may_be_called():
        most = "any number of" if is_unbounded else f"up to {_KERNEL_ROWS}"
        target.choose(f"linear: C++ kernel (int{weight.bits} weights, {most} rows)")
        multiply = calls.linear_int8 if weight.bits == 8 else calls.linear_int4
        out_dtype = x.dtype if bias is None else jnp.dtype(jnp.float32)
        out = multiply(x.reshape(rows, -1), weight.values, weight.scale, out_dtype).reshape(*x.shape[:-1], -1)
    elif _has_tpu_kernel(rows, x, weight):
        from hfax.kernels.tpu import quantized as kernels  # Pallas for TPU takes a second to import

        target.choose(f"linear: Pallas kernel (int{weight.bits} weights)")
        flat = x.reshape(rows, -1)
        out = kernels.linear(flat, weight.values, weight.scale, bits=weight.bits, out_dtype=jnp.float32)
        out = out.reshape(*x.shape[:-1], -1)
    else:
        target.choose(f"linear: int{weight.bits} weights made numbers, then XLA's matrix product")
        numbers = weight.dequantize().astype(x.dtype)
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        out = jax.lax.dot_general(x, numbers, contract, preferred_element_type=jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def _has_tpu_kernel(rows: int, x: jax.Array, weight: QuantizedArray) -> bool:
    """Of one device: which part of a weight is where, a trace does not know."""
    if not target.is_for("tpu") or target.is_differentiated() or x.dtype != jnp.bfloat16:
        return False
    if (mesh := target.mesh()) is not None and mesh.size > 1:
        return False
    from hfax.kernels.tpu import quantized as kernels

    return kernels.fits(rows, weight.shape, weight.bits, weight.group)
