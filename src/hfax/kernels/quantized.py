"""8-bit and 4-bit weights with scales, and matrix products with them.

A `QuantizedArray` replaces a weight array: it has the shape of the weight and the dtype of its dequantized values, and is a pytree
of integers and scales, so programs move only those. Code that supports it multiplies with the integers; other code calls
`dequantize()`. Quantization itself is in `hfax.load.quantize`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hfax.kernels import target
from hfax.kernels.cpu import calls, library
from hfax.sharding.mesh import BATCH_AXES, batch_axes, size_of

INT4_GROUP = 128
"""Columns that share a scale and a word layout in 4-bit weights."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedArray:
    """A weight, [..., out, in], as integers times scales.

    Args:
        values: [..., out, in] int8; or, for 4 bits, [..., out, in / 2] uint8: of each 128 columns, word i of 32 little-endian
            words of 16 bits holds columns i, 32 + i, 64 + i and 96 + i, from its lowest bits up, each plus 8.
        scale: [..., out, in / group] bfloat16.
        bits: 8 or 4.
        dtype: dtype of the dequantized values.
        spec: sharding of the weight over a mesh, shared by integers and scales; None: unsharded or unknown. Needed by traces of
            multi-device programs, which cannot query the sharding of an array.
    """

    values: jax.Array
    scale: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    spec: P | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *lead, last = self.values.shape
        return (*lead, last * 8 // self.bits)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the integers and scales, in bytes."""
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
        """`weight[index]` in `dtype`, for an embedding table; dequantizes only those rows."""
        picked = dataclasses.replace(self, values=self.values[index], scale=self.scale[index], spec=None)
        return picked.dequantize()


def linear(x: jax.Array, weight: QuantizedArray, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` with float32 accumulation, like `hfax.kernels.linear.linear`.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].

    Returns:
        [..., out_features] in the dtype of `x`.
    """
    rows = math.prod(x.shape[:-1])
    if x.dtype in (jnp.bfloat16, jnp.float32) and library.may_be_called():
        target.choose(f"linear: C++ kernel (int{weight.bits} weights, activations rounded to 16 bits)")
        multiply = calls.linear_int8 if weight.bits == 8 else calls.linear_int4
        out_dtype = x.dtype if bias is None else jnp.dtype(jnp.float32)
        out = multiply(x.reshape(rows, -1), weight.values, weight.scale, out_dtype).reshape(*x.shape[:-1], -1)
    elif (found := _pallas_kernel(x, weight)) is not None:
        target.choose(f"linear: Pallas kernel (int{weight.bits} weights)")
        out = _by_kernel(x, weight, *found)
    else:
        target.choose(f"linear: int{weight.bits} weights made numbers, then XLA's matrix product")
        numbers = weight.dequantize().astype(x.dtype)
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        out = jax.lax.dot_general(x, numbers, contract, preferred_element_type=target.product_dtype(x.dtype))
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def without_batch_axes(spec: P | None, ndim: int) -> P:
    """A weight's sharding without the batch axes, over which it is gathered before use; one entry per axis."""

    def kept(axes: str | Sequence[str] | None) -> tuple[str, ...] | None:
        named = (axes,) if isinstance(axes, str) else tuple(axes or ())
        return tuple(axis for axis in named if axis not in BATCH_AXES) or None

    entries = (*(spec or ()), *[None] * ndim)[:ndim]
    return P(*(kept(axes) for axes in entries))


def _pallas_kernel(x: jax.Array, weight: QuantizedArray) -> tuple[Any, P, P] | None:
    """The target's module of kernels, and the shardings of activations and weight for it; None if it does not support this
    program or these shapes."""
    if target.is_differentiated() or x.dtype != jnp.bfloat16 or weight.ndim != 2:
        return None
    if target.is_for("tpu"):
        from hfax.kernels.tpu import quantized as kernels  # Pallas takes a second to import
    elif (gpu := target.nvidia_gpu()) is not None:
        from hfax.kernels.gpu import quantized as kernels

        if not target.is_described(gpu) and not kernels.works():
            return None
    else:
        return None
    mesh = target.mesh()
    of_x, of_weight = P(*[None] * x.ndim), P(None, None)
    if mesh is not None and mesh.size > 1:
        if weight.spec is None:
            return None
        of_weight = without_batch_axes(weight.spec, 2)
        of_x = P(batch_axes(mesh, x.shape[0]), *of_x[1:-1], of_weight[1]) if x.ndim > 1 else P(of_weight[1])
    parts = [1 if mesh is None else size_of(mesh, axes) for axes in (*of_weight, of_x[0] if x.ndim > 1 else None)]
    shape = (weight.shape[0] // parts[0], weight.shape[1] // parts[1])
    rows = math.prod(x.shape[:-1]) // parts[2]
    return (kernels, of_x, of_weight) if kernels.fits(rows, shape, weight.bits, weight.group) else None


def _by_kernel(x: jax.Array, weight: QuantizedArray, kernels: Any, of_x: P, of_weight: P) -> jax.Array:
    """Each device multiplies its own shard; partial sums of a row are added in float32."""

    def local(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        out = kernels.linear(flat, values, scale, bits=weight.bits, out_dtype=jnp.float32)
        out = out.reshape(*x.shape[:-1], -1)
        return jax.lax.psum(out, of_weight[1]) if of_weight[1] else out

    mesh = target.mesh()
    if mesh is None or mesh.size == 1:
        return local(x, weight.values, weight.scale)
    of_out = P(*of_x[:-1], of_weight[0])
    call = jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_weight, of_weight), out_specs=of_out, check_vma=False)
    return call(x, weight.values, weight.scale)
