"""8-bit and 4-bit weights with scales, and matrix products with them.

A `QuantizedArray` replaces a weight array: it has the shape of the weight and the dtype of its dequantized values, and is a pytree
of codes and scales, so programs move only those. Code that supports it multiplies with the codes; other code calls
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
from hfax.kernels.encodings import BITS, FP4_VALUES, WORD_COLUMNS, Encoding
from hfax.sharding.mesh import BATCH_AXES, batch_axes, size_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedArray:
    """A matrix, [..., out, in], as codes: each number is that of its code times its group's scale, plus its offset.

    Args:
        values: [..., out, in] int8 or float8_e4m3fn; or, for 4 bits, [..., out, in / 2] uint8: of each 128 columns, word i of 32
            little-endian words of 16 bits holds columns i, 32 + i, 64 + i and 96 + i, from its lowest bits up; integers plus 8.
        scale: [..., out, in / group] bfloat16, float16 or float32.
        offset: [..., out, in / group] in one of the dtypes of `scale`; None: 0.
        columns: [in] int32, the weight's column that each column of the codes is; None: the same.
        encoding: of the codes.
        dtype: dtype of the dequantized values.
        width: columns of the matrix, where the codes have more of them, all 0 and at the end (`columns_of`); None: as many.
        is_transposed: the weight is the transpose, [..., in, out].
        spec: sharding of the matrix over a mesh, shared by codes, scales and offsets; None: unsharded or unknown. Needed by traces
            of multi-device programs, which cannot query the sharding of an array.
    """

    values: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None
    columns: jax.Array | None = None
    encoding: Encoding = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    width: int | None = dataclasses.field(default=None, metadata={"static": True})
    is_transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    spec: P | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def bits(self) -> int:
        """Of a code: 8 or 4."""
        return BITS[self.encoding]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *lead, rows = self.values.shape[:-1]
        width = self.num_columns if self.width is None else self.width
        return (*lead, width, rows) if self.is_transposed else (*lead, rows, width)

    @property
    def num_columns(self) -> int:
        """Columns of the codes, padding included."""
        return self.values.shape[-1] * 8 // self.bits

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
        """Size of the codes, scales, offsets and order of columns, in bytes."""
        return sum(part.nbytes for part in jax.tree.leaves(self))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.num_columns // self.scale.shape[-1]

    @property
    def unit(self) -> int:
        """Columns that stay together on a device: a group, and those that share words."""
        return together(self.encoding, self.group)

    def numbers(self) -> jax.Array:
        """[..., out, columns] int8 or, of "fp8" and "fp4", float32: what the codes mean, as they are stored."""
        if self.bits == 8:
            return self.values if self.encoding == "int8" else self.values.astype(jnp.float32)
        pairs = self.values.reshape(*self.values.shape[:-1], -1, 32, 2)
        nibbles = jnp.stack([pairs[..., 0] & 15, pairs[..., 0] >> 4, pairs[..., 1] & 15, pairs[..., 1] >> 4], axis=-2)
        codes = nibbles.reshape(*self.values.shape[:-1], self.num_columns)
        if self.encoding == "int4":
            return codes.astype(jnp.int8) - jnp.int8(8)
        return jnp.asarray(FP4_VALUES, jnp.float32)[codes]

    def dequantize(self) -> jax.Array:
        """The weight in `dtype`; computed in float32, and rounded once at the end."""
        numbers = self.numbers().reshape(*self.scale.shape, -1).astype(jnp.float32)
        groups = numbers * self.scale[..., None].astype(jnp.float32)
        if self.offset is not None:
            groups = groups + self.offset[..., None].astype(jnp.float32)
        matrix = groups.astype(self.dtype).reshape(*self.values.shape[:-1], self.num_columns)[..., : self.width]
        matrix = matrix if self.columns is None else matrix[..., jnp.argsort(self.columns)]
        return matrix.swapaxes(-1, -2) if self.is_transposed else matrix

    def rows(self, index: jax.Array) -> jax.Array:
        """`weight[index]` in `dtype`, for an embedding table; dequantizes only those rows."""
        offset = None if self.offset is None else self.offset[index]
        parts = {"values": self.values[index], "scale": self.scale[index], "offset": offset}
        return dataclasses.replace(self, **parts, spec=None).dequantize()


def has_packed(tree: Any) -> bool:
    """Whether a pytree holds packed weights."""
    return any(isinstance(leaf, QuantizedArray) for leaf in jax.tree.leaves(tree, is_leaf=_is_packed))


def _is_packed(node: Any) -> bool:
    return isinstance(node, QuantizedArray)


def together(encoding: Encoding, group: int) -> int:
    """Columns of a packed weight that stay together on a device: a group, and those that share words."""
    return math.lcm(group, WORD_COLUMNS) if BITS[encoding] == 4 else group


def aligned(x: jax.Array, weight: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """Activations, [..., in_features], in the order of the codes' columns and as wide, and the matrix [..., out, in] of the codes
    as they are stored."""
    if weight.columns is not None:
        x = x[..., weight.columns]
    if weight.width is not None:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, weight.num_columns - weight.width)])
    return x, dataclasses.replace(weight, columns=None, width=None, is_transposed=False)


def group_sums(x: jax.Array, groups: int) -> jax.Array:
    """The sums of each group of columns of activations, [..., in_features], as [..., groups] float32."""
    return x.reshape(*x.shape[:-1], groups, -1).sum(axis=-1, dtype=jnp.float32)


def sums_with_offset(x: jax.Array, offset: jax.Array) -> jax.Array:
    """What offsets add to `x @ weight.T`: the sums of groups of columns, times the groups' offsets.

    Args:
        x: [..., in_features].
        offset: [out_features, groups].

    Returns:
        [..., out_features] float32.
    """
    sums = group_sums(x, offset.shape[1])
    return jnp.matmul(sums, offset.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


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
        target.choose(f"linear: C++ kernel ({weight.encoding} weights, {_rounding(weight)})")
        x, weight = aligned(x, weight)
        out_dtype = x.dtype if bias is None else jnp.dtype(jnp.float32)
        how: dict[str, Any] = {"encoding": weight.encoding, "any_order": not target.is_batch_invariant()}
        flat, parts = x.reshape(rows, -1), (weight.values, weight.scale, weight.offset)
        out = calls.linear_packed(flat, *parts, **how, out_dtype=out_dtype)
        out = out.reshape(*x.shape[:-1], -1)
    elif (found := _pallas_kernel(*(operands := aligned(x, weight)))) is not None:
        target.choose(f"linear: Pallas kernel ({weight.encoding} weights)")
        out = _by_kernel(*operands, *found, x.dtype if bias is None else jnp.dtype(jnp.float32))
    else:
        target.choose(f"linear: {weight.encoding} weights made numbers, then XLA's matrix product")
        numbers = weight.dequantize().astype(x.dtype)
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        out_dtype = target.product_dtype(x.dtype, is_added=bias is not None)
        out = jax.lax.dot_general(x, numbers, contract, preferred_element_type=out_dtype)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def _rounding(weight: QuantizedArray) -> str:
    return "made float32" if weight.encoding == "fp8" else "activations rounded to 16 bits"


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
    if target.is_differentiated() or weight.ndim != 2:
        return None
    if target.is_for("tpu"):
        if x.dtype != jnp.bfloat16:
            return None
        from hfax.kernels.tpu import quantized as kernels  # Pallas takes a second to import
    elif (gpu := target.nvidia_gpu()) is not None:
        from hfax.kernels.gpu import quantized as kernels

        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return None
        if not target.is_described(gpu) and not kernels.works(weight.encoding, x.dtype):
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
    return (kernels, of_x, of_weight) if kernels.fits(rows, shape, weight.encoding, weight.group) else None


def _by_kernel(
    x: jax.Array, weight: QuantizedArray, kernels: Any, of_x: P, of_weight: P, out_dtype: jnp.dtype
) -> jax.Array:
    """Each device multiplies its own shard; partial sums of a row are added in float32."""
    is_whole = weight.offset is None and not of_weight[1]  # nothing is added
    out_dtype = out_dtype if is_whole else jnp.dtype(jnp.float32)

    def local(x: jax.Array, weight: QuantizedArray) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        out = kernels.linear(flat, weight.values, weight.scale, encoding=weight.encoding, out_dtype=out_dtype)
        if weight.offset is not None:
            out = out + sums_with_offset(flat, weight.offset)
        out = out.reshape(*x.shape[:-1], -1)
        return jax.lax.psum(out, of_weight[1]) if of_weight[1] else out

    mesh = target.mesh()
    if mesh is None or mesh.size == 1:
        return local(x, weight)
    of_out = P(*of_x[:-1], of_weight[0])
    # codes, scales and offsets are split alike
    specs = (of_x, jax.tree.map(lambda _: of_weight, weight))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=of_out, check_vma=False)(x, weight)
