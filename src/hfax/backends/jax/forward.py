"""One compiled forward pass: inputs to the device, the program for their shapes, and its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from hfax.backends.jax.results import as_torch_tree
from hfax.backends.jax.size_classes import PaddedCall
from hfax.errors import InvalidInputError
from hfax.programs.checks import raise_failed
from hfax.programs.program_cache import ProgramCache
from hfax.sharding.layout import Layout, to_host
from hfax.tracing.host_reads import VALUE_NEEDED, key_of, until_read
from hfax.tracing.structure import Structure, flatten, is_array, is_traced, unflatten

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel

Forward = Callable[[Structure, dict[str, jax.Array], list[jax.Array]], tuple[list[Any], Any]]
"""Takes the structure of the inputs, the weights and the arrays of the inputs; returns arrays, and a note."""
MOST_READS = 8
"""Values that are read between the programs of a call: each ends a program, which the next one begins with."""


def reject_traced(inputs: Mapping[str, Any], class_name: str) -> None:
    """Raise for a call inside of a JAX transformation.

    Args:
        inputs: inputs by name.
        class_name: class of the model, for the error.

    Raises:
        InvalidInputError: an input is traced.
    """
    if any(is_traced(array) for array in flatten(inputs)[0]):
        raise InvalidInputError(
            f"{class_name} was called inside a JAX transformation (jit, grad, vmap, …).",
            "Calling the model runs its own compiled program; its weights would become constants of yours.",
            "Use the pure function: jax.jit(lambda params, ids: model.apply(params, input_ids=ids))(model.params, ids).",
        )


def run_padded(
    model: TracedModel,
    programs: ProgramCache,
    layout: Layout,
    weights: dict[str, jax.Array],
    call: PaddedCall,
    *,
    to_torch: bool,
) -> Any:
    """As `run_forward`, with padded inputs and outputs in the sizes of the call.

    Raises:
        UnprovenError: an output may depend on padding; nothing was compiled.
        InvalidInputError: a check in the modelling code failed.
        OutOfMemoryError: the program does not fit the device.
    """

    def forward(structure: Structure, params: dict[str, jax.Array], arrays: list[jax.Array]) -> tuple[list[Any], Any]:
        cuts, lengths = call.prove(model, weights)
        outputs, note = flatten(model.apply_checked(params, (), unflatten(structure, arrays)), is_array)
        return outputs, (note, cuts, lengths)

    return _result(*padded_outputs(programs, layout, weights, call, forward), to_torch=to_torch)


def padded_outputs(
    programs: ProgramCache, layout: Layout, weights: dict[str, jax.Array], call: PaddedCall, forward: Forward
) -> tuple[list[Any], Structure]:
    """The arrays of a padded call's outputs in the sizes of the call, and the structure of the outputs and their checks.

    Args:
        programs: the program cache of the model.
        layout: devices and shardings.
        weights: the arrays that the program takes besides inputs.
        call: the call.
        forward: what is compiled if the program is not stored.
    """
    arrays, structure = flatten(call.inputs, is_array)
    args = (weights, layout.put_rows(arrays))
    program = programs.get(_name(arrays), (structure, call.key), functools.partial(forward, structure), args)
    note, cuts, lengths = program.note
    return call.cut(program.run(*args), cuts), call.structure(note, lengths)


def exact_outputs(
    programs: ProgramCache,
    layout: Layout,
    weights: dict[str, jax.Array],
    inputs: Mapping[str, Any],
    forward: Forward,
) -> tuple[list[Any], Structure]:
    """As `padded_outputs`, for inputs in their own sizes.

    Values that the modelling code reads are read between programs. If there are more than `MOST_READS`, or if two programs round
    such a value differently, each operation runs by itself.
    """
    arrays, structure = flatten(inputs, is_array)
    args = (weights, layout.put_rows(arrays))
    name, answers = _name(arrays), ()
    while name not in programs.run_by_operation:
        trace = until_read(functools.partial(forward, structure), answers)
        key = (structure, *key_of(answers)) if answers else structure
        program = programs.get(name, key, trace, args)
        outputs = program.run(*args)
        if answers:
            outputs, agrees = outputs
            if not to_host(agrees):
                break
        if program.note != VALUE_NEEDED:
            return outputs, program.note
        answers = (*answers, to_host(outputs[0]))
        if len(answers) > MOST_READS:
            programs.run_by_operation.add(name)
    return forward(structure, *args)


def _result(outputs: list[Any], note: Structure, *, to_torch: bool) -> Any:
    result, checks = unflatten(note, as_torch_tree(outputs) if to_torch else outputs)
    raise_failed(checks)
    return result


def _name(arrays: list[Any]) -> str:
    return "forward " + ", ".join(str(list(a.shape)) for a in arrays[:3])


def run_forward(
    model: TracedModel,
    programs: ProgramCache,
    layout: Layout,
    weights: dict[str, jax.Array],
    inputs: Mapping[str, Any],
    *,
    to_torch: bool,
) -> Any:
    """The model's output class with torch tensors or jax arrays.

    Args:
        model: the traced module.
        programs: the program cache of the model.
        layout: devices and shardings.
        weights: the arrays that the program takes besides inputs.
        inputs: prepared inputs by name.
        to_torch: return torch tensors.

    Raises:
        InvalidInputError: a check in the modelling code failed.
        OutOfMemoryError: the program does not fit the device.
    """

    def forward(structure: Structure, params: dict[str, jax.Array], arrays: list[jax.Array]) -> tuple[list[Any], Any]:
        return flatten(model.apply_checked(params, (), unflatten(structure, arrays)), is_array)

    return _result(*exact_outputs(programs, layout, weights, inputs, forward), to_torch=to_torch)
