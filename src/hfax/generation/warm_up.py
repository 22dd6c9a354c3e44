"""Warm-up: compile programs ahead of use by running each combination of batch size and prompt length once.

Phase events tell whether a program was compiled or read from disk. This module does not know models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from hfax.errors import InvalidInputError
from hfax.phases import PhaseEvent, listen
from hfax.programs.buckets import Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmedUp:
    """The result of warming up one batch size and prompt length.

    Args:
        batch_size: requested batch size.
        prompt_length: requested prompt length, in tokens.
        padded: the sizes they were rounded up to.
        traced: trace time of each program, in seconds; empty if all programs were cached, in memory or on disk.
        compiled: compile time of each program, in seconds.
        seconds: total time in seconds, the run included.
    """

    batch_size: int
    prompt_length: int
    padded: Size
    traced: dict[str, float]
    compiled: dict[str, float]
    seconds: float


def check_sizes(batch_sizes: Sequence[int], prompt_lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise for sizes that no call can have.

    Raises:
        InvalidInputError: a size is not positive.
    """
    if min([*batch_sizes, *prompt_lengths, max_new_tokens], default=0) < 1:
        raise InvalidInputError(
            f"compile() got batch_sizes={list(batch_sizes)}, prompt_lengths={list(prompt_lengths)} and "
            f"max_new_tokens={max_new_tokens}.",
            "Each size must be at least 1.",
            "Pass positive integers.",
        )


def warm_up(
    run: Callable[[int, int], Size], batch_sizes: Sequence[int], prompt_lengths: Sequence[int], *, progress: bool
) -> list[WarmedUp]:
    """Call `run(batch_size, prompt_length)` for every combination.

    Args:
        run: compiles the programs and runs them once; returns the padded sizes.
        batch_sizes: batch sizes to compile for.
        prompt_lengths: prompt lengths to compile for, in tokens.
        progress: show a progress bar on a terminal.
    """
    done = []
    pairs = list(itertools.product(batch_sizes, prompt_lengths))
    with _bar(len(pairs), progress) as show:
        for batch_size, prompt_length in pairs:
            seconds: dict[str, dict[str, float]] = {"trace": {}, "compile": {}}

            def hear(event: PhaseEvent, seconds: dict[str, dict[str, float]] = seconds) -> None:
                if event.seconds is None:
                    show(f"{event.name} {event.detail}", 0)
                elif event.name in seconds:
                    seconds[event.name][event.detail] = event.seconds

            show(f"batch {batch_size}, prompt {prompt_length}", 0)
            start = time.perf_counter()
            with listen(hear):
                padded = run(batch_size, prompt_length)
            show(f"batch {batch_size}, prompt {prompt_length}", 1)
            done.append(
                WarmedUp(
                    batch_size=batch_size,
                    prompt_length=prompt_length,
                    padded=padded,
                    traced=seconds["trace"],
                    compiled=seconds["compile"],
                    seconds=time.perf_counter() - start,
                )
            )
    return done


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[str, int], None]]:
    if not wanted or not sys.stderr.isatty():
        yield lambda what, more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, more: bar.update(task, description=what, advance=more)
