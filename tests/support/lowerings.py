"""Every torch operation with a lowering, beside torch itself, on the samples that PyTorch's own tests use.

`compare(operation, dtype)` runs one operation of PyTorch's database of operators on some of its samples, contiguous and not, in a
trace and in torch. `python tests/support/lowerings.py` runs all and writes docs/lowerings.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.testing._internal import common_methods_invocations, common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from hfax.tracing import environment
from hfax.tracing import torchax as tracing

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
MOST_SAMPLES = 24
"""Of one operation in one dtype."""
_MOST_ELEMENTS = 20_000
_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
_NARROW[torch.complex32] = torch.complex64  # which jax does not have
_WIDE = {torch.int32: torch.int64}
"""A trace does not tell torch's 32 bits from its 64; products of either have 64 (`hfax.tracing.wide_integers`)."""
_ROUNDINGS = 32.0
"""A result may be off by so many roundings of its dtype, at the scale of its elements, or by four times what torch is off."""
_TIES = ("topk", "kthvalue", "mode", "median", "nanmedian", "sort", "msort")
"""Which of several equal elements these point to, torch does not say."""
_NO_RESULT = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
)
_OUTSIDE = ("sparse.", "torch.ops.aten._safe_softmax", "signal.windows.", "chalf")
"""Layouts and dtypes that hfax has none of, and constructors that run on the host."""
_OVERFLOW = "where an intermediate value overflows 16 bits"
_STATISTICS = "statistics that are saved for a gradient, which nothing here reads, have another dtype or, of no rows, another shape"
KNOWN: dict[tuple[str, torch.dtype | None], str] = {
    **{
        (name, dtype): _STATISTICS
        for name in ("_batch_norm_with_update", "_native_batch_norm_legit")
        for dtype in (torch.bfloat16, torch.float16)
    },
    (
        "argsort",
        torch.bool,
    ): "torch does not say in which order equal elements come, and orders truth values in its own",
    (
        "cholesky_inverse",
        torch.float32,
    ): "the inverse of an ill-conditioned matrix in float32: off by 5e-6 of its scale",
    ("histc", torch.bfloat16): "of a single number, in which of the bins about it it falls",
    ("igamma", torch.float32): "off by 1e-6 of its scale",
    ("igammac", torch.float32): "off by 1e-6 of its scale",
    ("lgamma", torch.bool): "at 1, where it is 0, float32 is off by 5e-7",
    ("native_group_norm", None): _STATISTICS,
    **{
        ("nn.functional.max_pool3d", dtype): "which of several equal elements an index points to"
        for dtype in (torch.int64, torch.int32, torch.uint8)
    },
    ("dist", torch.float16): _OVERFLOW,
    ("nn.functional.soft_margin_loss", torch.float16): _OVERFLOW,
}
"""Operations, in one dtype or (None) in all, whose results differ, and why they may."""


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """What came of one operation in one dtype.

    Args:
        agree: samples whose results are torch's.
        differ: what differs, a line for each sample.
        refused: errors of the trace, a line for each sample; nothing wrong is computed there.
        left: samples that say nothing: random results, torch fails, too large.
    """

    agree: int = 0
    differ: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    left: int = 0


# For each sample the database looks for a `unittest` test on the stack, and reads the source of every frame: half of the time here.
common_utils.extract_test_fn = lambda: None


def operations() -> Iterator[Any]:
    """PyTorch's operators with samples, but for those that say nothing of a lowering."""
    for operation in op_db:
        if operation.name not in _NO_RESULT and not operation.name.startswith(_OUTSIDE):
            yield operation


def name_of(operation: Any) -> str:
    return f"{operation.name}.{operation.variant_test_name}" if operation.variant_test_name else operation.name


def compare(operation: Any, dtype: torch.dtype, most_samples: int = MOST_SAMPLES) -> Comparison:
    """Run an operation on its samples of a dtype, in one program, and in torch."""
    found = Comparison()
    calls: list[_Call] = []
    for sample in _samples(operation, dtype, most_samples):
        call = _Call.of(operation, sample)
        if call is None:
            found.left += 1
        else:
            calls.append(call)
    if not calls:
        return found
    errors: dict[int, Exception] = {}

    def inside(_: torch.nn.Module, arrays: list[list[jax.Array]]) -> dict[int, list[jax.Array]]:
        results = {}
        for number, (call, given) in enumerate(zip(calls, arrays, strict=True)):
            try:
                out = call.run([tracing.wrap(a) for a in given])
                results[number] = [jnp.asarray(tracing.unwrap(leaf)) for leaf in pytree.tree_leaves(out)]
            except Exception as error:
                errors[number] = error
        return results

    def program(arrays: list[list[jax.Array]]) -> dict[int, list[jax.Array]]:
        return tracing.call_module(torch.nn.Identity(), {}, lambda module: inside(module, arrays))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = jax.jit(program)([[_as_array(t) for t in call.tensors] for call in calls])
    for number, call in enumerate(calls):
        if number in errors:
            first = (str(errors[number]).splitlines() or [""])[0]
            found.refused.append(f"{type(errors[number]).__name__}: {first}")
        elif difference := call.difference([np.asarray(r) for r in results[number]]):
            found.differ.append(f"{difference} of {call.described()}")
        else:
            found.agree += 1
    return found


@contextlib.contextmanager
def lowerings_used() -> Iterator[set[Any]]:
    """The entries of torchax's table, and of hfax's patches, that ran within the block."""
    used: set[Any] = set()
    find = environment.TraceEnvironment._get_op_or_decomp

    def noted(self: Any, func: Any) -> Any:
        operator = find(self, func)
        used.add(operator.torch_op)
        return operator

    environment.TraceEnvironment._get_op_or_decomp = noted
    try:
        yield used
    finally:
        environment.TraceEnvironment._get_op_or_decomp = find


@dataclasses.dataclass(kw_only=True)
class _Call:
    """One sample: an operation with its arguments, and torch's results."""

    operation: Any
    leaves: list[Any]
    spec: Any
    results: list[Any]
    exact: list[Any] | None

    @staticmethod
    def of(operation: Any, sample: Any) -> _Call | None:
        """None if torch fails on it, its results are random, or it is not for comparing."""
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if sum(t.numel() for t in tensors) > _MOST_ELEMENTS or any(t.layout != torch.strided for t in tensors):
            return None
        # samples may share tensors that later ones change
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call = _Call(operation=operation, leaves=leaves, spec=spec, results=[], exact=None)
        copies = lambda: [t.clone() for t in tensors]  # noqa: E731
        try:
            with mock.patch.object(common_methods_invocations, "wrapper_set_seed", _refuse):
                torch.default_generator.manual_seed(1)
                call.results = pytree.tree_leaves(call.run(copies()))
                torch.default_generator.manual_seed(2)
                again = pytree.tree_leaves(call.run(copies()))
        except Exception:
            return None
        if any(not isinstance(r, (torch.Tensor, int, float)) for r in call.results):
            return None
        if any(r.layout != torch.strided for r in call.results if isinstance(r, torch.Tensor)):
            return None
        if len(again) != len(call.results) or any(
            not np.array_equal(_as_numpy(a), _as_numpy(b), equal_nan=_is_inexact(a))
            for a, b in zip(call.results, again, strict=True)
        ):
            return None
        with contextlib.suppress(Exception):
            wide = [t.double() if t.is_floating_point() else t for t in copies()]
            call.exact = pytree.tree_leaves(call.run(wide, in_float64=True))
        return call

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def run(self, tensors: list[Any], *, in_float64: bool = False) -> Any:
        remaining = iter(tensors)
        widen = lambda v: torch.float64 if in_float64 and v in (torch.float32, torch.bfloat16, torch.float16) else v  # noqa: E731
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else widen(leaf) for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.operation.op(first, *args, **kwargs)

    def difference(self, results: list[np.ndarray]) -> str:
        """What is not as in torch; "" if nothing."""
        if len(results) != len(self.results):
            return f"{len(results)} results for {len(self.results)}"
        compared = 1 if self.operation.name in _TIES else len(results)
        for number, (ours, theirs) in enumerate(zip(results[:compared], self.results, strict=False)):
            theirs = torch.as_tensor(theirs)
            expected = {theirs.dtype, _NARROW.get(theirs.dtype), _WIDE.get(theirs.dtype)}
            if str(ours.dtype) not in {str(d).removeprefix("torch.") for d in expected}:
                return f"{ours.dtype} for {theirs.dtype}"
            if ours.shape != tuple(theirs.shape):
                return f"shape {ours.shape} for {tuple(theirs.shape)}"
            exact = self.exact[number] if self.exact is not None and len(self.exact) == len(results) else theirs
            if text := _difference(ours, theirs, torch.as_tensor(exact)):
                return text
        return ""

    def described(self) -> str:
        def text(leaf: Any) -> str:
            return (
                f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
                if isinstance(leaf, torch.Tensor)
                else repr(leaf)
            )

        return f"{self.operation.name}({', '.join(map(text, self.leaves))})"[:200]


def _refuse(*args: Any, **kwargs: Any) -> Any:
    """In place of the function by which the database seeds operations with random results: they would seem to have none."""
    raise NotImplementedError("random results")


def _samples(operation: Any, dtype: torch.dtype, most: int) -> Iterator[Any]:
    if dtype not in operation.dtypes:
        return
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(
            itertools.islice(operation.sample_inputs("cpu", dtype, requires_grad=False), most)
        ):
            yield sample
            if number % 3 == 0:
                with contextlib.suppress(Exception):
                    yield sample.noncontiguous()


def _difference(ours: np.ndarray, theirs: torch.Tensor, exact: torch.Tensor) -> str:
    if not _is_inexact(theirs):
        wrong = ours.astype(np.int64) != _as_numpy(theirs).astype(np.int64)
        return f"{wrong.sum()} of {wrong.size} elements" if wrong.any() else ""
    wide = np.complex128 if theirs.is_complex() else np.float64
    one, two, true = ours.astype(wide), _as_numpy(theirs).astype(wide), _as_numpy(exact).astype(wide)
    if true.shape != two.shape:
        true = two
    if not np.array_equal(np.isnan(one), np.isnan(two)):
        return "nan elsewhere"
    infinite = np.isinf(two) & ~np.isnan(two)
    if not np.array_equal(one[infinite], two[infinite]) or not np.array_equal(np.isinf(one), np.isinf(two)):
        return "infinity elsewhere"
    finite = np.isfinite(one) & np.isfinite(true)
    if not finite.any():
        return ""
    scale = np.abs(true[finite]).max()
    rounding = torch.finfo(_NARROW.get(theirs.dtype, theirs.dtype)).eps
    theirs_off = np.abs(two[finite] - true[finite]).max()
    off = np.abs(one[finite] - true[finite])
    allowed = np.maximum(_ROUNDINGS * rounding * np.maximum(np.abs(true[finite]), scale / 16), 4 * theirs_off)
    return f"off by {off.max():.2g} of {scale:.2g}, torch by {theirs_off:.2g}" if (off > allowed).any() else ""


def _is_inexact(value: Any) -> bool:
    return torch.as_tensor(value).is_floating_point() or torch.as_tensor(value).is_complex()


def _as_numpy(tensor: Any) -> np.ndarray:
    tensor = torch.as_tensor(tensor).detach().resolve_conj().resolve_neg()
    tensor = tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def _as_array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(
        _as_numpy(tensor.to(_NARROW.get(tensor.dtype, tensor.dtype))),
        str(tensor.dtype).removeprefix("torch.") if tensor.dtype in (torch.bfloat16, torch.float16) else None,
    )


_PAGE = Path(__file__).parents[2] / "docs" / "lowerings.md"
_HEADING = """# Torch operations, one by one

Each operation of PyTorch's database of operators (`torch.testing._internal.common_methods_invocations.op_db`) that has samples, run
inside of a trace and in torch, on at most {most} of its samples a dtype and their non-contiguous forms; their shapes have axes of
length 0 and 1, operands that broadcast, and options. A cell says how many results agree with torch: the same shape, dtype (of 32
bits for torch's 64) and numbers. Integers and booleans are equal; floats differ by at most {roundings:.0f} units of rounding at the
scale of the result, or by four times torch's own difference from float64. "{refused}" is an error of the trace: nothing is
computed. A dash: torch has no samples of that dtype, or they say nothing (random numbers, or torch fails on them).

`python tests/support/lowerings.py` makes this page (with names behind it, their rows); a test of the sweep compares each row.
Random programs of views, indices and writes in place are tested beside it (`tests/tracing/test_random_programs.py`).

"""


def row_of(operation: Any) -> tuple[str, dict[str, list[str]]]:
    """The operation's row of the page, and what differs in each dtype without a known reason."""
    cells, wrong, reasons = [], {}, []
    for dtype in DTYPES:
        found = compare(operation, dtype)
        why = KNOWN.get((operation.name, dtype), KNOWN.get((operation.name, None)))
        if found.differ and why is None:
            wrong[str(dtype)] = found.differ
        parts = [f"{found.agree}" if found.agree else "", f"{len(found.refused)} refused" if found.refused else ""]
        parts.append(f"{len(found.differ)} differ" if found.differ else "")
        cells.append(", ".join(filter(None, parts)) or "-")
        reasons += [why] if found.differ and why else []
    return f"| `{name_of(operation)}` | {' | '.join(cells)} | {'; '.join(dict.fromkeys(reasons))} |", wrong


def main() -> None:
    """Write the page, or the rows of the operations that are named."""
    rows, failures = [], 0
    with lowerings_used() as used:
        for operation in operations():
            if sys.argv[1:] and operation.name not in sys.argv[1:]:
                continue
            row, wrong = row_of(operation)
            rows.append(row)
            failures += len(wrong)
            for dtype, lines in wrong.items():
                print(name_of(operation), dtype, *sorted(set(lines))[:3], sep="\n    ", flush=True)
    if sys.argv[1:]:
        lines = _PAGE.read_text().splitlines()
        new = {row.split("`")[1]: row for row in rows}
        lines = [new.get(line.split("`")[1], line) if line.startswith("| `") else line for line in lines]
        _PAGE.write_text("\n".join(lines) + "\n")
        return
    names = " | ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    heading = _HEADING.format(most=MOST_SAMPLES, roundings=_ROUNDINGS, refused="n refused")
    table = [f"| operation | {names} | why they may differ |", "| --- " * (len(DTYPES) + 2) + "|", *rows]
    unused = sorted({_text(op) for op in tracing._environment()._ops} - {_text(op) for op in used})
    closing = f"\n## Entries of the table that no sample reaches\n\n{', '.join(f'`{name}`' for name in unused)}\n"
    _PAGE.write_text(heading + "\n".join(table) + "\n" + closing)
    print(f"{len(rows)} operations, {failures} differences without a reason")


def _text(op: Any) -> str:
    return (
        str(op)
        if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        else getattr(op, "__name__", str(op))
    )


if __name__ == "__main__":
    main()
