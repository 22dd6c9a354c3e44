"""Runs the support matrix for `hfax matrix`.

Runs the selected mappings and model types, and writes a results file and a Markdown page.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
    resume: bool = False,
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
        json_file: results file, updated after each architecture.
        resume: keep what works in `json_file`, and run the rest. With `trains`, what was not trained is run again.
        markdown: Markdown page, updated after each mapping.
        say: receives a line for each architecture that does not work, and for each mapping.

    Returns:
        Number of hfax failures.

    Raises:
        InvalidInputError: no such mapping or model type, or the results to resume are of other versions of the libraries.
    """
    check_mappings(mappings)
    asked = [
        (mapping, a)
        for mapping in mappings or MAPPINGS
        for a in architectures(mapping)
        if model_types is None or a.model_type in model_types
    ]
    known = _read(json_file) if resume and json_file is not None and json_file.is_file() else []
    results = [
        r
        for r in known
        if r.outcome == "works" and (r.gradient_error is not None or not trains or r.torch_cannot_train)
    ]
    done = {_key(r) for r in results}
    for mapping in mappings or MAPPINGS:
        chosen = [a for of, a in asked if of == mapping and _key(a) not in done]
        counts: Counter[str] = Counter()

        def show(result: CaseResult, counts: Counter[str] = counts) -> None:
            counts[result.outcome] += 1
            results.append(result)
            if json_file is not None:
                _write_results(results, json_file)  # an interrupted run keeps what it has
            if result.outcome != "works":
                say(f"{result.outcome:16} {result.model_type} ({result.class_name}): {result.reason[:200]}")

        run_cases(chosen, num_jobs=num_jobs, timeout_s=timeout_s, tensor=tensor, trains=trains, on_result=show)
        kept = sum(r.mapping == mapping for r in results) - counts.total()
        parts = [f"{n} {outcome}" for outcome, n in counts.most_common()] + [f"{kept} kept"] * bool(kept)
        say(f"{mapping}: {', '.join(parts)}")
        if markdown is not None:
            replace_file(markdown, render(_sorted(results)))
    if not asked:
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


def _key(case: Any) -> tuple[str, str, str]:
    return case.mapping, case.model_type, case.class_name


def _sorted(results: list[CaseResult]) -> list[CaseResult]:
    return sorted(results, key=lambda r: (list(MAPPINGS).index(r.mapping), r.model_type))


def _write_results(results: list[CaseResult], json_file: Path) -> None:
    rows = [{n: v for n, v in dataclasses.asdict(r).items() if n != "variation"} for r in _sorted(results)]
    replace_file(json_file, json.dumps({"versions": versions(), "results": rows}, indent=1))


def _read(json_file: Path) -> list[CaseResult]:
    """The results of an earlier run."""
    try:
        found = json.loads(json_file.read_text())
        results = [CaseResult(**row) for row in found["results"]]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(
            f"{json_file} has no results of hfax matrix.",
            f"{type(error).__name__}: {error}",
            "Pass another --json-file; this one is unchanged.",
        ) from error
    if found["versions"] != versions():
        raise InvalidInputError(
            f"The results in {json_file} are of other versions.",
            f"They are of {found['versions']}, and this is {versions()}.",
            "Run all architectures again, without --resume.",
        )
    return results


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    part.replace(path)
