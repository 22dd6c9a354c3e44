"""GPTQ's and AWQ's arithmetic, against the papers' formulas in float64, and the errors that they are there to lower."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfax.errors import InvalidInputError
from hfax.quantization import rounding
from hfax.quantization.awq import best_factor
from hfax.quantization.gptq import choose_scale, gptq, round_to
from hfax.quantization.rounding import Rounding

OUT, WIDTH, GROUP = 48, 256, 64


@pytest.fixture(scope="module")
def weight() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((OUT, WIDTH)), jnp.float32)


@pytest.fixture(scope="module")
def inputs() -> np.ndarray:
    """[tokens, in]: correlated channels of different sizes, one of which is never used."""
    rng = np.random.default_rng(1)
    found = rng.standard_normal((512, 40)) @ rng.standard_normal((40, WIDTH)) + 0.3 * rng.standard_normal((512, WIDTH))
    found *= np.exp(rng.standard_normal(WIDTH))
    found[:, 7] = 0
    return found


@pytest.fixture(scope="module")
def moment(inputs: np.ndarray) -> jax.Array:
    return jnp.asarray(inputs.T @ inputs, jnp.float32)


def error_of(weight: jax.Array, codes: jax.Array, scale: jax.Array, inputs: np.ndarray) -> float:
    numbers = np.asarray(codes, np.float64) * np.repeat(np.asarray(scale, np.float64), GROUP, axis=1)
    return float(np.square(inputs @ (numbers - np.asarray(weight, np.float64)).T).sum())


def reference(
    weight: np.ndarray, moment: np.ndarray, scale: np.ndarray, bits: int, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of the paper without its blocks: the inverse of what is left is computed again for each column.

    Returns the codes, and how far each number was from the border between two codes.
    """
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    weight, moment = weight.copy(), moment.copy()
    diagonal = np.diag(moment).copy()
    weight[:, diagonal == 0] = 0
    np.fill_diagonal(moment, np.where(diagonal == 0, 1, diagonal) + damping * diagonal.mean())
    scales = np.repeat(scale, GROUP, axis=1)
    codes, distance = np.zeros(weight.shape, int), np.zeros(weight.shape)
    left = list(np.argsort(-np.diag(moment), kind="stable"))
    while left:
        column, inverse = left[0], np.linalg.inv(moment[np.ix_(left, left)])
        number = weight[:, column] / scales[:, column]
        codes[:, column] = np.clip(np.rint(number), low, high)
        distance[:, column] = np.abs(np.abs(number - np.floor(number)) - 0.5)
        error = (weight[:, column] - codes[:, column] * scales[:, column]) / inverse[0, 0]
        weight[:, left] -= error[:, None] * inverse[0][None]
        left = left[1:]
    return codes, distance


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_the_paper_s_algorithm(weight: jax.Array, moment: jax.Array, bits: int) -> None:
    codes, scale, _ = gptq(weight, moment, bits=bits, group=GROUP, damping=0.05, scale_dtype=jnp.dtype("bfloat16"))
    expected, distance = reference(
        np.asarray(weight, np.float64), np.asarray(moment, np.float64), np.asarray(scale, np.float64), bits, 0.05
    )
    # a row in which a number lies on the border between two codes may go on in another way
    is_clear = distance.min(axis=1) > 1e-4
    assert is_clear.sum() > OUT // 3
    assert np.array_equal(np.asarray(codes)[is_clear], expected[is_clear])


@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_closer_than_by_rounding(
    weight: jax.Array, moment: jax.Array, inputs: np.ndarray, bits: int
) -> None:
    options = {"bits": bits, "group": GROUP}
    codes, scale, _ = gptq(weight, moment, **options, damping=0.01, scale_dtype=jnp.dtype("bfloat16"))
    plain_scale = choose_scale(weight, jnp.ones(WIDTH), **options, dtype=jnp.dtype("bfloat16"))
    plain = round_to(weight, jnp.repeat(plain_scale.astype(jnp.float32), GROUP, axis=1), bits)
    assert error_of(weight, codes, scale, inputs) < 0.5 * error_of(weight, plain, plain_scale, inputs)


def test_the_scale_with_the_smallest_error_is_chosen(weight: jax.Array) -> None:
    importance = jnp.exp(jnp.asarray(np.random.default_rng(2).standard_normal(WIDTH), jnp.float32))
    found = choose_scale(weight, importance, bits=4, group=GROUP, dtype=jnp.dtype("float32"))

    def error_with(scale: jax.Array) -> jax.Array:
        scales = jnp.repeat(scale, GROUP, axis=1)
        errors = importance * jnp.square(weight - round_to(weight, scales, 4) * scales)
        return errors.reshape(OUT, -1, GROUP).sum(-1)

    for shrinkage in np.arange(0.6, 1.01, 0.025):
        groups = np.asarray(weight).reshape(OUT, -1, GROUP)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], axis=-1)[..., 0]
        other = jnp.asarray(largest / -8 * shrinkage, jnp.float32)
        assert bool((error_with(found) <= error_with(other) * (1 + 1e-5)).all())


def test_a_matrix_of_zeros_has_codes_of_zero() -> None:
    codes, scale, _ = gptq(
        jnp.zeros((OUT, WIDTH)), jnp.eye(WIDTH), bits=4, group=GROUP, damping=0.01, scale_dtype=jnp.dtype("bfloat16")
    )
    assert not np.asarray(codes).any()
    assert not np.asarray(scale, np.float32).any()


def test_moments_that_float32_cannot_invert_get_more_damping(
    weight: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens for 256 channels: rounded to float32, some of the moment's eigenvalues are below zero."""
    inputs = np.random.default_rng(3).standard_normal((8, WIDTH))
    moment = jnp.asarray(inputs.T @ inputs, jnp.float32)
    tried = []

    def noting(*arguments: Any, damping: float, **options: Any) -> Any:
        tried.append(damping)
        return gptq(*arguments, damping=damping, **options)

    monkeypatch.setattr(rounding, "gptq", noting)
    found = Rounding(method="gptq", bits=4, group_size=GROUP, damping=1e-9).round(weight, moment)
    assert len(tried) > 1
    assert bool(jnp.isfinite(found.dequantize()).all())
    with pytest.raises(InvalidInputError, match="moments that cannot be inverted"):
        Rounding(method="gptq", bits=4, group_size=GROUP, damping=0.01).round(weight, moment * jnp.nan)


def test_awq_s_factor_lowers_the_error_of_products(weight: jax.Array, moment: jax.Array, inputs: np.ndarray) -> None:
    factor = best_factor([weight], moment, bits=4, group=GROUP)
    errors = []
    for by in (factor, jnp.ones(WIDTH)):
        importance = jnp.diagonal(moment) / jnp.square(by)
        scale = choose_scale(weight * by, importance, bits=4, group=GROUP, dtype=jnp.dtype("float32"))
        codes = round_to(weight * by, jnp.repeat(scale, GROUP, axis=1), 4)
        errors.append(error_of(weight * by, codes, scale, inputs / np.asarray(by, np.float64)))
    assert errors[0] < 0.9 * errors[1]
    assert float(factor.max()) * float(factor.min()) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "bits", "group", "kind"),
    [
        ((64, 256), 4, 32, (4, 32)),
        ((64, 192), 4, 128, (4, 64)),
        ((64, 96), 4, 64, (4, 32)),
        ((64, 64), 4, 128, (8, 64)),
        ((64, 256), 8, 64, (8, 64)),
        ((64, 100), 4, 128, None),
        ((8, 256), 4, 128, None),
        ((4, 64, 256), 4, 128, (4, 128)),
    ],
)
def test_the_shape_decides_bits_and_group(
    shape: tuple[int, ...], bits: int, group: int, kind: tuple[int, int] | None
) -> None:
    assert Rounding(method="rtn", bits=bits, group_size=group, damping=0.01).kind_of(shape) == kind
