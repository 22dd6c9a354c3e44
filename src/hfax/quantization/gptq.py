"""GPTQ: rounds a matrix column by column, and corrects the columns that are left for the error of those that are done.

From Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv:2210.17323). Columns
are rounded in the order of their importance, with scales chosen before (llm-compressor's `actorder="static"`), so that groups stay
those of neighbouring columns and products need no permutation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_CODES = {8: (-127, 127), 4: (-8, 7)}
"""Smallest and largest code by bits."""
_SHRINKAGES = {8: (1.0,), 4: tuple(1 - i / 40 for i in range(17))}
"""Scales that are tried, by bits, as parts of the one that clips nothing."""
_BLOCK = (128, 64, 32)
"""Columns that are corrected one by one, before all others at once; the first that divides the width."""
_exactly = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames=("bits", "group", "scale_dtype"))
def gptq(
    weight: jax.Array, moment: jax.Array, *, bits: int, group: int, damping: float, scale_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Round a matrix so that its products with inputs like those of a sample change little.

    Args:
        weight: [out, in].
        moment: [in, in] float32, sum over the sample of the outer product of its inputs.
        bits: of a code: 8 or 4.
        group: columns that share a scale; divides `in`.
        damping: part of the mean of the diagonal that is added to it.
        scale_dtype: of the scales.

    Returns:
        Codes, [out, in] int8; scales, [out, in / group]; and whether the moment could be inverted: else the codes mean nothing, and
        more damping is needed.
    """
    rows = weight.astype(jnp.float32).T
    width = len(rows)
    diagonal = jnp.diagonal(moment)
    is_unused = diagonal == 0
    rows = jnp.where(is_unused[:, None], 0, rows)
    importance = jnp.where(is_unused, 1, diagonal) + damping * diagonal.mean()
    scale = choose_scale(rows.T, importance, bits=bits, group=group, dtype=scale_dtype)
    order = jnp.argsort(-importance)
    moment = jnp.where(jnp.eye(width, dtype=bool), importance, moment)[order][:, order]
    factor = jnp.linalg.cholesky(moment)
    inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(width, dtype=jnp.float32))
    upper = jnp.linalg.cholesky(inverse).T
    scales = jnp.repeat(scale.astype(jnp.float32).T, group, axis=0)[order]
    codes = _round_in_order(rows[order], upper, scales, bits)
    return codes[jnp.argsort(order)].T, scale, jnp.isfinite(upper).all()


def _round_in_order(rows: jax.Array, upper: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Codes, [in, out] int8.

    Args:
        rows: [in, out], the columns of the weight, in order.
        upper: [in, in], the upper Cholesky factor of the inverse of the inputs' moment.
        scales: [in, out].
        bits: of a code.
    """
    width = len(rows)
    block = next((size for size in _BLOCK if width % size == 0), width)

    def round_row(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        part, part_scales, factors, codes, errors = state
        row, scale = part[i], part_scales[i]
        code = round_to(row, scale, bits)
        error = (row - code * scale) / factors[i, i]
        part = part - factors[i][:, None] * error[None]
        return part, part_scales, factors, codes.at[i].set(code.astype(jnp.int8)), errors.at[i].set(error)

    def round_block(n: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, codes = state
        begin = n * block
        part, part_scales = (jax.lax.dynamic_slice_in_dim(a, begin, block) for a in (rows, scales))
        of_block = jax.lax.dynamic_slice_in_dim(upper, begin, block)
        factors = jax.lax.dynamic_slice_in_dim(of_block, begin, block, axis=1)
        start = (part, part_scales, factors, jnp.zeros(part.shape, jnp.int8), jnp.zeros_like(part))
        *_, found, errors = jax.lax.fori_loop(0, block, round_row, start)
        is_left = jnp.arange(width) >= begin + block
        rows = rows - _exactly(jnp.where(is_left, of_block, 0).T, errors)
        return rows, jax.lax.dynamic_update_slice_in_dim(codes, found, begin, axis=0)

    start = (rows, jnp.zeros(rows.shape, jnp.int8))
    return jax.lax.fori_loop(0, width // block, round_block, start)[1]


def round_to(numbers: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """The nearest codes, as float32; a scale of 0 gives 0."""
    low, high = _CODES[bits]
    return jnp.clip(jnp.rint(numbers / jnp.where(scale == 0, 1, scale)), low, high)


@functools.partial(jax.jit, static_argnames=("bits", "group", "dtype"))
def choose_scale(weight: jax.Array, importance: jax.Array, *, bits: int, group: int, dtype: jnp.dtype) -> jax.Array:
    """The scale of each group with the smallest sum of squared errors, weighted by the columns' importance.

    Args:
        weight: [out, in].
        importance: [in] float32.
        bits: of a code: 8 or 4.
        group: columns that share a scale.
        dtype: of the scales.

    Returns:
        [out, in / group]; of 4 bits, the group's largest magnitude is -8 or beyond.
    """
    groups = weight.astype(jnp.float32).reshape(len(weight), -1, group)
    high, low = groups.max(-1), groups.min(-1)
    largest = jnp.maximum(high, -low) / 127 if bits == 8 else jnp.where(high > -low, high, low) / -8
    weights = importance.reshape(-1, group)

    def error_of(scale: jax.Array) -> jax.Array:
        codes = round_to(groups, scale[..., None], bits)
        return (weights * jnp.square(groups - codes * scale[..., None])).sum(-1)

    def better(best: tuple[jax.Array, jax.Array], part: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        scale = (largest * part).astype(dtype).astype(jnp.float32)
        error = error_of(scale)
        is_better = error < best[1]
        return (jnp.where(is_better, scale, best[0]), jnp.where(is_better, error, best[1])), None

    start = (largest, jnp.full_like(largest, jnp.inf))
    (scale, _), _ = jax.lax.scan(better, start, jnp.asarray(_SHRINKAGES[bits], jnp.float32))
    return scale.astype(dtype)
