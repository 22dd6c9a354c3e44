"""torch code in a trace, as a function of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from hfax.tracing import torchax as tracing
from hfax.tracing.host_reads import VALUE_NEEDED, Answers, until_read


def traced(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """What `function` of torch tensors gives (one, or a tuple or list of them) when it runs inside of a compiled trace.

    Args:
        function: torch code.
        arrays: its arguments; whole numbers have 32 bits in a trace.
    """

    def call(*values: jax.Array) -> list[jax.Array]:
        def inside(_: torch.nn.Module) -> list[jax.Array]:
            out = function(*(tracing.wrap(v) for v in values))
            return [tracing.unwrap(o) for o in (out if isinstance(out, (tuple, list)) else (out,))]

        return tracing.call_module(torch.nn.Identity(), {}, inside)

    return [np.array(o) for o in jax.jit(call)(*_in_32_bits(arrays))]


def traced_between_reads(function: Callable[..., Any], *arrays: np.ndarray) -> tuple[np.ndarray, int]:
    """What `function` of torch tensors gives (one) when values are read between programs, and how many were."""

    def call(*values: jax.Array) -> tuple[list[Any], Any]:
        out = tracing.call_module(torch.nn.Identity(), {}, lambda _: function(*(tracing.wrap(v) for v in values)))
        return [tracing.unwrap(out)], None

    answers: Answers = ()
    while True:
        notes: list[Any] = []

        def run(*values: jax.Array, answers: Answers = answers, notes: list[Any] = notes) -> Any:
            results, note = until_read(call, answers)(*values)
            notes.append(note)
            return results

        results: Any = jax.jit(run)(*_in_32_bits(arrays))
        if answers:
            results, agrees = results
            assert agrees
        found = np.asarray(results[0])
        if notes != [VALUE_NEEDED]:
            return found, len(answers)
        answers = (*answers, found)


def _in_32_bits(arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays]
