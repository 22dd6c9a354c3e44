"""AWQ: scales a layer's channels by how large their inputs are, so that rounding costs the large ones less.

From Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (arXiv:2306.00978). The columns
of a matrix are multiplied with a factor, and the module that makes its input divides by it: a norm, or the linear module before.
Which module that is follows from a trial: with factors that are powers of two, the layer's output stays the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from hfax.quantization.gptq import choose_scale, round_to

Arrays = dict[str, Any]
_EXPONENTS = tuple(i / 20 for i in range(20))
"""Of the inputs' size: 0 changes nothing."""


def scale_channels(
    layer: torch.nn.Module,
    prefix: str,
    weights: Arrays,
    moments: Mapping[tuple[str, ...], jax.Array],
    rounding_of: Callable[[str], tuple[int, int] | None],
    run: Callable[[Arrays], jax.Array],
) -> tuple[Arrays, dict[tuple[str, ...], jax.Array]]:
    """A layer's weights with scaled channels, which compute the same.

    Args:
        layer: the module.
        prefix: its name.
        weights: of the layer, by name.
        moments: of the inputs of its linear modules, see `LayerSteps.observe`.
        rounding_of: bits and group size of a weight by name; None: it is not quantized.
        run: the layer's output on some data, for weights of the layer.

    Returns:
        The weights, and the moments of the scaled inputs.
    """
    expected = np.asarray(run(weights))
    scaled_moments = dict(moments)
    for modules, moment in moments.items():
        names = [f"{module}.weight" for module in modules]
        kinds = {rounding_of(name) for name in names}
        if len(kinds) != 1 or (kind := kinds.pop()) is None:
            continue  # a matrix that is not quantized reads the same input
        width = len(moment)
        trial = jnp.exp2(jnp.arange(width) % 3 - 1.0)  # products and sums scale without rounding: outputs stay equal

        def output(maker: str | None, weights: Arrays = weights, names: Sequence[str] = names) -> np.ndarray:
            return np.asarray(run(_scaled(weights, maker, names, trial)))  # noqa: B023 (called in this round)

        if np.array_equal(output(None), expected):
            continue  # the output does not depend on these matrices, so the trial would tell nothing
        makers = (m for m in _makers(layer, prefix, width, names) if m in weights)
        if (maker := next((m for m in makers if np.array_equal(output(m), expected)), None)) is None:
            continue
        factor = best_factor([weights[name] for name in names], moment, bits=kind[0], group=kind[1])
        weights = _scaled(weights, maker, names, factor)
        expected = np.asarray(run(weights))  # rounding has changed it
        scaled_moments[modules] = moment / factor / factor[:, None]
    return weights, scaled_moments


def _makers(layer: torch.nn.Module, prefix: str, width: int, readers: Sequence[str]) -> list[str]:
    """Weights with one number or one row for each channel, of modules that could make a matrix's input: norms first."""
    norms, linear = [], []
    for part, module in layer.named_modules():
        name, weight = f"{prefix}.{part}.weight", getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and name not in readers and len(weight) == width:
            (norms if weight.ndim == 1 else linear if isinstance(module, torch.nn.Linear) else []).append(name)
    return [*norms, *linear]


def _scaled(weights: Arrays, maker: str | None, readers: Sequence[str], factor: jax.Array) -> Arrays:
    """The weights with a factor on the columns of readers, and its inverse on the rows of what makes their input."""
    found = dict(weights)
    made = () if maker is None else (maker, maker.removesuffix("weight") + "bias")
    for name, given in ((name, weights[name]) for name in made if name in weights):
        inverse = (1 / factor).reshape(-1, *[1] * (given.ndim - 1))
        found[name] = (given.astype(jnp.float32) * inverse).astype(given.dtype)
    for name in readers:
        found[name] = (weights[name].astype(jnp.float32) * factor).astype(weights[name].dtype)
    return found


@functools.partial(jax.jit, static_argnames=("bits", "group"))
def best_factor(weights: Sequence[jax.Array], moment: jax.Array, *, bits: int, group: int) -> jax.Array:
    """The factor of each channel with the smallest error of the products, among powers of the inputs' size.

    Args:
        weights: [out, in] each, which read the same input.
        moment: [in, in] float32, the sum over tokens of the input's outer product.
        bits: of a code.
        group: columns that share a scale.

    Returns:
        [in] float32, around 1.
    """
    squares = jnp.diagonal(moment)
    size = jnp.sqrt(jnp.where(squares > 0, squares, jnp.where(squares > 0, squares, jnp.inf).min()))
    size = jnp.where(jnp.isfinite(size), size, 1.0)

    def factor_of(exponent: jax.Array) -> jax.Array:
        factor = size**exponent
        return factor / jnp.sqrt(factor.max() * factor.min())

    def error_of(exponent: jax.Array) -> jax.Array:
        factor = factor_of(exponent)
        error = jnp.zeros(())
        for weight in weights:
            numbers = weight.astype(jnp.float32)
            importance = squares / jnp.square(factor)
            scale = choose_scale(numbers * factor, importance, bits=bits, group=group, dtype=weight.dtype)
            scales = jnp.repeat(scale.astype(jnp.float32), group, axis=-1)
            difference = numbers - round_to(numbers * factor, scales, bits) * scales / factor
            product = jnp.matmul(difference, moment, precision=jax.lax.Precision.HIGHEST)
            error += (product * difference).sum()
        return error

    exponents = jnp.asarray(_EXPONENTS, jnp.float32)
    return factor_of(exponents[jnp.argmin(jax.lax.map(error_of, exponents))])
