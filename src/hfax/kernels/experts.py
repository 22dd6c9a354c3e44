"""Grouped matrix products for mixtures of experts.

`grouped_linear` multiplies each row by the matrix of its expert. Implementations: the C++ kernel, which sorts the rows by expert
and reads each selected matrix once; for few rows, a gather of the selected matrices; for many, rows sorted by expert and JAX's
ragged product; on TPU and NVIDIA GPUs, Pallas kernels. Over a mesh every device computes its own experts, and the results
are summed, at the end of a mixture if asked: expert weights are not communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hfax.kernels import precision as precisions
from hfax.kernels import target
from hfax.kernels.cpu import calls, library
from hfax.kernels.encodings import Encoding
from hfax.kernels.quantized import QuantizedArray, aligned, group_sums
from hfax.sharding.mesh import HEAD_AXES, batch_axes, expert_axes, size_of

ROWS_BY_EXPERT = "rows_by_expert"
"""The name, in traces without a target, of the function of rows, their experts and the weight: a row depends on no other."""


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    experts: jax.Array,
    *,
    is_transposed: bool = False,
    is_summed: bool = True,
) -> jax.Array:
    """`x[i] @ weight[experts[i]].T` for every row, with float32 accumulation.

    Args:
        x: [rows, in_features]; or [devices, rows, in_features], a result that is not summed, from the same experts.
        weight: [experts, out_features, in_features], or [experts, in_features, out_features] if `is_transposed`.
        experts: [rows] int32, below the number of experts.
        is_transposed: layout of the weight.
        is_summed: add up what devices with different experts have. Otherwise, where experts are split over devices, a row has its
            product at the device of its expert and zeros at the others, and nothing is sent.

    Returns:
        [rows, out_features] in the dtype of `x`; or [devices, rows, out_features], split over the devices by its first axis.
    """
    mesh, is_packed = target.mesh(), isinstance(weight, QuantizedArray)
    if isinstance(weight, QuantizedArray):
        is_transposed = is_transposed and not weight.is_transposed
        x, weight = aligned(x, weight)
    has_pallas = target.is_for("tpu") or target.nvidia_gpu() is not None
    if mesh is None or mesh.size == 1 or (is_packed and not has_pallas):
        return _on_one_device(_summed(x), weight, experts, is_transposed).astype(x.dtype)
    split = expert_axes(mesh, weight.shape[0])
    parts = x.shape[-1] // (weight.unit if isinstance(weight, QuantizedArray) else 1)  # groups are not split
    inner = () if split or parts % size_of(mesh, HEAD_AXES) else HEAD_AXES
    # Pallas kernels are not partitioned automatically, so do it even if all devices do the same
    if size_of(mesh, split or inner) == 1 and not has_pallas:
        return _on_one_device(_summed(x), weight, experts, is_transposed).astype(x.dtype)
    rows, is_kept = batch_axes(mesh, len(experts)), bool(split) and not is_summed
    x = x if split else _summed(x)

    def local(x: jax.Array, weight: jax.Array | QuantizedArray, experts: jax.Array) -> jax.Array:
        own, count = x[0] if x.ndim == 3 else x, weight.shape[0]
        mine = experts - (_index(split, mesh) * count if split else 0)
        is_mine = (mine >= 0) & (mine < count)
        chosen = jnp.where(is_mine, mine, count)  # `count`: rows without an expert here
        out = _on_one_device(own, weight, chosen, is_transposed)
        out = jnp.where(is_mine[:, None], out.astype(jnp.float32), 0)
        if is_kept:
            return out.astype(x.dtype)[None]
        return (jax.lax.psum(out, axes) if (axes := split or inner) else out).astype(x.dtype)

    in_axis = 1 if is_transposed else 2
    weight_spec = P(*(split or None if i == 0 else inner or None if i == in_axis else None for i in range(3)))
    of_x = P(split, rows, None) if x.ndim == 3 else P(rows, inner or None)
    # codes, scales and offsets of a packed weight are split alike
    specs = (of_x, jax.tree.map(lambda _: weight_spec, weight), P(rows))
    of_out = P(split, rows, None) if is_kept else P(rows, None)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=of_out, check_vma=False)(x, weight, experts)


def sum_over_devices(x: jax.Array, num_experts: int) -> jax.Array:
    """The sum of what devices have of a result of `grouped_linear` that is not summed.

    Args:
        x: [devices, rows, width].
        num_experts: of the weights that it is from.

    Returns:
        [rows, width].
    """
    mesh = target.mesh()
    assert mesh is not None
    split, rows = expert_axes(mesh, num_experts), batch_axes(mesh, x.shape[1])
    # not x.sum(0): libtpu would add up devices before whatever else is added up in `x`, and send more
    call = jax.shard_map(
        lambda x: jax.lax.psum(x[0], split),
        mesh=mesh,
        in_specs=P(split, rows, None),
        out_specs=P(rows, None),
        check_vma=False,
    )
    return call(x)


def _summed(x: jax.Array) -> jax.Array:
    return x.sum(axis=0) if x.ndim == 3 else x


def _index(axes: Sequence[str], mesh: jax.sharding.Mesh) -> jax.Array:
    """The device's shard index over these axes."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def _on_one_device(
    x: jax.Array, weight: jax.Array | QuantizedArray, experts: jax.Array, is_transposed: bool
) -> jax.Array:
    """The products in float32 or the dtype of `x`; rows without an expert on this device are undefined."""
    if target.current() is not None:
        return _by_kernels(x, weight, experts, is_transposed)

    def multiply(x: jax.Array, experts: jax.Array, weight: jax.Array | QuantizedArray) -> jax.Array:
        return _by_kernels(x, weight, experts, is_transposed)

    multiply.__name__ = ROWS_BY_EXPERT
    return jax.jit(multiply)(x, experts, weight)  # a function of its own, so that JAX does not keep the trace


def _by_kernels(x: jax.Array, weight: jax.Array | QuantizedArray, experts: jax.Array, is_transposed: bool) -> jax.Array:
    """`_on_one_device`."""
    rows, num_experts = x.shape[0], weight.shape[0]
    if _has_kernel(x, weight) and not is_transposed:
        target.choose("experts: C++ kernel, each chosen matrix read once")
        if isinstance(weight, QuantizedArray):
            parts = weight.values, weight.scale, weight.offset
            how: dict[str, Any] = {"encoding": weight.encoding, "any_order": not target.is_batch_invariant()}
            return calls.linear_experts_packed(x, *parts, experts, **how)
        return calls.linear_experts(x, weight, experts)
    if isinstance(weight, QuantizedArray):
        if not is_transposed and (out := _packed_by_pallas(x, weight, experts)) is not None:
            return out
        if rows < num_experts:
            weight = weight.rows(experts)
            return jnp.einsum("ri,roi->ro", x, weight, preferred_element_type=jnp.float32)
        weight = weight.dequantize()
    if _is_for_tpu(x, weight, is_transposed):
        target.choose("experts: grouped product kernel (Pallas)")
        return _on_tpu(x, weight, experts, is_transposed)
    if (kernels := _gpu_kernels(x, None)) is not None and kernels.fits(x, weight, is_transposed=is_transposed):
        target.choose("experts: Triton kernel, rows in tiles of one expert")
        return kernels.grouped_linear(x, weight, experts, is_transposed=is_transposed)
    if rows < num_experts:
        target.choose("experts: the chosen matrices gathered")
        form = "ri,rio->ro" if is_transposed else "ri,roi->ro"
        chosen = weight[jnp.minimum(experts, num_experts - 1)]
        return jnp.einsum(form, x, chosen, preferred_element_type=jnp.float32)
    target.choose("experts: rows sorted, ragged product")
    return _ragged_product(x, weight, experts, is_transposed)


def _ragged_product(
    x: jax.Array, weight: jax.Array, experts: jax.Array, is_transposed: bool, precision: jax.lax.Precision | None = None
) -> jax.Array:
    """Each row with the matrix of its expert, in float32."""
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=weight.shape[0]).astype(jnp.int32)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if is_transposed else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    with precisions.of_kernel(x):  # libtpu has a kernel for it, too
        out = jax.lax.ragged_dot_general(
            x[order], weight, sizes, numbers, precision, preferred_element_type=jnp.float32
        )
    return jnp.zeros_like(out).at[order].set(out)


def _is_for_tpu(x: jax.Array, weight: jax.Array, is_transposed: bool) -> bool:
    if not target.is_for("tpu") or target.is_differentiated():
        return False
    from hfax.kernels.tpu import experts as kernels

    return kernels.fits(x, weight, is_transposed=is_transposed)


def _on_tpu(x: jax.Array, weight: jax.Array, experts: jax.Array, is_transposed: bool) -> jax.Array:
    from hfax.kernels.tpu import experts as kernels

    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=weight.shape[0]).astype(jnp.int32)
    out = kernels.grouped_linear(x[order], weight, sizes, is_transposed=is_transposed)
    return jnp.zeros_like(out).at[order].set(out)


def _gpu_kernels(x: jax.Array, encoding: Encoding | None) -> Any:
    """The module of Triton kernels; None if the program is not for a GPU on which they work, or is differentiated.

    Args:
        x: the activations.
        encoding: of packed weights.
    """
    if target.is_differentiated() or (gpu := target.nvidia_gpu()) is None or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    from hfax.kernels.gpu import experts as kernels

    return kernels if target.is_described(gpu) or kernels.works(encoding, x.dtype) else None


def _packed_by_pallas(x: jax.Array, weight: QuantizedArray, experts: jax.Array) -> jax.Array | None:
    """By a Pallas kernel, in float32; None if there is none for the target, or it does not support the shapes."""
    of_weight: dict[str, Any] = {"encoding": weight.encoding, "group": weight.group}
    if (on_gpu := _gpu_kernels(x, weight.encoding)) is not None and on_gpu.fits_packed(x, weight.shape, **of_weight):
        target.choose(f"experts: Triton kernel ({weight.encoding} weights)")
        out = on_gpu.grouped_linear_packed(x, weight.values, weight.scale, experts, encoding=weight.encoding)
    elif target.is_for("tpu") and not target.is_differentiated() and x.dtype == jnp.bfloat16:
        from hfax.kernels.tpu import quantized as kernels

        if not kernels.fits_experts(weight.shape, **of_weight):
            return None
        target.choose(f"experts: Pallas kernel ({weight.encoding} weights)")
        out = kernels.experts_linear(x, weight.values, weight.scale, experts, encoding=weight.encoding)
    else:
        return None
    if weight.offset is None:
        return out
    sums = group_sums(x, weight.offset.shape[-1])
    return out + _ragged_product(sums, weight.offset.astype(jnp.float32), experts, False, jax.lax.Precision.HIGHEST)


def _has_kernel(x: jax.Array, weight: jax.Array | QuantizedArray) -> bool:
    fits = x.dtype in (jnp.bfloat16, jnp.float32) and (isinstance(weight, QuantizedArray) or weight.dtype == x.dtype)
    return fits and library.may_be_called()
