"""Random torch programs of views, writes through them, indices and broadcasting: every tensor comes out as in torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from traced import traced

from hfax.errors import UnsupportedModelError

Step = Callable[[list[Any]], Any]
_SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "print_blob": False,
    "suppress_health_check": list(hypothesis.HealthCheck),  # how long drawing takes is the machine's business
}


@dataclasses.dataclass(frozen=True)
class Named:
    """A step that says in a failure what it is."""

    text: str
    run: Step

    def __repr__(self) -> str:
        return self.text


def _of_one(text: str, function: Callable[[Any], Any]) -> Callable[[int], Named]:
    return lambda at: Named(f"t{at}{text}", lambda tensors: function(tensors[at % len(tensors)]))


def _slices() -> st.SearchStrategy[slice]:
    edge = st.none() | st.integers(-4, 4)
    return st.builds(slice, edge, edge, st.none() | st.integers(1, 3))


def _index() -> st.SearchStrategy[tuple[Any, ...]]:
    whole = st.integers(-4, 3)
    rows = st.lists(st.integers(-2, 1), min_size=0, max_size=4).map(lambda v: torch.tensor(v, dtype=torch.int64))
    part = whole | _slices() | st.none() | st.just(...) | rows
    return st.lists(part, min_size=1, max_size=4).filter(lambda p: sum(x is ... for x in p) <= 1).map(tuple)


_AXIS = st.integers(-4, 3)
_FACTOR = st.sampled_from([2.0, -1.5, 0.0])
_VIEWS = [
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "narrow",
    "select",
    "index",
    "view",
    "flip",
    "diagonal",
    "expand",
    "chunk",
    "unfold",
    "reshape",
    "flatten",
    "movedim",
    "mT",
    "detach",
    "contiguous",
    "float",
    "clone",
]
_WRITES = [
    "mul_",
    "add_",
    "copy_",
    "zero_",
    "setitem",
    "augmented",
    "masked_fill_",
    "clamp_",
    "sub_alpha",
    "index_fill_",
    "index_add_",
    "index_copy_",
    "relu_",
    "setitem_mask",
    "where_write",
    "add_sum",
]


@st.composite
def _view(draw: st.DrawFn) -> Callable[[int], Named]:
    kind = draw(st.sampled_from(_VIEWS))
    a, b, n = draw(_AXIS), draw(_AXIS), draw(st.integers(0, 3))
    match kind:
        case "transpose":
            return _of_one(f".transpose({a}, {b})", lambda t: t.transpose(a, b))
        case "permute":
            order = draw(st.permutations(range(4)))
            return _of_one(f".permute({order})", lambda t: t.permute([i for i in order if i < t.dim()]))
        case "unsqueeze" | "squeeze":
            return _of_one(f".{kind}({a})", lambda t: getattr(t, kind)(a))
        case "narrow":
            return _of_one(f".narrow({a}, {n}, 1)", lambda t: t.narrow(a, n, 1))
        case "select":
            return _of_one(f".select({a}, {b})", lambda t: t.select(a, b))
        case "index":
            index = draw(_index())
            return _of_one(f"[{index}]", lambda t: t[index])
        case "view":
            return _of_one(".view(-1)", lambda t: t.view(-1))
        case "reshape":
            return _of_one(".reshape(-1, 2)", lambda t: t.reshape(-1, 2))
        case "flatten":
            return _of_one(f".flatten({n})", lambda t: t.flatten(n))
        case "flip":
            return _of_one(f".flip({a})", lambda t: t.flip(a))
        case "diagonal":
            return _of_one(f".diagonal({n - 1})", lambda t: t.diagonal(n - 1))
        case "expand":
            return _of_one(f".expand({n}, ...)", lambda t: t.expand(n, *t.shape))
        case "chunk":
            return _of_one(f".chunk(2, {a})[-1]", lambda t: t.chunk(2, a)[-1])
        case "unfold":
            # a copy: what a write to windows that overlap means, torch does not say
            return _of_one(f".unfold({a}, 2, 1) + 0", lambda t: t.unfold(a, 2, 1) + 0)
        case "movedim":
            return _of_one(f".movedim({a}, {b})", lambda t: t.movedim(a, b))
        case "mT":
            return _of_one(".mT", lambda t: t.mT)
        case _:
            return _of_one(f".{kind}()", lambda t: getattr(t, kind)())


@st.composite
def _write(draw: st.DrawFn) -> Callable[[int], Named]:
    kind = draw(st.sampled_from(_WRITES))
    other, factor, a = draw(st.integers(0, 7)), draw(_FACTOR), draw(_AXIS)

    def with_other(text: str, change: Callable[[Any, Any], Any]) -> Callable[[int], Named]:
        return lambda at: Named(
            f"t{at}{text.format(other=other)}",
            lambda tensors: change(tensors[at % len(tensors)], tensors[other % len(tensors)]),
        )

    def assign(t: Any, index: Any, value: Any) -> None:
        t[index] = value

    match kind:
        case "mul_":
            return _of_one(f".mul_({factor})", lambda t: t.mul_(factor))
        case "relu_":
            return _of_one(".relu_()", lambda t: t.relu_())
        case "add_" | "copy_":
            return with_other(f".{kind}(t{{other}})", lambda t, o: getattr(t, kind)(o))
        case "sub_alpha":
            return with_other(".sub_(t{other}, alpha=3)", lambda t, o: t.sub_(o, alpha=3))
        case "zero_":
            return _of_one(".zero_()", lambda t: t.zero_())
        case "clamp_":
            return _of_one(".clamp_(-2, 5)", lambda t: t.clamp_(-2, 5))
        case "setitem":
            index = draw(_index())
            return with_other(f"[{index}] = t{{other}}", lambda t, o: assign(t, index, o))
        case "augmented":
            index = draw(_index())
            return _of_one(f"[{index}] += {factor}", lambda t: assign(t, index, t[index] + factor))
        case "setitem_mask":
            return _of_one(f"[t > 3] = {factor}", lambda t: assign(t, t > 3, factor))
        case "where_write":
            return with_other(
                "[:] = where(t > t{other}, t, -1)", lambda t, o: assign(t, ..., torch.where(t > o, t, -1.0))
            )
        case "masked_fill_":
            return _of_one(f".masked_fill_(t > 2, {factor})", lambda t: t.masked_fill_(t > 2, factor))
        case "index_fill_":
            return _of_one(f".index_fill_({a}, [0], {factor})", lambda t: t.index_fill_(a, torch.tensor([0]), factor))
        case "add_sum":
            return with_other(".add_(t{other}.sum())", lambda t, o: t.add_(o.sum()))
        case _:
            return with_other(
                f".{kind}({a}, [0], t{{other}})", lambda t, o: getattr(t, kind)(a, torch.tensor([0]), o.narrow(a, 0, 1))
            )


@st.composite
def _new(draw: st.DrawFn) -> Callable[[int], Named]:
    other = draw(st.integers(0, 7))
    kind = draw(
        st.sampled_from(["add", "mul", "cat", "stack", "where", "max", "cumsum", "clone", "gather", "int", "half"])
    )

    def both(tensors: list[Any], at: int) -> tuple[Any, Any]:
        return tensors[at % len(tensors)], tensors[other % len(tensors)]

    make: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda t, o: t + o,
        "mul": lambda t, o: t * (o - 1),
        "cat": lambda t, o: torch.cat([t, o], -1),
        "stack": lambda t, o: torch.stack([t, o.expand_as(t)]),
        "where": lambda t, o: torch.where(t > o, t, o),
        "max": lambda t, o: torch.maximum(t, o),
        "cumsum": lambda t, o: t.cumsum(-1),
        "clone": lambda t, o: t.clone(),
        "gather": lambda t, o: t.gather(-1, torch.zeros_like(t, dtype=torch.int64)),
        "int": lambda t, o: t.int().float() // 2,
        "half": lambda t, o: (t.bfloat16() * o).float(),
    }
    return lambda at: Named(f"{kind}(t{at}, t{other})", lambda tensors: make[kind](*both(tensors, at)))


_STEPS = st.lists(
    st.builds(lambda make, at: make(at), st.one_of(_view(), _view(), _write(), _new()), st.integers(0, 7)),
    min_size=1,
    max_size=8,
)
_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=0, max_size=3)


def _run(tensors: list[Any], steps: list[Named], errors: tuple[type[Exception], ...]) -> tuple[list[Any], list[Named]]:
    """All tensors after the steps that raise none of `errors`, and those steps."""
    accepted = []
    for step in steps:
        try:
            made = step.run(tensors)
        except errors:
            continue
        accepted.append(step)
        if isinstance(made, torch.Tensor) and made.dim() <= 5 and made.numel() <= 400:
            tensors.append(made)
    return tensors, accepted


def _agrees(shape: list[int], steps: list[Named]) -> None:
    """What hfax refuses ends the program; all before it must agree."""
    array = np.asarray((np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) * 3) % 7 - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_torch = (RuntimeError, IndexError, TypeError, ValueError)
        _, accepted = _run([torch.from_numpy(array.copy())], steps, in_torch)
        while True:
            try:
                out = traced(lambda x, steps=accepted: _run([x], steps, ())[0], array)
                break
            except Exception:
                accepted = accepted[:-1]
        expected, _ = _run([torch.from_numpy(array.copy())], accepted, ())
    hypothesis.target(float(len(accepted)))
    assert len(out) == len(expected)
    for number, (ours, theirs) in enumerate(zip(out, expected, strict=True)):
        assert ours.shape == tuple(theirs.shape), (number, accepted)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, err_msg=f"t{number} after {accepted}")


_WHOLE = st.sampled_from(
    [0, 1, -1, 2, 3, -7, 255, 65537, (1 << 24) + 1, -(1 << 24) - 3, 123456789, (1 << 30) - 1, -(1 << 30)]
)
_POSITIVE = st.sampled_from([1, 2, 3, 7, 255, 65537, (1 << 24) + 1, 123456789])
_OF_WHOLE_NUMBERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, y, p: x + y,
    "sub": lambda x, y, p: x - y,
    "mul": lambda x, y, p: x * y,
    "mul, mod": lambda x, y, p: x * y % p,
    "floor": lambda x, y, p: x // p,
    "trunc": lambda x, y, p: torch.div(x, p, rounding_mode="trunc"),
    "floor, div": lambda x, y, p: torch.div(x, p, rounding_mode="floor"),
    "mod": lambda x, y, p: x % p,
    "fmod": lambda x, y, p: torch.fmod(x, p),
    "square": lambda x, y, p: x**2,
    "pow": lambda x, y, p: torch.pow(x % 10, torch.tensor([9, 7, 3, 0])),
    "abs, neg": lambda x, y, p: (-x).abs(),
    "and": lambda x, y, p: x & y,
    "xor": lambda x, y, p: x ^ p,
    "shift": lambda x, y, p: (x >> 3) + (y & 7),
    "left": lambda x, y, p: (p % 100) << 20,
    "clamp": lambda x, y, p: x.clamp(-(1 << 25), 1 << 25),
    "sum": lambda x, y, p: (x % 65537).sum(),
    "cumsum": lambda x, y, p: x.cumsum(0),
    "where": lambda x, y, p: torch.where(x > y, x, y),
    "sort": lambda x, y, p: x.sort().values,
    "max": lambda x, y, p: torch.maximum(x, y).max(),
    "gather": lambda x, y, p: x[y.abs() % 4],
    "compare": lambda x, y, p: (x >= y) | (x + 1 == p),
    "of floats": lambda x, y, p: (x.float() / 4).long(),
    "dot": lambda x, y, p: ((x % 1000) * (y % 1000)).sum(),
    "mean": lambda x, y, p: (x % 1000).float().mean().round().long(),
}


def _whole_numbers_agree(kind: str, x: list[int], y: list[int], p: list[int]) -> None:
    arrays = [np.array(values, np.int64) for values in (x, y, p)]
    expected = _OF_WHOLE_NUMBERS[kind](*map(torch.from_numpy, arrays)).numpy()
    try:
        (out,) = traced(_OF_WHOLE_NUMBERS[kind], *arrays)
    except UnsupportedModelError:
        return
    np.testing.assert_array_equal(out.astype(np.int64), expected.astype(np.int64))


_FOUR = st.lists(_WHOLE, min_size=4, max_size=4)


_ON_EVERY_CHANGE = ("mul, mod", "trunc", "pow", "cumsum")


@pytest.mark.parametrize(
    "kind", [k if k in _ON_EVERY_CHANGE else pytest.param(k, marks=pytest.mark.sweep) for k in _OF_WHOLE_NUMBERS]
)
@hypothesis.settings(max_examples=12, **_SETTINGS)
@hypothesis.given(x=_FOUR, y=_FOUR, p=st.lists(_POSITIVE, min_size=4, max_size=4))
def test_large_whole_numbers_come_out_exactly_or_are_refused(
    kind: str, x: list[int], y: list[int], p: list[int]
) -> None:
    _whole_numbers_agree(kind, x, y, p)


@hypothesis.settings(max_examples=60, **_SETTINGS)
@hypothesis.given(_SHAPES, _STEPS)
def test_a_program_of_views_and_writes_gives_what_torch_gives(shape: list[int], steps: list[Named]) -> None:
    _agrees(shape, steps)


@pytest.mark.sweep
@hypothesis.settings(max_examples=1000, **_SETTINGS)
@hypothesis.given(_SHAPES, _STEPS)
def test_many_programs_of_views_and_writes_give_what_torch_gives(shape: list[int], steps: list[Named]) -> None:
    _agrees(shape, steps)
