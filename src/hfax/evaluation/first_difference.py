"""The first module of a model, and the first operation in it, whose outputs differ from plain transformers.

A forward pass runs on both sides with every module's outputs recorded, then once more with those of every operation of the first
module that differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from hfax.backends.jax.model import JaxModel
from hfax.evaluation.reference import Inputs, Reference, as_dtype, is_rounding, output_tensors, relative_error
from hfax.kernels.target import compiling_for
from hfax.load.host_arrays import to_numpy
from hfax.tracing.geometry import HostArray
from hfax.tracing.torchax import as_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a forward pass first differs.

    Args:
        part: name of the first module with different outputs; "" for the model itself.
        part_class: class of that module.
        error: largest difference of its outputs, relative to their largest value.
        operation: the first torch operation in it with a different result; None if hfax runs other operations there (a patch).
        operation_error: relative error of that operation's result.
    """

    part: str
    part_class: str
    error: float
    operation: str | None
    operation_error: float | None


def first_difference(model: JaxModel, reference: Reference, inputs: Inputs) -> Difference | None:
    """The first differing module, in the reference's return order, and its first differing operation."""
    names = dict(reference.plain.named_modules())
    expected, wider = (_plain_outputs(plain, inputs, _part_outputs) for plain in (reference.plain, reference.wider))
    mine = _traced_outputs(model, inputs, _part_outputs)
    for part, theirs in expected.items():
        if len(mine.get(part, ())) != len(theirs):
            continue  # a patch replaces its caller
        error, rounding = _largest_error(mine[part], theirs), _largest_error(theirs, wider[part])
        if not is_rounding(error, rounding):
            operation = _first_operation(model, reference, inputs, part)
            return Difference(
                part=part,
                part_class=type(names[part]).__name__,
                error=error,
                operation=operation and operation[0],
                operation_error=operation and operation[1],
            )
    return None


def _first_operation(model: JaxModel, reference: Reference, inputs: Inputs, part: str) -> tuple[str, float] | None:
    collecting = functools.partial(_operation_outputs, part=part)
    expected, wider = (_plain_outputs(plain, inputs, collecting) for plain in (reference.plain, reference.wider))
    mine = _traced_outputs(model, inputs, collecting)
    for (name, theirs), (own, arrays), widest in zip(expected.items(), mine.items(), wider.values(), strict=False):
        if own != name or len(arrays) != len(theirs):
            return None
        error, rounding = _largest_error(arrays, theirs), _largest_error(theirs, widest)
        if not is_rounding(error, rounding):
            return name.partition(" ")[2], error
    return None


def _largest_error(mine: Sequence[Any], theirs: Sequence[torch.Tensor]) -> float:
    return max((relative_error(a, b) for a, b in zip(mine, theirs, strict=True)), default=0.0)


def _plain_outputs(plain: Any, inputs: Inputs, collecting: Any) -> dict[str, list[torch.Tensor]]:
    """Outputs that `collecting` records in a torch forward pass."""
    with torch.no_grad(), collecting(plain) as found:
        plain(**{n: as_dtype(v, plain.dtype) for n, v in inputs.items()})
    return found


def _traced_outputs(model: JaxModel, inputs: Inputs, collecting: Any) -> dict[str, list[jax.Array]]:
    """Outputs that `collecting` records in hfax's forward pass, compiled for the model's device."""
    prepared = model.parts.traced.prepare({n: to_numpy(v) for n, v in inputs.items()})
    static = {n: v for n, v in prepared.items() if isinstance(v, HostArray)}
    given = {n: v for n, v in prepared.items() if n not in static}
    order: list[str] = []

    def forward(params: Any, arrays: Any) -> dict[str, list[jax.Array]]:
        outputs: dict[str, list[jax.Array]] = {}

        def look(module: torch.nn.Module, inputs: dict[str, Any]) -> None:
            with collecting(module) as found:
                module(**inputs)
            outputs.update({name: list(map(as_array, tensors)) for name, tensors in found.items()})

        model.parts.traced.inspect(params, look, arrays, static)
        order[:] = outputs
        return outputs

    with compiling_for(model.jax_device.platform):
        found = jax.jit(forward)(model.params, given)
    return {name: found[name] for name in order}


@contextlib.contextmanager
def _part_outputs(module: torch.nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record each module's output tensors on its first call, in return order."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(part: torch.nn.Module, args: Any, output: Any) -> None:  # a return value would replace the output
            if name not in found:
                found[name] = output_tensors(output)

        return hook

    hooks = [part.register_forward_hook(keep(name)) for name, part in module.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _operation_outputs(module: torch.nn.Module, part: str) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record each operation's output tensors in one module, in order, by index and name ("3 torch.nn.functional.linear")."""
    found: dict[str, list[torch.Tensor]] = {}
    is_inside = False

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = resolve_name(func) or getattr(func, "__name__", str(func))
            if is_inside and not name.endswith("__get__") and (kept := output_tensors(out)):
                found[f"{len(found)} {name}"] = kept
            return out

    def enter(*_: Any) -> None:
        nonlocal is_inside
        is_inside = not found

    def leave(*_: Any) -> None:
        nonlocal is_inside
        is_inside = False

    target = module.get_submodule(part)
    hooks = [target.register_forward_pre_hook(enter), target.register_forward_hook(leave)]
    try:
        with Recorder():
            yield found
    finally:
        for hook in hooks:
            hook.remove()
