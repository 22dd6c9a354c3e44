"""Operations in a trace give what torch gives, or an error: hfax's own lowerings here, all others on docs/lowerings.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from traced import traced

from hfax.errors import UnsupportedModelError
from hfax.tracing.environment import TraceEnvironment

PAGE = Path(__file__).parents[2] / "docs" / "lowerings.md"
_TRUTHS = np.array([[True, False, True], [True, True, False]])
_WHOLE = np.array([[5, -7, 16777219], [0, 2, -33554435]])
_BYTES = np.array([[200, 100, 3], [255, 1, 0]], np.uint8)
_FLOATS = np.array([[0.25, -1.5, 3.0], [7.0, 0.5, -2.25]], np.float32)
_INDEX = np.array([[0, 2, 0], [1, 1, 2]])


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda t: t + t, [_TRUTHS]),
        (lambda t: t.add(True), [_TRUTHS]),
        (lambda t: torch.div(t, 7, rounding_mode="trunc"), [_WHOLE]),
        (lambda t: torch.div(t, torch.tensor(-7), rounding_mode="floor"), [_WHOLE]),
        (lambda t: (t % 10) ** 8, [_WHOLE]),
        (lambda t: torch.pow(3, t % 19), [_WHOLE]),
        (lambda t: (t % 3 - 1) ** (t % 5 - 2), [_WHOLE]),
        (lambda t: t.square(), [_TRUTHS]),
        (lambda t: torch.fmod(t.bfloat16() * 37, 2.3).float(), [_FLOATS]),
        (lambda t: torch.nn.functional.hardtanh(t), [_WHOLE]),
        (lambda t: t.prod(dim=0, dtype=torch.bool), [_WHOLE]),
        (lambda t: t.cumsum(1), [_BYTES]),
        (lambda t: t.cumprod(1), [_BYTES]),
        (lambda t: t.sum(0) - 300, [_BYTES]),
        (lambda t: t.prod(1), [_BYTES]),
        (lambda t: t.cumsum(0) - t.sum(), [_TRUTHS]),
        (lambda t: t.to(torch.int8).cumsum(1), [_BYTES]),
        (lambda t: t.bfloat16().sum(1, dtype=torch.float32), [_FLOATS * 1.01]),
        (lambda t: t.bfloat16().mean(dtype=torch.float32), [_FLOATS * 1.01]),
        (lambda t: t.bfloat16().nansum(0, dtype=torch.float32), [_FLOATS * 1.01]),
        (
            lambda t: torch.nn.functional.batch_norm(t.bfloat16(), t[0].abs(), t[1].abs() + 0.3, t[0], t[1]).float(),
            [_FLOATS],
        ),
        (lambda t: t.sum(1, dtype=torch.uint8), [_BYTES]),
        (lambda t: t.sum(0, dtype=torch.float32) / 7, [_WHOLE]),
        (lambda t: t.mean(1, dtype=torch.float32), [_TRUTHS]),
        (lambda t: t.any(1), [_BYTES]),
        (lambda t: torch.cholesky_inverse(t[:, :2].triu(), upper=True), [_FLOATS + 1.0]),
        (lambda t: torch.unravel_index(t, (10, 3, 500)), [_BYTES]),
        (lambda t: t.float().bfloat16().logit(0.2).dtype.itemsize * t, [_FLOATS]),
        (lambda t: t.abs().lgamma(), [_FLOATS]),
        (lambda t: torch.linalg.vector_norm(t, 0, dim=1), [_FLOATS]),
        (lambda t: torch.linalg.vector_norm(t.bfloat16(), 3, dtype=torch.float32), [_FLOATS]),
        (lambda t: torch.linalg.vector_norm(t, float("-inf"), dim=(0, 1), keepdim=True), [_FLOATS]),
        (lambda t: torch.linalg.eigvalsh(t[:, :2], UPLO="U"), [_FLOATS]),
        (lambda t: torch.linalg.eigvalsh(t[:, :2]), [_FLOATS]),
        (lambda t: t.sort(dim=1, descending=True, stable=True), [np.array([[1, 2, 1, 2, 2]])]),
        (lambda t, i: t.scatter_reduce(1, i, t + 1, "amax", include_self=False), [_WHOLE, _INDEX]),
        (lambda t, i: t.scatter_reduce(1, i, ~t, "amin", include_self=False), [_TRUTHS, _INDEX]),
        (lambda t, i: t.scatter_reduce(1, i, t, "sum"), [_WHOLE, _INDEX]),
        (lambda t: t.topk(2, dim=1, largest=False), [_BYTES]),
        (lambda t: t.topk(1, dim=0), [_WHOLE]),
        (lambda t: t.topk(3, dim=-1, largest=False).values + t[0].topk(1).indices, [_FLOATS]),
        (lambda t, i: t.gather(1, i), [_WHOLE, _INDEX]),
        (lambda t, i: t.gather(0, i[:, :2] % 2), [_TRUTHS, _INDEX]),
        (lambda t, i: t.scatter(1, i[:, :2], -5), [_WHOLE, _INDEX]),
        (lambda t, i: t.scatter(0, i[:, :2] % 2, 0.5), [_FLOATS, _INDEX]),
        (lambda t, i: torch.zeros_like(t).scatter_(-1, i[:, 1:], True), [_TRUTHS, _INDEX]),
    ],
)
def test_lowerings_of_our_own_give_what_torch_gives(function: Callable[..., Any], arrays: list[np.ndarray]) -> None:
    """In torchax's table each of these is another number, or a number of another dtype."""
    expected = function(*map(torch.from_numpy, arrays))
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    for ours, theirs in zip(traced(function, *arrays), expected, strict=True):
        assert str(ours.dtype) in (str(theirs.dtype)[6:], {"int64": "int32"}.get(str(theirs.dtype)[6:]))
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda t: torch.polygamma(2, t), "negative numbers"),
        (lambda t: torch.special.zeta(t, t), "negative numbers"),
        (lambda t: torch.logaddexp(t.to(torch.complex64), t.to(torch.complex64)), "complex numbers"),
        (lambda t: torch.linalg.eigh(torch.complex(t[:, :2], t[:, 1:])), "complex numbers"),
        (lambda t: torch.nn.functional.rms_norm(torch.complex(t, t), (3,)), "complex numbers"),
        (lambda t: torch.einsum("ij->i", t.to(torch.uint8)), "of 8 or 16 bits"),
        (lambda t: _resized(t, "bilinear"), "of bytes"),
        (lambda t: _resized(t, "bicubic"), "of bytes"),
        (lambda t: _sampled(t[None, None, None], torch.zeros(1, 1, 2, 3, 3)), "reflected at the border"),
    ],
)
def test_what_would_be_wrong_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        traced(function, _FLOATS)


def _resized(image: Any, mode: str) -> Any:
    return torch.nn.functional.interpolate(image.to(torch.uint8)[None, None], size=(5, 7), mode=mode)


def _sampled(volume: Any, grid: Any) -> Any:
    return torch.nn.functional.grid_sample(volume, grid, padding_mode="reflection", align_corners=False)


@pytest.fixture(scope="module")
def comparison() -> Any:
    import lowerings

    return lowerings


def agreeing(row: str, comparison: Any) -> list[bool]:
    """For each dtype, whether a row of the page says that results agree."""
    cells = row.split(" | ")[1 : 1 + len(comparison.DTYPES)]
    return [re.match(r"\d+(,|$)", cell.strip()) is not None for cell in cells]


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(16))
def test_each_row_of_the_page_is_so(part: int, comparison: Any) -> None:
    """Which results agree, not how many: for some samples torch's own result differs from run to run."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = {found[1]: line for line in lines if (found := re.match(r"\| `([^`]+)` \|", line))}
    chosen = list(comparison.operations())[part::16]
    assert chosen
    for operation in chosen:
        row, wrong = comparison.row_of(operation)
        assert not wrong
        assert agreeing(row, comparison) == agreeing(rows[comparison.name_of(operation)], comparison), (
            f"run lowerings.py again: {row}"
        )


@pytest.mark.sweep
def test_a_wrong_lowering_is_seen(comparison: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = TraceEnvironment()
    environment.lower(torch.ops.aten.fmod, lambda input, other: input - other)
    monkeypatch.setattr(comparison.tracing, "_environment", lambda: environment)
    operation = next(o for o in comparison.operations() if o.name == "fmod")
    assert comparison.row_of(operation)[1]
