"""What `hfax plan` prints: the answer in a sentence, then tables with the columns that have figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfax.planning.plan import Plan
    from hfax.planning.program_time import ProgramTime

FILE_WIDTH = 120
"""Table width in columns when stdout is not a terminal."""
_Column = tuple[str, bool, "Callable[[Plan], str | None]"]
"""A header with its unit, whether the column is aligned to the left, and a plan's entry; None: not known."""


def answer(plans: Sequence[Plan]) -> str:
    """Which machines the model fits, and the smallest of them with its limit, in one or two sentences."""
    first = plans[0]
    cache = "" if first.kv_cache_dtype == "auto" else f" with {first.kv_cache_dtype} keys and values"
    what = f"{first.model} in {first.quantization or first.stored or first.dtype}{cache}, {first.context:,} tokens"
    batches = sorted({plan.batch for plan in plans})
    rows = ("one sequence" if batches[0] == 1 else f"{batches[0]} sequences") + " at a time"
    asked = [plan for plan in plans if plan.batch == batches[0]]
    fitting = [plan for plan in asked if plan.fits]
    if not fitting:
        best = max(asked, key=lambda plan: plan.memory_bytes / _needed(plan))
        return (
            f"{what}, {rows}: fits none of these machines. {best.machine} comes closest: {_needed(best) / 1e9:.1f} GB are needed "
            f"on each device, {best.memory_bytes / 1e9:.1f} GB are usable."
        )
    smallest = min(fitting, key=lambda plan: plan.num_devices * plan.memory_bytes)
    speed = ""
    if smallest.tokens_per_s is not None:
        how = "about" if smallest.times else "at most"
        speed = f", where {how} {smallest.tokens_per_s:,.0f} tokens/s can be written"
    if len(asked) == 1:
        return f"{what}, {rows}: fits {smallest.machine}{speed}."
    return f"{what}, {rows}: fits {len(fitting)} of {len(asked)} machines. The smallest is {smallest.machine}{speed}."


def _needed(plan: Plan) -> int:
    return plan.weight_bytes + plan.cache_bytes + (plan.temporary_bytes or 0)


def print_plans(plans: Sequence[Plan], assumptions: str) -> None:
    """Print the answer, the tables, why something was not compiled, and what the figures assume."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    console.print(answer(plans), markup=False, highlight=False)
    console.print(_table(f"Memory of each device at {plans[0].context:,} tokens", _MEMORY, plans))
    title = "Estimated speed" if any(plan.times for plan in plans) else "Limits of speed"
    image = "" if (size := plans[0].image_size) is None else f" with an image of {size[0]} x {size[1]} pixels"
    console.print(_table(f"{title}, prompts of {plans[0].prompt:,} tokens{image}", _SPEED, plans))
    if len(plans) == 1 and plans[0].times:
        console.print(_spent(plans[0].times["decode"]), markup=False, highlight=False)
    for problem in dict.fromkeys(f"{plan.machine}: {plan.problem}" for plan in plans if plan.problem):
        console.print(problem, markup=False)
    notes = [assumptions]
    if all(plan.temporary_bytes is None for plan in plans):
        notes.insert(0, "Nothing was compiled: temporaries and collectives are not included.")
    console.print(" ".join(notes), markup=False)


def _spent(step: ProgramTime) -> str:
    """What a decoding step's time is spent on, in a sentence."""
    shares = [f"{seconds * 1e3:.2f} ms of {name}" for name, seconds in step.shares.items() if seconds]
    parts = [f"{name} {seconds * 1e3:.2f}" for name, seconds in list(step.parts.items())[:_NUM_PARTS]]
    return (
        f"A decoding step takes {step.seconds * 1e3:.2f} ms: {', '.join(shares)}; {step.num_launches:,} launches. "
        f"Its longest parts, in ms: {', '.join(parts)}."
    )


_NUM_PARTS = 6


def _table(title: str, columns: Sequence[_Column], plans: Sequence[Plan]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    entries = [(column, [column[2](plan) for plan in plans]) for column in columns]
    known = [(column, values) for column, values in entries if any(value is not None for value in values)]
    for (header, left, _), _values in known:
        table.add_column(header, justify="left" if left else "right")
    for row in zip(*(values for _, values in known), strict=True):
        table.add_row(*("-" if value is None else value for value in row))
    return table


def _gb(number: int | None) -> str | None:
    return None if number is None else f"{number / 1e9:.2f}"


def _mesh(plan: Plan) -> str:
    return " ".join(f"{name} {size}" for name, size in plan.mesh.items())


_MEMORY: tuple[_Column, ...] = (
    ("machine", True, lambda plan: plan.machine),
    ("mesh", True, _mesh),
    ("batch", False, lambda plan: str(plan.batch)),
    ("fits", True, lambda plan: "yes" if plan.fits else "no"),
    ("weights, GB", False, lambda plan: _gb(plan.weight_bytes)),
    ("cache, GB", False, lambda plan: _gb(plan.cache_bytes)),
    ("temporaries, GB", False, lambda plan: _gb(plan.temporary_bytes)),
    ("usable, GB", False, lambda plan: _gb(plan.memory_bytes)),
    ("longest context", False, lambda plan: f"{plan.longest_context:,}"),
    ("largest batch", False, lambda plan: f"{plan.largest_batch:,}"),
)
_SPEED: tuple[_Column, ...] = (
    ("machine", True, lambda plan: plan.machine),
    ("batch", False, lambda plan: str(plan.batch)),
    ("first token, ms", False, lambda plan: None if plan.prefill_s is None else f"{plan.prefill_s * 1e3:.1f}"),
    ("tokens/s", False, lambda plan: None if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}"),
    ("limited by", True, lambda plan: plan.limited_by or None),
    (
        "collectives a layer",
        False,
        lambda plan: None if plan.collectives_per_layer is None else f"{plan.collectives_per_layer:.1f}",
    ),
    (
        "received a step, MB",
        False,
        lambda plan: f"{plan.collective_bytes['decode'] / 1e6:.1f}" if plan.collective_bytes else None,
    ),
    ("compile, s", False, lambda plan: None if plan.compile_s is None else f"{plan.compile_s:.0f}"),
)
