"""Lowerings of single torch operations in plain JAX that are faster or more accurate than torchax's."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from hfax.kernels import norms, quantized
from hfax.kernels import target as where
from hfax.kernels.constraints import split_by_rows
from hfax.kernels.linear import linear
from hfax.kernels.masked_rows import masked_rows
from hfax.patches.patch import OpPatch, Patch


def _linear(input: Any, weight: Any, bias: Any = None) -> jax.Array:
    """torch's `linear`, for plain and quantized weights."""
    return (
        quantized.linear(input, weight, bias)
        if isinstance(weight, quantized.QuantizedArray)
        else linear(input, weight, bias)
    )


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """torch's `embedding`: rows of [rows, width] by an index of any shape.

    No gradient flows to the row `padding_idx`, as in torch; `scale_grad_by_freq` and `sparse` are ignored.

    Raises:
        NotImplementedError: `max_norm` is set, which would modify the table.
    """
    if max_norm is not None:
        raise NotImplementedError("embedding with max_norm has no lowering")
    if isinstance(weight, quantized.QuantizedArray):
        return weight.rows(input)
    rows: Any = (_rows_with_gradient if where.is_differentiated() else _rows)(weight, input)
    if padding_idx is None:
        return rows
    is_padding = input == padding_idx % weight.shape[0]
    return jnp.where(is_padding[..., None], jax.lax.stop_gradient(rows), rows)


def _rows(weight: jax.Array, index: jax.Array) -> jax.Array:
    if where.mesh() is not None and index.size == 1:
        # XLA makes the gather of a single row a dynamic-slice, and for that it gathers a table that is split by rows; of two
        # rows, each device looks up those in its own part, and their sum is an all-reduce of the activations
        twice = jnp.broadcast_to(index.reshape(1), (2,))
        return jnp.take(weight, twice, axis=0, mode="clip")[0].reshape(*index.shape, *weight.shape[1:])
    return jnp.take(weight, index, axis=0, mode="clip")


@jax.custom_vjp
def _rows_with_gradient(weight: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a table. The zeros for the table's gradient are allocated in the backward pass, not kept from the forward pass."""
    return _rows(weight, index)


def _rows_forward(weight: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
    return _rows(weight, index), (weight, index)


def _rows_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    weight, index = kept
    zero, gradient = jax.lax.optimization_barrier((jnp.zeros((), gradient.dtype), gradient))
    places = jnp.clip(index, 0, weight.shape[0] - 1)
    return jnp.broadcast_to(zero, weight.shape).at[places].add(gradient).astype(weight.dtype), None


_rows_with_gradient.defvjp(_rows_forward, _rows_backward)


def rms_norm(
    input: jax.Array, normalized_shape: Any, weight: jax.Array | None = None, eps: float | None = None
) -> jax.Array:
    """torch's `rms_norm` over the last axes, in float32; `eps` defaults to the input dtype's epsilon."""
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    width = math.prod(normalized_shape)
    scale = jnp.ones((width,), input.dtype) if weight is None else weight.reshape(width)
    dtype = jnp.result_type(input.dtype, scale.dtype)
    out = norms.rms_norm(input.reshape(-1, width), scale, eps)
    return out.astype(dtype).reshape(input.shape)


def roll(input: jax.Array, shifts: Any, dims: Any = None) -> jax.Array:
    """torch's `roll`."""
    one = lambda value: (value,) if isinstance(value, int) else tuple(value)  # noqa: E731
    if dims is None or not one(dims):
        flat: Any = norms.rolled_by(input.reshape(-1), one(shifts), (0,))
        return flat.reshape(input.shape)
    out: Any = norms.rolled_by(input, one(shifts), one(dims))
    return out


def cross_entropy(
    input: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> jax.Array:
    """torch's `cross_entropy`, without indexing into the logits, since the gradient would be a slow scatter.

    Args:
        input: logits, [classes], [batch, classes] or [batch, classes, …].
        target: class indices, shaped like `input` without the classes axis; or probabilities, shaped like `input`.
        weight: [classes].
        size_average: deprecated in torch; must be None.
        ignore_index: target value that is ignored.
        reduce: deprecated in torch; must be None.
        reduction: "mean", "sum" or "none".
        label_smoothing: share of the probability spread over all classes.

    Raises:
        NotImplementedError: a deprecated argument is passed.
    """
    if size_average is not None or reduce is not None:
        raise NotImplementedError("cross_entropy with size_average or reduce has no lowering")
    axis = 1 if input.ndim > 1 else 0
    classes = input.shape[axis]
    weights = jnp.ones((classes,), input.dtype) if weight is None else weight
    across = weights.reshape((1, classes, *[1] * (input.ndim - 2)) if axis else (classes,))
    total = jax.nn.logsumexp(input, axis=axis)
    if target.shape == input.shape and jnp.issubdtype(target.dtype, jnp.floating):
        wanted = target * (1 - label_smoothing) + label_smoothing / classes
        losses = (wanted * across * (jnp.expand_dims(total, axis) - input)).sum(axis=axis)
        count: Any = losses.size
    else:
        counts = target != ignore_index
        losses: Any = _losses_of_classes(axis, input, target)
        own = jnp.where(counts, 1.0 if weight is None else weights[jnp.where(counts, target, 0)], 0.0)
        losses = losses * own
        if label_smoothing:
            smooth = (across * (jnp.expand_dims(total, axis) - input)).sum(axis=axis)
            losses = (1 - label_smoothing) * losses + label_smoothing / classes * jnp.where(counts, smooth, 0.0)
        count = own.sum()
    losses = losses.astype(input.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = jnp.asarray(count).astype(losses.dtype)
    mean = losses.sum() / jnp.where(count == 0, 1, count)
    return jnp.where(count == 0, jnp.nan, mean)  # as in torch if all targets are ignored; the gradient is 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses_of_classes(axis: int, logits: jax.Array, target: jax.Array) -> jax.Array:
    """The negative log-probability of each target; 0 for targets that are not a class.

    Its gradient is one pass over the logits, and keeps only them.
    """
    return _losses_forward(axis, logits, target)[0]


def _losses_forward(axis: int, logits: jax.Array, target: jax.Array) -> tuple[jax.Array, Any]:
    total = jax.nn.logsumexp(logits, axis=axis)
    if where.mesh() is None:  # over a mesh, where classes may be sharded, only by comparison
        is_class = (target >= 0) & (target < logits.shape[axis])
        index = jnp.expand_dims(jnp.where(is_class, target, 0), axis)
        picked = jnp.where(is_class, jnp.take_along_axis(logits, index, axis).squeeze(axis), 0)
    else:
        picked = jnp.where(_is_target(axis, logits, target), logits, 0).sum(axis=axis)
    return total - picked, (logits, target, total)


def _losses_backward(axis: int, kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    logits, target, total = kept
    probabilities = jnp.exp(logits - jnp.expand_dims(total, axis))
    wanted = _is_target(axis, logits, target).astype(logits.dtype)
    return (probabilities - wanted) * jnp.expand_dims(gradient, axis), None


_losses_of_classes.defvjp(_losses_forward, _losses_backward)


def _is_target(axis: int, logits: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.expand_dims(target, axis) == jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)


def interpolate(
    x: jax.Array,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> jax.Array:
    """torch's `interpolate`, axis by axis, with weights computed by torch for each axis.

    Args:
        x: [batch, channels, *spatial], one to three spatial axes.
        size: new spatial sizes, or one for all.
        scale_factor: scale factors, instead of `size`.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear" or "area".
        align_corners: preserve the corner values.
        recompute_scale_factor: compute positions from the rounded sizes, not the factors.
        antialias: wider filters when downsampling.

    Returns:
        [batch, channels, *size] in the dtype of `x`; sums are float32.
    """
    axes = x.ndim - 2
    sizes = tuple(size) if isinstance(size, (list, tuple)) else (size,) * axes
    factors = tuple(scale_factor) if isinstance(scale_factor, (list, tuple)) else (scale_factor,) * axes
    options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    out = x
    for axis in range(axes):
        length = x.shape[2 + axis]
        given: dict[str, Any] = {"recompute_scale_factor": recompute_scale_factor}
        if sizes[axis] is not None:
            given = {"size": tuple(int(sizes[axis]) if i == axis else 2 for i in range(axes))}
        elif factors[axis] is not None:
            given["scale_factor"] = tuple(float(factors[axis]) if i == axis else 1.0 for i in range(axes))
        weights = _axis_weights(length, axis, axes, tuple(sorted({**options, **given}.items())))
        if weights.shape == (length, length) and (weights == np.eye(length)).all():
            continue
        moved = jnp.moveaxis(out, 2 + axis, -1)
        if mode.startswith("nearest"):
            moved = jnp.take(moved, weights.argmax(0), axis=-1)
        else:
            moved = jnp.matmul(moved.astype(jnp.float32), weights, precision="highest")
        out = jnp.moveaxis(moved, -1, 2 + axis)
    return out.astype(x.dtype)


def embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """torch's `embedding_bag` for bags of equal size, [bags, n] indices into [rows, width]: [bags, width].

    Raises:
        NotImplementedError: offsets, a norm bound, a padding index or mode "max" is passed.
    """
    if (
        input.ndim != 2
        or offsets is not None
        or max_norm is not None
        or padding_idx is not None
        or mode not in ("sum", "mean")
    ):
        raise NotImplementedError(
            "embedding_bag with offsets, a norm bound, a padding index or mode='max' has no lowering"
        )
    rows = weight[input]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    return rows.sum(axis=1) if mode == "sum" else rows.mean(axis=1)


def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> jax.Array:
    """torch's `aten.convolution`.

    One with a single place, as those that embed a patch each, is a matrix product. Over a mesh, a grouped convolution is replicated
    on every device.
    """
    from torchax.ops.jaten import _aten_convolution

    if not transposed and groups == 1 and not any(padding) and input.shape[2:] == weight.shape[2:] and input.ndim > 2:
        out = linear(input.reshape(len(input), -1), weight.reshape(len(weight), -1), bias)
        return out.reshape(*out.shape, *(1 for _ in input.shape[2:]))
    out = _aten_convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return out if groups == 1 else split_by_rows(out)


def masked_scatter(input: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """torch's `masked_scatter`: numbers of `source`, in order, where the mask is set.

    Args:
        input: of any shape.
        mask: bool, of a shape that broadcasts with that of `input`. Where its last axes have one entry, rows are replaced.
        source: of any shape; has at least as many numbers as are replaced, which is not checked.
    """
    shape = jnp.broadcast_shapes(input.shape, mask.shape)
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    whole = len(shape)
    while whole and mask.shape[whole - 1] == 1:
        whole -= 1
    width = math.prod(shape[whole:])
    if not width or source.size < width:
        return jnp.broadcast_to(input, shape)
    is_set = jnp.broadcast_to(mask.reshape(mask.shape[:whole]), shape[:whole])
    rows = source.reshape(-1)[: source.size // width * width].reshape(-1, *shape[whole:])
    return masked_rows(jnp.broadcast_to(input, shape), is_set, rows)


@functools.lru_cache(maxsize=64)
def _axis_weights(length: int, axis: int, axes: int, options: tuple[tuple[str, Any], ...]) -> np.ndarray:
    """[length, new length] float32: the weights of `interpolate` along one axis, which torch computes from unit vectors."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        # the other axes have two places, not one: torch's antialiased kernel takes the wrong strides for one
        shape = [1, length, *([1] * axis), length, *([1] * (axes - axis - 1))]
        units = torch.eye(length).reshape(shape).expand([1, length, *(length if i == axis else 2 for i in range(axes))])
        out = torch.nn.functional.interpolate(units.contiguous(), **dict(options))
        return out.movedim(2 + axis, 2).flatten(3)[..., 0][0].numpy() if axes > 1 else out[0].numpy()


PATCHES: list[Patch] = [
    OpPatch(
        name="cross-entropy",
        why="torchax picks each target's logit by an index, whose gradient is a scatter: a tenth of a step of training on CPU",
        ops=("torch.nn.functional.cross_entropy",),
        lower=cross_entropy,
    ),
    OpPatch(
        name="rms-norm",
        why="of torch's own steps JAX makes a gradient that keeps float32 copies and adds up rows slowly on CPU",
        ops=("torch.nn.functional.rms_norm", "aten.rms_norm"),
        lower=rms_norm,
    ),
    OpPatch(
        name="roll",
        why="the gradient of torchax's form pads and adds",
        ops=("torch.roll", "aten.roll"),
        lower=roll,
    ),
    OpPatch(
        name="interpolate",
        why="torchax has no antialiased form, and rounds positions differently; sizes must be known here as there",
        ops=("torch.nn.functional.interpolate",),
        lower=interpolate,
    ),
    OpPatch(
        name="embedding-bag",
        why="`aten::_embedding_bag` has no lowering",
        ops=("torch.nn.functional.embedding_bag",),
        lower=embedding_bag,
    ),
    OpPatch(
        name="convolution",
        why=(
            "XLA (jaxlib 0.10) computes wrong numbers where it splits one of several groups by its outputs, and libtpu takes "
            "seconds to compile the embedding of patches of video"
        ),
        ops=("aten.convolution",),
        lower=convolution,
    ),
    OpPatch(
        name="masked-scatter",
        why="torchax counts and gathers single numbers: for features among embeddings, a million instead of some hundred rows",
        ops=("aten.masked_scatter",),
        lower=masked_scatter,
    ),
    OpPatch(
        name="linear",
        why="torchax multiplies bfloat16 in bfloat16: on CPU 15 times slower for one row, and rounded after every addend",
        ops=("torch.nn.functional.linear", "aten.linear"),
        lower=_linear,
        takes_quantized=True,
    ),
    OpPatch(
        name="embedding",
        why="of a quantized table only the rows that are looked up become numbers",
        ops=("torch.nn.functional.embedding",),
        lower=embedding,
        takes_quantized=True,
    ),
]
