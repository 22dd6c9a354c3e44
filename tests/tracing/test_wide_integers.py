"""Whole numbers that need 64 bits come out of a trace as torch computes them, and everything else keeps 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.tracing import bounds
from hfax.tracing import torchax as tracing
from hfax.tracing.trace_tensor import TraceTensor

_IDS = np.array([[250, 3, 77, 254, 9, 1], [1, 2, 251, 4, 5, 255]])
_PRIME = 5754853343
_P = torch.tensor(1000000007)


def _traced(function: Callable[..., Any], *arrays: np.ndarray, with_jit: bool = True) -> Any:
    module = torch.nn.Identity()
    call = lambda *given: tracing.call_module(  # noqa: E731
        module, {}, lambda _: tracing.unwrap(function(*(tracing.wrap(a) for a in given)))
    )
    given = [jnp.asarray(a.astype(np.int32) if a.dtype == np.int64 else a) for a in arrays]
    return (jax.jit(call) if with_jit else call)(*given)


def _hash(ids: torch.Tensor) -> torch.Tensor:
    return (ids.unfold(1, 3, 1) * torch.tensor(_PRIME) ** torch.arange(3)).sum(-1) % 30000


def _horner(ids: torch.Tensor) -> torch.Tensor:
    """No constant is large, and nothing tells how far it grows but the products themselves."""
    h = torch.zeros_like(ids[:, 0])
    for i in range(ids.shape[1]):
        h = h * 31337 + ids[:, i]
    return h % 999983


def _in_place(ids: torch.Tensor) -> torch.Tensor:
    h = ids + 0
    h *= _P
    h += ids
    h %= 65537
    return h


def _written(ids: torch.Tensor) -> torch.Tensor:
    h = ids + 0
    h[:, 1:3] = ids[:, 1:3] * 5000000000
    return h // 1000003


@pytest.mark.parametrize(
    "function",
    [
        _hash,
        _horner,
        _in_place,
        _written,
        lambda ids: ids * _PRIME,
        lambda ids: (ids * _PRIME).view(3, 4).transpose(0, 1)[1:].sum(0),
        lambda ids: (ids << 40) >> 38,
        lambda ids: ids**5 % 97,
        lambda ids: torch.tensor(3) ** (ids % 30) // 7,
        lambda ids: (ids * _PRIME).cumsum(-1),
        lambda ids: torch.gather(ids * _PRIME, 1, ids % 6),
        lambda ids: torch.zeros_like(ids).scatter(1, ids % 2, ids * _PRIME)[:, :0].sum(),
        lambda ids: (ids * _PRIME).abs().bitwise_xor(12345).flip(-1).repeat(2, 1),
        lambda ids: torch.prod(ids, dim=-1) % 1013,
        lambda ids: torch.cumprod(ids, dim=-1).remainder(1013),
        lambda ids: (ids + 3000000000) // 7,
        lambda ids: (ids ^ (ids * 0x9E3779B97F4A7C1)) & 0xFFFF,
        lambda ids: torch.where(ids > 100, ids, 1 << 40).max(dim=-1).values,
        lambda ids: torch.where(ids > 100, ids * _PRIME, torch.tensor(-5)).argmin(dim=-1),
        lambda ids: (ids * _PRIME).max(dim=-1).indices,
        lambda ids: (ids * _PRIME).min(dim=0, keepdim=True).values,
        lambda ids: (ids * _PRIME).argmax(),
        lambda ids: (ids * _PRIME).topk(2, dim=-1).indices,
        lambda ids: (ids * _PRIME).masked_fill(ids > 9, 1 << 50).min(),
        lambda ids: (ids * _PRIME).sort(dim=-1).indices,
        lambda ids: torch.cat([ids, ids * _PRIME], dim=-1) > 1 << 35,
        lambda ids: (ids * _PRIME).to(torch.int32),
        lambda ids: torch.full_like(ids, 1 << 33) + ids,
        lambda ids: torch.arange(300)[(ids * _PRIME) % 300],
        lambda ids: (ids * ids * ids * ids * ids).float() / 3,
        lambda ids: (ids * _PRIME) / 7,
    ],
)
@pytest.mark.parametrize("with_jit", [True, False])
def test_what_does_not_fit_is_what_torch_computes(function: Callable[..., Any], with_jit: bool) -> None:
    found, expected = np.asarray(_traced(function, _IDS, with_jit=with_jit)), function(torch.from_numpy(_IDS)).numpy()
    if expected.dtype.kind == "f":
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: ids + 1,
        lambda ids: (ids != 0).long() * ids,
        lambda ids: ids.cumsum(-1) - 1,
        lambda ids: _hash(ids),
        lambda ids: ids % 100 // 3,
        lambda ids: (ids * _PRIME).clamp(0, 9),
        lambda ids: ids.argmax(-1),
    ],
)
def test_what_is_known_to_fit_has_32_bits(function: Callable[..., Any]) -> None:
    assert _traced(function, _IDS).dtype == jnp.int32


def test_hashes_work_where_programs_are_transformed() -> None:
    module = torch.nn.Identity()
    expected = _hash(torch.from_numpy(_IDS)).numpy()

    def call(ids: Any) -> Any:
        return tracing.call_module(module, {}, lambda _: tracing.unwrap(_hash(tracing.wrap(ids))))

    ids = jnp.asarray(_IDS, jnp.int32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(ids[:, None])[:, 0], expected)
    looped = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, call(ids)), (0, jnp.zeros((2, 4), jnp.int32)))
    np.testing.assert_array_equal(looped[1], expected)
    gradient = jax.grad(jax.checkpoint(lambda x: (x * call(ids).astype(jnp.float32)).sum()))(jnp.ones((2, 4)))
    np.testing.assert_array_equal(gradient, expected.astype(np.float32))
    assert jnp.asarray(np.array([1])).dtype == jnp.int32  # the switch is for the calls alone


def test_a_write_that_a_shared_storage_cannot_hold_is_refused() -> None:
    def function(ids: torch.Tensor) -> torch.Tensor:
        h = ids + 0
        first = h[:, 0]
        first.copy_(ids[:, 1] * _PRIME)
        return h

    with pytest.raises(UnsupportedModelError, match=r"(?s)test_wide_integers.py:\d+ in function.*64 bits.*storage"):
        _traced(function, _IDS)


def test_a_tensor_that_is_written_to_forgets_its_bounds() -> None:
    seen: list[Any] = []

    def function(ids: torch.Tensor) -> torch.Tensor:
        scalar = ids[0, 0] + 0
        scalar.at_least, scalar.at_most = 0, 1  # type: ignore[attr-defined]
        scalar += 5
        seen.append(bounds.of(scalar))
        return scalar

    _traced(function, _IDS)
    assert seen == [(-(1 << 31), (1 << 31) - 1)]


_BOUNDED = {
    "kept": lambda a, b: a.unsqueeze(0).expand(3, -1, -1).transpose(0, 1)[:, 1:].reshape(-1).flip(0),
    "looked up": lambda a, b: torch.gather(a, 1, torch.zeros_like(a)).index_select(0, torch.tensor([1, 0])),
    "sums": lambda a, b: torch.add(a - b, b, alpha=3),
    "difference": lambda a, b: torch.sub(a, b, alpha=-2),
    "product": lambda a, b: a * b * -3,
    "quotient": lambda a, b: a // (b.abs() + 1).clamp(max=5),
    "quotient of any sign": lambda a, b: torch.div(b, -3, rounding_mode="trunc") + b // 4,
    "remainder": lambda a, b: torch.stack([a % 7, b % 7, b % -7, torch.fmod(b, 7)]),
    "clamped": lambda a, b: torch.cat([a.clamp(max=3), b.clamp(-2, 5), b.clamp(min=1), a.clamp(5, 2)]),
    "clamped by tensors": lambda a, b: torch.maximum(torch.minimum(a, b), b - 1).clamp(min=b),
    "largest": lambda a, b: torch.stack([a.max(1).values, b.min(1).values, torch.max(a, b)[:, 0], a.amin(1)]),
    "bits": lambda a, b: b & 12,
    "chosen": lambda a, b: torch.where(a > 3, a, b),
    "sum": lambda a, b: torch.stack([a.sum(1), b.sum(-1), b.cumsum(1)[:, -1]]),
    "truths": lambda a, b: (a > b).sum(0),
}


@pytest.mark.parametrize("function", _BOUNDED.values(), ids=_BOUNDED)
def test_bounds_hold(function: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    seen: list[tuple[int | None, int | None]] = []

    def bounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = function(a.clamp(0, 9), b.clamp(-8, 6))
        if isinstance(result, TraceTensor):
            seen.append(bounds.known(result))
        return result

    for _ in range(20):
        numbers = rng.integers(-12, 12, (2, 2, 4))
        expected = bounded(*map(torch.from_numpy, numbers)).numpy()
        seen.clear()
        np.testing.assert_array_equal(_traced(bounded, *numbers), expected)
        ((low, high),) = seen
        assert low is not None
        assert high is not None
        assert low <= expected.min() <= expected.max() <= high


def test_products_of_bounded_numbers_have_32_bits() -> None:
    found: list[torch.dtype] = []

    def area(grids: torch.Tensor) -> torch.Tensor:
        sides = grids.clamp(0, 20000)
        result = sides[:, 0] * sides[:, 1]
        found.append(result.is_wide)  # type: ignore[attr-defined]
        return result

    np.testing.assert_array_equal(_traced(area, np.array([[20000, 20000], [3, 4]])), [400000000, 12])
    assert found == [False]


def test_ids_that_do_not_fit_are_refused(hfax_llama: Any) -> None:
    large = np.array([[1, (1 << 32) + 5]])
    for ids in (large, torch.from_numpy(large), large.tolist()):
        with pytest.raises(InvalidInputError, match="4294967301"):
            hfax_llama(input_ids=ids)
        if isinstance(ids, list):
            continue
        with pytest.raises(InvalidInputError, match="4294967301"):
            hfax_llama.apply(hfax_llama.params, input_ids=ids)
