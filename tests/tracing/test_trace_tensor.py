"""Tensors of a trace: each thing that torchax's own tensors get silently wrong, beside torch."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from traced import traced

from hfax.errors import UnsupportedModelError
from hfax.tracing import indexing
from hfax.tracing import torchax as tracing


def _same(function: Callable[..., Any], *arrays: np.ndarray) -> None:
    out = function(*(torch.from_numpy(a.copy()) for a in arrays))
    expected = [o.numpy() for o in (out if isinstance(out, tuple) else (out,))]
    for ours, theirs in zip(traced(function, *arrays), expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


_X = np.arange(24, dtype=np.float32).reshape(4, 6)

_VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1),
    "view to more axes": lambda x: x.view(2, 2, 6),
    "reshape": lambda x: x.reshape(3, 8),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "split": lambda x: x.split(3, dim=1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "select": lambda x: x.select(1, 3),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "squeeze": lambda x: x.view(4, 1, 6).squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "detach": lambda x: x.detach(),
    "slice": lambda x: x[1:3, ::2],
    "index": lambda x: x[:, 1],
    "diagonal": lambda x: x.diagonal(),
    "data": lambda x: x.data,
    "view of a view": lambda x: x.transpose(0, 1)[1:4].unsqueeze(-1),
}


@pytest.mark.parametrize("name", _VIEWS)
def test_write_through_a_view_reaches_the_base_and_its_other_views(name: str) -> None:
    def function(x: Any) -> Any:
        x = x + 0
        other = x[2]
        view = _VIEWS[name](x)
        view.mul_(10)
        view += 1
        return x, other + 0, view + 0

    _same(function, _X)


@pytest.mark.parametrize("name", _VIEWS)
def test_write_to_the_base_reaches_its_views(name: str) -> None:
    def function(x: Any) -> Any:
        x = x + 0
        view = _VIEWS[name](x)
        x.add_(5)
        x[1] = 7
        return view + 0

    _same(function, _X)


def test_reshape_of_a_transposed_tensor_is_a_copy() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        flat = x.t().reshape(-1)
        flat.zero_()
        return x

    _same(function, _X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, x.t().contiguous().mul_(2)),
        lambda x: (x, x.contiguous().mul_(2)),
        lambda x: (x.t() + 1, (x.t() + 1).reshape(-1).mul_(2)),
        lambda x: [(y := x.t() + 1), y.reshape(-1).mul_(2)],
        lambda x: [(y := x.t().clone()), y.reshape(-1).mul_(2)],
        lambda x: [(y := x.t().bfloat16()).flatten().mul_(2).float(), y.float()],
        lambda x: [(y := x.transpose(0, 0)).view(-1), y.mul_(2)],
        lambda x: [(y := x[:, ::2].t().reshape(3, 4).t()), y.mul_(2), x],
        lambda x: [(y := x[:1].expand(3, 6).t()), y.contiguous().mul_(2), x],
    ],
)
def test_what_is_a_copy_and_what_a_view_follows_torchs_strides(function: Callable[..., Any]) -> None:
    """`contiguous()` of a transposed tensor was the tensor itself: writes to the copy reached the original."""
    _same(lambda x: tuple(function(x + 0)), _X)


def test_a_write_to_a_part_of_an_expanded_tensor_is_refused() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x[0].expand(3, 6)[1] += 1
        return x

    with pytest.raises(UnsupportedModelError, match="expanded or overlapping tensor"):
        traced(function, _X)


def test_write_of_a_traced_value_into_a_constant_and_its_view() -> None:
    def function(x: Any) -> Any:
        made = torch.zeros(4, 6, device=x.device)
        row = made[1]
        made[1] = x[1]
        made[:, 2] = x[:, 0]
        return made, row + 0

    _same(function, _X)


def test_copy_broadcasts_without_changing_the_shape() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x.copy_(x[0] * 2)
        return x

    _same(function, _X)


def test_type_as_leaves_its_source_alone() -> None:
    def function(x: Any) -> Any:
        x = x + 0.5
        y = x.type_as(torch.zeros(1, dtype=torch.int32, device=x.device))
        return x, y

    _same(function, _X)


@pytest.mark.parametrize("operation", [torch.add, torch.mul, torch.sub, torch.div, torch.maximum])
def test_a_scalar_tensor_does_not_promote(operation: Callable[..., Any]) -> None:
    def function(x: Any) -> Any:
        scalar = x.sum()
        assert scalar.ndim == 0
        out = operation(x.to(torch.bfloat16), scalar)
        assert out.dtype == torch.bfloat16
        return out.float()

    (ours,) = traced(function, _X)
    expected = function(torch.from_numpy(_X)).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0.02)


def test_a_fully_masked_row_of_attention_is_zero() -> None:
    def function(x: Any) -> Any:
        q = x.view(1, 1, 4, 6)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=x.device).tril()
        mask[:, :, 2] = False
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    (ours,) = traced(function, _X / 24)
    assert not np.isnan(ours).any()
    assert (ours[0, 0, 2] == 0).all()


# Constants


def test_constants_steer_python_code() -> None:
    def function(x: Any) -> Any:
        lengths = torch.arange(x.shape[0], device=x.device) + 1
        if lengths.max() > 3 and (lengths > 0).all():
            x = x * lengths[-1].item()
        for start, end in zip([0, *lengths.tolist()], lengths.tolist(), strict=False):
            x = x + (end - start)
        return x[lengths > 2]

    _same(function, _X)


def test_a_table_on_the_host_is_indexed_by_a_traced_tensor() -> None:
    table = torch.arange(100).float().view(50, 2)
    _same(lambda i: table[i], np.array([3, 7, 49]))


def test_large_constants_are_computed_by_the_program() -> None:
    def call(x: jax.Array) -> jax.Array:
        def inside(_: Any) -> jax.Array:
            return tracing.unwrap(tracing.wrap(x) + torch.ones(1000, 1000, device="jax"))

        return tracing.call_module(torch.nn.Identity(), {}, inside)

    lowered = jax.jit(call).lower(jax.ShapeDtypeStruct((1000, 1000), jnp.float32))
    assert len(lowered.as_text()) < 20_000


def test_a_range_between_traced_bounds_of_known_distance() -> None:
    def function(x: Any, n: Any) -> Any:
        end = n + 3
        return torch.arange(n, end), x[n:end]

    ours = traced(function, _X[:, 0].copy(), np.int32(1))
    assert ours[0].tolist() == [1, 2, 3]
    assert ours[1].tolist() == _X[1:4, 0].tolist()


def test_bounds_of_a_traced_scalar_answer_comparisons() -> None:
    def function(n: Any) -> Any:
        n.at_least = 1
        assert n > 0
        assert n != 0
        assert not n + 2 == 1  # noqa: SIM201
        assert max(0, 1 - n) == 0
        return n

    assert traced(function, np.int32(5))[0] == 5


# Masks and indices


def test_writes_through_a_traced_mask() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x[x > 20] = -1
        x[x[:, 0] > 10] = torch.arange(6, dtype=x.dtype, device=x.device)
        return x

    _same(function, _X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 3],
        lambda x: x[x > 3].sum(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * int(x.max().item()),
        lambda x: x[: x[0, 1].long().item()],
        lambda x: x[: x[0, 1].long()],
        lambda x: torch.arange(x[0, 1].long()),
    ],
)
def test_looking_at_a_traced_value_is_an_error_that_names_the_line(function: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"test_trace_tensor\.py:\d+ in <lambda>"):
        traced(function, _X)


def test_an_operation_without_a_lowering_is_an_error_that_names_it() -> None:
    with pytest.raises(UnsupportedModelError, match="aten"):
        traced(lambda x: torch.geqrf(x)[0], _X)


def test_shapes_that_do_not_fit_are_the_error_of_torch() -> None:
    """As a TypeError, Python would say that two tensors cannot be added."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += y
        return x

    with pytest.raises(RuntimeError, match=r"add.*\(4, 6\), \(5, 6\)"):
        traced(add, _X, np.zeros((5, 6), np.float32))


def test_in_place_forms_without_a_lowering_use_the_functional_one() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x[1:3].masked_fill_(x[1:3] > 8, 0)
        x.clamp_(max=15)
        x.index_fill_(0, torch.tensor([0]), 3.0)
        return x

    _same(function, _X)


def test_values_kept_on_a_module_do_not_outlive_the_trace() -> None:
    class Counter(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            self.seen = x + 1
            return self.seen

    module = Counter()
    jax.jit(lambda x: tracing.call_module(module, {}, lambda m: tracing.unwrap(m(tracing.wrap(x)))))(jnp.ones(3))
    assert not hasattr(module, "seen")


# Writes


def test_writes_to_slices_are_numpys_and_no_scatters() -> None:
    rng, gen = np.random.default_rng(0), random.Random(0)
    for _ in range(200):
        array = rng.standard_normal([gen.randint(1, 6) for _ in range(gen.randint(1, 4))], dtype=np.float32)
        index: list[Any] = []
        for size in array.shape[: gen.randint(0, array.ndim)]:
            ends = [gen.choice([None, gen.randint(-size, size)]) for _ in range(2)]
            index.append(gen.choice([gen.randint(-size, size - 1), slice(*ends, gen.choice([None, 1, 2, 3]))]))
        index.insert(gen.randint(0, len(index)), gen.choice([None, Ellipsis]))
        value = rng.standard_normal(array[tuple(index)].shape, dtype=np.float32)
        expected = array.copy()
        expected[tuple(index)] = value
        put = lambda a, v, i=tuple(index): indexing.write(a, i, v)  # noqa: E731
        np.testing.assert_array_equal(put(jnp.asarray(array), jnp.asarray(value)), expected)
        assert "scatter" not in str(jax.make_jaxpr(put)(array, value))


# What masks select


def _checked(function: Callable[..., Any], *arrays: np.ndarray) -> tuple[list[np.ndarray], dict[str, bool]]:
    """Results, and what the program gives back of the code's checks."""
    said: list[str] = []

    def call(*values: jax.Array) -> Any:
        def inside(_: torch.nn.Module) -> list[jax.Array]:
            out = function(*(tracing.wrap(v) for v in values))
            return [tracing.unwrap(o) for o in (out if isinstance(out, tuple) else (out,))]

        checks: dict[str, jax.Array] = {}
        out = tracing.call_module(torch.nn.Identity(), {}, inside, checks=checks)
        said.extend(checks)
        return out, list(checks.values())

    out, held = jax.jit(call)(*arrays)
    return [np.array(o) for o in out], dict(zip(said, map(bool, held), strict=True))


_MASK = np.array([[0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0]], bool)


def test_what_a_mask_selects_meets_a_tensor_of_known_length() -> None:
    known = np.arange(8, dtype=np.float32)
    (out,), checks = _checked(lambda x, m, k: x[m] * 2 + k, _X, _MASK, known)
    np.testing.assert_allclose(out, _X[_MASK] * 2 + known)
    assert list(checks.values()) == [True]
    _, checks = _checked(lambda x, m, k: x[m] + k, _X, _MASK, known[:7])
    assert list(checks.values()) == [False]
    assert "7 places" in next(iter(checks))


def test_what_a_mask_selects_can_be_counted_and_written_under_another() -> None:
    def function(x: Any, m: Any) -> Any:
        out = torch.zeros_like(x)
        out[m.flip(1)] = x[m] * 1.0
        return out, x[m].numel() + 0 * x[0, 0]

    (out, count), checks = _checked(function, _X, _MASK)
    expected = np.zeros_like(_X)
    expected[_MASK[:, ::-1]] = _X[_MASK]
    np.testing.assert_allclose(out, expected)
    assert count == 8
    assert all(checks.values())


def test_the_last_of_each_row_that_a_mask_selects() -> None:
    function = lambda x, m: x.unsqueeze(-1)[m, :].view(4, -1, 1)[:, -1, :]  # noqa: E731
    (out,), checks = _checked(function, _X, _MASK)
    np.testing.assert_allclose(out[:, 0], [3, 7, 17, 20])
    assert list(checks.values()) == [True]
    uneven = _MASK.copy()
    uneven[0, 0] = True
    assert list(_checked(function, _X, uneven)[1].values()) == [False]


def test_places_of_a_mask_are_an_index_and_nothing_else() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x[torch.where(x > 20)] = -1
        return x

    _same(function, _X)
    with pytest.raises(UnsupportedModelError, match="where"):
        traced(lambda x: torch.where(x > 3)[0], _X)


def test_runs_of_equal_values_can_be_counted() -> None:
    numbers = np.array([3, 3, 5, 5, 3], np.int32)
    _same(lambda x: x[0] * 0 + torch.unique_consecutive(x).numel(), numbers)
    with pytest.raises(UnsupportedModelError, match="unique_consecutive"):
        traced(lambda x: torch.unique_consecutive(x) + 1, numbers)


def test_random_integers_take_their_bounds_by_name() -> None:
    for found in traced(
        lambda x: (torch.randint(low=2, high=5, size=(40,)) + x, torch.randint(2, high=5, size=(40,)) + x),
        np.zeros(40, np.int64),
    ):
        assert set(found.tolist()) == {2, 3, 4}


def test_new_tensors_and_reshapes_in_place() -> None:
    def function(x: Any) -> Any:
        x = x + 1
        x.unsqueeze_(1)
        return x * x.new_tensor([2.0, 3, 4, 5, 6, 7])

    _same(function, _X)


def test_buffers_of_whole_numbers_are_constants() -> None:
    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stride", torch.tensor(3), persistent=False)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.pad(x, (0, self.stride)) if self.stride > 2 else x

    module = Padded()
    call = lambda m: tracing.unwrap(m(tracing.wrap(jnp.asarray(_X))))  # noqa: E731
    out = tracing.call_module(module, {"stride": jnp.int32(3)}, call, constants={"stride": module.stride})
    assert out.shape == (4, 9)


def test_the_largest_whole_numbers_stay_the_largest() -> None:
    largest = torch.iinfo(torch.int64).max
    (out,) = traced(lambda x: torch.where(x > 3, torch.full_like(x, 5).long(), torch.tensor(largest)).min(), _X)
    assert out == 5
    (out,) = traced(lambda x: torch.where(x > 30, x.long(), torch.tensor(largest)).min(), _X)
    assert out == largest  # as in torch: what does not fit into 32 bits has 64


def test_a_traced_number_is_used_without_being_known() -> None:
    _same(lambda x: x * x.max().item() + (x[0].sum().item() == 15), _X)
