"""Loads a checkpoint's tensors as a model's weights on the device.

Turns a source (files on disk) and a skeleton into `dict[str, jax.Array]`, one conversion step at a time, so host memory holds
only the current steps' tensors besides the weights already placed. It knows nothing about how the weights are used.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding

from hfax.errors import CheckpointCorruptError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.conversion import (
    ConversionPlan,
    ConversionStep,
    check_complete,
    plan_conversion,
    run_packed_step,
    run_step,
)
from hfax.load.flax_names import unknown_to_flax
from hfax.load.freed_memory import give_back_freed_memory
from hfax.load.orbax_checkpoint import OrbaxStore
from hfax.load.packed import PackedLayout
from hfax.load.placement import check_fits, place, place_slices
from hfax.load.quantize import (
    Quantization,
    bytes_of,
    encoding_of,
    kept_layout,
    layouts,
    matrix_sharding,
    pack,
    part_sharding,
    quantize,
    restore,
    spec_of,
    weights_to_quantize,
    width_in,
)
from hfax.load.rules import check_shape, draw_missing, dtype_rule
from hfax.load.safetensors_arrays import SafetensorsArrays
from hfax.load.saved_parts import saved_parts
from hfax.load.skeleton import Skeleton
from hfax.load.store import TensorStore
from hfax.phases import meter
from hfax.sharding.layout import Layout

Weight = jax.Array | QuantizedArray

logger = logging.getLogger(__name__)

_READERS = 2
"""Number of steps loaded concurrently; bounds the tensors held in host memory."""
_KEPT_BYTES = 32 << 20
"""Weights after which the memory of freed tensors is given back: they were converted from about as many bytes."""
_COMPARED_BYTES = 1 << 20
_COMPARED_NUMBERS = 1 << 20


def load_weights(
    skeleton: Skeleton,
    store: TensorStore,
    layout: Layout,
    *,
    strict: bool,
    quantization: Quantization | None = None,
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Read, convert, cast, quantize and place every weight.

    Args:
        skeleton: the model structure.
        store: the checkpoint's tensors.
        layout: device placement.
        strict: treat missing and unexpected tensors as errors.
        quantization: quantization of linear layer weights.

    Returns:
        Weights by name, and the aliases that share them (fewer than the skeleton's if the checkpoint stores different values for
        tied weights).

    Raises:
        CheckpointCorruptError: tensors are missing, unexpected, misshapen or cannot be merged.
        OutOfMemoryError: the weights do not fit on the device.
    """
    plan = plan_conversion(skeleton, store.names, store.rules)
    stored = {} if quantization else stored_layouts(skeleton, store, layout.device.platform, plan)
    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, quantization or stored)
    needed = sum(
        bytes_of(packed[name]) if name in packed else t.numel() * t.element_size()
        for name, t in skeleton.shapes.items()
    )
    loading = meter()
    loading.expect(needed)
    needed = needed if layout.plan is None else layout.plan.bytes_per_device
    check_fits(
        needed,
        layout.device,
        "Loading the weights",
        "Use a smaller dtype (dtype='bfloat16'), or more or larger devices.",
    )
    target_dtype = dtype_rule(skeleton.module, skeleton.dtype)
    expected = {**skeleton.shapes, **{alias: skeleton.shapes[name] for alias, name in skeleton.tied.items()}}
    still_packed: list[int] = []
    dequantized: list[int] = []
    errors: list[float] = []

    def load_slices(step: ConversionStep) -> list[tuple[str, Weight]] | None:
        """Load a weight stored unconverted that no device holds in full."""
        name, stored = step.target, step.sources[0][0]
        where = layout.weight(skeleton.tied.get(name, name))
        if step.converter is not None or name in packed or where.is_fully_replicated or stored in store.assembled:
            return None
        if (shape := store.shape(stored)) != tuple(expected[name].shape):
            return None  # the full load reports this error
        wanted = target_dtype(name, expected[name])
        floats = expected[name].is_floating_point()

        def read(index: tuple[slice, ...]) -> torch.Tensor:
            part = store.read_slice(stored, index)
            return part.to(wanted) if floats else part

        return [(name, place_slices(shape, where, read))]

    def load_packed(step: ConversionStep) -> list[tuple[str, Weight]] | None:
        """Load weights with the codes that the checkpoint stores."""
        if skeleton.tied.get(step.target, step.target) not in stored:
            return None
        found = run_packed_step(step, store.read_packed, skeleton.module)
        if found is None:
            return None
        placed: list[tuple[str, Weight]] = []
        for name, tensor in found.items():
            check_shape(name, tensor, expected[name], step)
            wanted, where = target_dtype(name, expected[name]), layout.weight(skeleton.tied.get(name, name))
            kept = pack(tensor, wanted, where)
            placed.append((name, place(tensor.dequantize().to(wanted), where) if kept is None else kept))
            (dequantized if kept is None else still_packed).append(placed[-1][1].nbytes)
        return placed

    def load_step(step: ConversionStep) -> list[tuple[str, Weight]]:
        if (sliced := load_slices(step) or load_packed(step)) is not None:
            return sliced
        placed: list[tuple[str, Weight]] = []
        wanted = None if step.target not in expected else target_dtype(step.target, expected[step.target])

        def read(name: str) -> torch.Tensor:
            # in the weight's dtype before experts are stacked: dequantized in float32, a layer would be twice as large
            return store.read(name).to(wanted) if name in store.assembled and wanted else store.read(name)

        is_stored_packed = any(source in store.assembled for source, _ in step.sources)
        for name, tensor in run_step(step, read, skeleton.module):
            if name not in expected:
                raise CheckpointCorruptError(
                    f"{step.sources[0][0]!r} was converted to {name!r}, which the model does not have.",
                    "transformers' conversion rule does not fit this checkpoint.",
                    "Save the checkpoint again with a current version of transformers.",
                )
            check_shape(name, tensor, expected[name], step)
            wanted = target_dtype(name, expected[name])
            tensor = tensor.to(wanted) if tensor.is_floating_point() else tensor
            own_name = skeleton.tied.get(name, name)
            where = layout.weight(own_name)
            small = None
            if quantization and own_name in packed:
                small = quantize(tensor, quantization, where, is_transposed=packed[own_name].is_transposed)
            placed.append((name, place(tensor, where) if small is None else small))
            if small is not None and quantization and is_stored_packed:
                errors.append(_relative_error(tensor.mT if small.is_transposed else tensor, quantization))
            elif is_stored_packed:
                dequantized.append(tensor.nbytes)
        return placed

    weights: dict[str, Weight] = {}
    since = 0
    with concurrent.futures.ThreadPoolExecutor(_READERS, thread_name_prefix="hfax-load") as pool:
        try:
            for placed in pool.map(load_step, plan.steps):
                weights.update(placed)
                num_bytes = sum(weight.nbytes for _, weight in placed)
                loading.add(num_bytes)
                since += num_bytes
                if since > _KEPT_BYTES:
                    give_back_freed_memory()
                    since = 0
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    give_back_freed_memory()
    if store.assembled:
        _report(still_packed, dequantized, errors, quantization)
    tied = settle_ties(weights, skeleton.tied)
    without = unknown_to_flax(skeleton.module, skeleton.shapes) if store.is_flax else set()
    missing = check_complete(skeleton, set(weights), plan.unexpected, strict=strict, without=without)
    weights.update(initialise(skeleton, missing, layout))
    return weights, tied


def _report(
    still_packed: list[int], dequantized: list[int], errors: list[float], quantization: Quantization | None
) -> None:
    """Log what became of the weights that the checkpoint stores quantized.

    Args:
        still_packed: sizes of those with the checkpoint's own codes, in bytes.
        dequantized: sizes of those that are numbers.
        errors: relative errors of those that were quantized again.
        quantization: what to.
    """
    logger.info(
        "quantized weights of the checkpoint: %d stay packed (%.1f MB), %d were dequantized (%.1f MB)",
        len(still_packed),
        sum(still_packed) / 1e6,
        len(dequantized),
        sum(dequantized) / 1e6,
    )
    if errors:
        logger.warning(
            "%d weights that the checkpoint stores quantized were quantized again to %s: this adds an error of %.2f%% "
            "(root mean square, at most %.2f%%); omit quantization to keep the checkpoint's own values",
            len(errors),
            quantization,
            100 * math.sqrt(sum(e * e for e in errors) / len(errors)),
            100 * max(errors),
        )


def _relative_error(tensor: torch.Tensor, quantization: Quantization) -> float:
    """Root mean square of the error of quantization, relative to the weight's."""
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    error = size = 0.0
    for rows in tensor.reshape(-1, tensor.shape[-1]).split(max(1, _COMPARED_NUMBERS // tensor.shape[-1])):
        packed = quantize(rows.float(), quantization, here)
        if packed is not None:
            difference = torch.from_numpy(np.array(packed.dequantize())) - rows.float()
            error, size = error + float(difference.square().sum()), size + float(rows.float().square().sum())
    return math.sqrt(error / size) if size else 0.0


def stored_layouts(
    skeleton: Skeleton, store: TensorStore, platform: str, plan: ConversionPlan | None = None
) -> dict[str, PackedLayout]:
    """How the weights that stay packed as another library's checkpoint stores them are packed, by name.

    Args:
        skeleton: the model structure.
        store: the checkpoint's weights.
        platform: of the devices.
        plan: from `plan_conversion`.
    """
    if not store.packed:
        return {}
    plan = plan or plan_conversion(skeleton, store.names, store.rules)
    can_multiply = weights_to_quantize(skeleton.module, skeleton.shapes, skeleton.tied)
    found: dict[str, PackedLayout] = {}
    for step in plan.steps:
        name = skeleton.tied.get(step.target, step.target)
        if name not in can_multiply or not all(source in store.packed for source, _ in step.sources):
            continue
        own = store.packed[step.sources[0][0]]
        whole = skeleton.shapes[name].mT if own.is_transposed else skeleton.shapes[name]
        layout = kept_layout(dataclasses.replace(own, shape=tuple(whole.shape)), platform)
        if layout is not None:
            found[name] = layout
    return found


def load_quantized(skeleton: Skeleton, store: TensorStore, layout: Layout) -> dict[str, Weight]:
    """Load a quantized checkpoint written by `save_pretrained`: the module's own names, codes and scales.

    Raises:
        CheckpointCorruptError: tensors are missing, unexpected or misshapen.
    """
    names = set(store.names)
    packed = saved_parts(skeleton.shapes, names)
    _check_names({*skeleton.shapes, *(n for parts in packed.values() for n in parts.names.values())}, names)
    target_dtype = dtype_rule(skeleton.module, skeleton.dtype)
    weights: dict[str, Weight] = {}
    for name, meta in skeleton.shapes.items():
        wanted, where = target_dtype(name, meta), layout.weight(name)
        if (parts := packed.get(name)) is not None:
            tensors = {field: store.read(stored) for field, stored in parts.names.items()}
            of_weight: Any = {"shape": tuple(meta.shape), "is_transposed": parts.is_transposed}
            weights[name] = restore(tensors, wanted, where, **of_weight, encoding=parts.encoding)
        else:
            tensor = store.read(name)
            weights[name] = place(tensor.to(wanted) if tensor.is_floating_point() else tensor, where)
        _check_stored_shape(name, weights[name], meta)
    return weights


def load_arrays(
    skeleton: Skeleton, store: OrbaxStore | SafetensorsArrays, layout: Layout
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Load arrays under the module's own names, quantized or not: of orbax, or of a bundle's safetensors.

    Returns:
        Same as `load_weights`; placeholders instead of arrays for an abstract layout.

    Raises:
        CheckpointCorruptError: arrays are missing, unexpected, misshapen or cannot be read.
        OutOfMemoryError: the weights do not fit on the device.
    """
    stored = store.arrays
    tied = {alias: name for alias, name in skeleton.tied.items() if alias not in stored}
    expected = {**skeleton.shapes, **{a: skeleton.shapes[name] for a, name in skeleton.tied.items() if a in stored}}
    packed = saved_parts(expected, stored)
    of_weight = {part: (field, name) for name, parts in packed.items() for field, part in parts.names.items()}
    _check_names({*expected, *of_weight}, set(stored))
    target_dtype = dtype_rule(skeleton.module, skeleton.dtype)
    weight_dtypes = {name: jnp.dtype(str(target_dtype(name, meta)).split(".")[-1]) for name, meta in expected.items()}

    def wanted(stored_name: str) -> jax.ShapeDtypeStruct:
        found, (field, weight) = stored[stored_name], of_weight.get(stored_name, (None, stored_name))
        is_float = field is None and jnp.issubdtype(found.dtype, jnp.floating)
        where = layout.weight(skeleton.tied.get(weight, weight))
        if field is not None:
            where = matrix_sharding(where, expected[weight].ndim, packed[weight].is_transposed)
            where = part_sharding(field, where)
        return jax.ShapeDtypeStruct(found.shape, weight_dtypes[weight] if is_float else found.dtype, sharding=where)

    arrays: Any = {name: wanted(name) for name in stored}
    if not layout.is_described:
        needed = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays.values())
        check_fits(needed, layout.device, "Loading the weights", "Use more or larger devices.")
        arrays = store.read(arrays)
    weights: dict[str, Weight] = {name: arrays[name] for name in expected}
    for name in expected:
        if (parts := packed.get(name)) is not None:
            encoding = parts.encoding or encoding_of(arrays[name].dtype.name) or "int8"
            shape, stored_width = tuple(expected[name].shape), arrays[name].shape[-1]
            weights[name] = QuantizedArray(
                **{field: arrays[part] for field, part in parts.names.items()},
                encoding=encoding,
                dtype=weight_dtypes[name],
                width=width_in(shape, stored_width, encoding, is_transposed=parts.is_transposed),
                is_transposed=parts.is_transposed,
                spec=spec_of(arrays[name].sharding),
            )
        _check_stored_shape(name, weights[name], expected[name])
    return weights, tied


def _check_names(expected: set[str], stored: set[str]) -> None:
    missing, unexpected = sorted(expected - stored), sorted(stored - expected)
    if missing or unexpected:
        raise CheckpointCorruptError(
            f"{len(missing)} tensors are missing and {len(unexpected)} are unexpected: {(missing + unexpected)[:3]} …",
            "The weights do not match config.json.",
            "Save the model again.",
        )


def _check_stored_shape(name: str, weight: Weight, expected: torch.Tensor) -> None:
    if tuple(weight.shape) != tuple(expected.shape):
        raise CheckpointCorruptError(
            f"{name!r} has shape {tuple(weight.shape)} in the checkpoint; the model expects {tuple(expected.shape)}.",
            "config.json does not match the weights.",
            "Save the model again.",
        )


def initialise(skeleton: Skeleton, names: list[str], layout: Layout) -> dict[str, jax.Array]:
    """Initialise weights missing from the checkpoint, see `draw_missing`."""
    return {name: place(tensor, layout.weight(name)) for name, tensor in draw_missing(skeleton, names).items()}


def settle_ties(weights: dict[str, Weight], tied: dict[str, str]) -> dict[str, str]:
    """Drop stored copies of tied weights, rename weights stored only under an alias, and untie those that differ."""
    kept: dict[str, str] = {}
    for alias, name in tied.items():
        if alias in weights and name not in weights:
            weights[name] = weights.pop(alias)
        elif alias in weights:
            if not _equal(weights[alias], weights[name]):
                logger.warning(
                    "%s and %s are tied in the config but stored with different values; leaving them untied",
                    alias,
                    name,
                )
                continue
            del weights[alias]
        kept[alias] = name
    return kept


def _equal(a: Weight, b: Weight) -> bool:
    """Compare bit for bit, in chunks: comparing whole arrays would need memory for another embedding table."""
    if isinstance(a, QuantizedArray) or isinstance(b, QuantizedArray):
        parts = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False))
        return jax.tree.structure(a) == jax.tree.structure(b) and all(_equal(x, y) for x, y in parts)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (np.asarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return all(
        np.array_equal(one[i : i + _COMPARED_BYTES], other[i : i + _COMPARED_BYTES])
        for i in range(0, one.size, _COMPARED_BYTES)
    )
