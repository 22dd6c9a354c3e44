"""The whole matrix from one call: which architectures, where the results go.

Turns names of mappings and model types into a file of results and a page. It is what `hfax matrix` calls.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hfax.errors import InvalidInputError
from hfax.matrix.architectures import MAPPINGS, architectures
from hfax.matrix.case import CaseResult
from hfax.matrix.report import render, versions
from hfax.matrix.runner import run_cases

HFAX_FAILS = ("forward fails", "forward differs", "generate fails", "generate differs")
"""Outcomes that are hfax's fault, not the shrinker's or transformers'."""


def run_matrix(
    *,
    mappings: list[str] | None = None,
    model_types: list[str] | None = None,
    num_jobs: int = 2,
    timeout_s: float = 300.0,
    tensor: int = 1,
    json_file: Path | None = None,
    markdown: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Run architectures and write what came of them.

    Args:
        mappings: keys of `MAPPINGS`; None for all.
        model_types: only these; None for all.
        num_jobs: processes at a time.
        timeout_s: for one architecture.
        tensor: over how many virtual devices the weights are split.
        json_file: where to write the results, when all is done.
        markdown: where to write the page.
        say: gets a line for each architecture that does not work, and for each mapping.

    Returns:
        How many failed in hfax.

    Raises:
        InvalidInputError: no such mapping or model type.
    """
    check_mappings(mappings)
    results: list[CaseResult] = []
    for mapping in mappings or MAPPINGS:
        chosen = [a for a in architectures(mapping) if model_types is None or a.model_type in model_types]
        counts: Counter[str] = Counter()

        def show(result: CaseResult, counts: Counter[str] = counts) -> None:
            counts[result.outcome] += 1
            if result.outcome != "works":
                say(f"{result.outcome:16} {result.model_type} ({result.class_name}): {result.reason[:200]}")

        results += run_cases(chosen, num_jobs=num_jobs, timeout_s=timeout_s, tensor=tensor, on_result=show)
        say(f"{mapping}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
        _write(results, json_file, markdown)  # after each mapping: an interrupted run keeps what it has
    if not results:
        raise InvalidInputError(
            f"None of the mappings has {', '.join(model_types or [])}.",
            "Model types are spelled as in config.json.",
            "Look them up in docs/support.md.",
        )
    return sum(r.outcome in HFAX_FAILS for r in results)


def check_mappings(mappings: Iterable[str] | None) -> None:
    """Raise for names that `MAPPINGS` does not have."""
    wrong = sorted(set(mappings or ()) - set(MAPPINGS))
    if wrong:
        raise InvalidInputError(
            f"No mapping is called {', '.join(wrong)}.",
            "The matrix goes by transformers' auto mappings.",
            f"Use some of: {', '.join(MAPPINGS)}.",
        )


def _write(results: list[CaseResult], json_file: Path | None, markdown: Path | None) -> None:
    results.sort(key=lambda r: (list(MAPPINGS).index(r.mapping), r.model_type))
    if json_file is not None:
        rows = [{n: v for n, v in dataclasses.asdict(r).items() if n != "variation"} for r in results]
        replace_file(json_file, json.dumps({"versions": versions(), "results": rows}, indent=1))
    if markdown is not None:
        replace_file(markdown, render(results))


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    part.replace(path)
