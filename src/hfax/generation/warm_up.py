"""Making programs before they are needed: every combination of batch size and prompt length runs once on a prompt of its shape.

Whether a program was compiled, or read from disk, is found out by listening to the phases. This module does not know models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from hfax.phases import PhaseEvent, listen
from hfax.programs.buckets import Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmedUp:
    """What was made for one batch size and prompt length.

    Args:
        batch_size: as given.
        prompt_length: as given.
        padded: what they were rounded up to.
        traced: program to seconds of its trace; empty where all programs were at hand, in memory or on disk.
        compiled: program to seconds of its compilation.
        seconds: in all, the run included.
    """

    batch_size: int
    prompt_length: int
    padded: Size
    traced: dict[str, float]
    compiled: dict[str, float]
    seconds: float


def warm_up(
    run: Callable[[int, int], Size], batch_sizes: Sequence[int], prompt_lengths: Sequence[int], *, progress: bool
) -> list[WarmedUp]:
    """Call `run(batch_size, prompt_length)` for every combination.

    Args:
        run: makes the programs and runs them once; gives what the sizes were rounded up to.
        batch_sizes: numbers of prompts to prepare for.
        prompt_lengths: tokens, likewise.
        progress: show a bar on a terminal.
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
