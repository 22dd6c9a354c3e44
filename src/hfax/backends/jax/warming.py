"""The programs of `generate`, compiled ahead of use: two steps of its loop, with programs that are not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import jax

from hfax.backends.base_model import Request
from hfax.errors import UnsupportedOptionError
from hfax.generation.generate import GenerationLoop
from hfax.generation.warm_up import WarmedUp, check_sizes, warm_up
from hfax.programs.buckets import Size
from hfax.programs.program_cache import compiling_ahead


def compile_generation(
    read: Callable[[int, int], Request],
    open_loop: Callable[[Request], tuple[GenerationLoop, dict[str, jax.Array]]],
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    *,
    max_new_tokens: int,
    progress: bool,
) -> list[WarmedUp]:
    """What was traced and compiled for each combination of a batch size and a prompt length.

    Args:
        read: gives the request of so many prompts of so many tokens.
        open_loop: gives the loop of a request before its first step, and the inputs of its `start`.
        batch_sizes: numbers of prompts.
        prompt_lengths: in tokens.
        max_new_tokens: of the requests.
        progress: show a progress bar on a terminal.

    Raises:
        InvalidInputError: a size is not positive, or a prompt does not fit the model's context.
    """
    check_sizes(batch_sizes, prompt_lengths, max_new_tokens)

    def run(batch_size: int, prompt_length: int) -> Size:
        request = read(batch_size, prompt_length)
        return (*request.prompts.padded_shape, compile_request(request, open_loop))

    return warm_up(run, batch_sizes, prompt_lengths, progress=progress)


def compile_request(
    request: Request, open_loop: Callable[[Request], tuple[GenerationLoop, dict[str, jax.Array]]]
) -> int:
    """Compile the programs of a request; returns its cache's capacity. Programs between which the host computes are run."""
    loop, inputs = open_loop(request)
    with contextlib.nullcontext() if loop.visits_host else compiling_ahead():
        state = loop.start(inputs)
        if request.options.max_new_tokens > 1:
            loop.advance(state, 2)
    return loop.capacity


def reject_other_inputs(main_input: str, class_name: str) -> None:
    """Raise for a model whose main input is not token ids.

    Raises:
        UnsupportedOptionError: a batch size and a prompt length do not determine its shapes.
    """
    if main_input != "input_ids":
        raise UnsupportedOptionError(
            f"compile() does not know the inputs of {class_name}.",
            "Its programs depend on more than batch size and prompt length.",
            "Call generate() once with inputs of the expected shapes.",
        )
