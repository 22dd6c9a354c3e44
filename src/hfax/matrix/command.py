"""Runs the support matrix for `hfax matrix`.

Runs the selected mappings and model types, and writes a results file and a Markdown page.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hfax.errors import InvalidInputError
from hfax.matrix.architectures import MAPPINGS, architectures
from hfax.matrix.case import HFAX_FAILS, CaseResult
from hfax.matrix.report import render, versions
from hfax.matrix.runner import run_cases


def run_matrix(
    *,
    mappings: list[str] | None = None,
    model_types: list[str] | None = None,
    num_jobs: int = 2,
    timeout_s: float = 300.0,
    tensor: int = 1,
    trains: bool = False,
    json_file: Path | None = None,
    markdown: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Run architectures and write the results.

    Args:
        mappings: keys of `MAPPINGS`; None for all.
        model_types: model types to run; None for all.
        num_jobs: number of parallel processes.
        timeout_s: time limit per architecture, in seconds.
        tensor: number of virtual devices to shard weights over.
        trains: also compare a training step.
        json_file: results file, updated after each mapping.
        markdown: Markdown page, updated after each mapping.
        say: receives a line for each architecture that does not work, and for each mapping.

    Returns:
        Number of hfax failures.

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

        results += run_cases(
            chosen, num_jobs=num_jobs, timeout_s=timeout_s, tensor=tensor, trains=trains, on_result=show
        )
        say(f"{mapping}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
        _write(results, json_file, markdown)  # after each mapping: an interrupted run keeps what it has
    if not results:
        raise InvalidInputError(
            f"No mapping has {', '.join(model_types or [])}.",
            "Model types are spelled as in config.json.",
            "Use a model type from docs/support.md.",
        )
    return sum(r.outcome in HFAX_FAILS for r in results)


def check_mappings(mappings: Iterable[str] | None) -> None:
    """Raise for names that `MAPPINGS` does not have."""
    wrong = sorted(set(mappings or ()) - set(MAPPINGS))
    if wrong:
        raise InvalidInputError(
            f"Unknown mapping {', '.join(wrong)}.",
            "Mappings are transformers' auto mappings.",
            f"Use one or more of: {', '.join(MAPPINGS)}.",
        )


def _write(results: list[CaseResult], json_file: Path | None, markdown: Path | None) -> None:
    results.sort(key=lambda r: (list(MAPPINGS).index(r.mapping), r.model_type))
    if json_file is not None:
        rows = [{n: v for n, v in dataclasses.asdict(r).items() if n != "variation"} for r in results]
        replace_file(json_file, json.dumps({"versions": versions(), "results": rows}, indent=1))
    if markdown is not None:
        replace_file(markdown, render(results))


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    part.replace(path)
