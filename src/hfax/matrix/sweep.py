"""Fuzzing with random variations of architectures, for `hfax matrix --draws`.

Turns mappings, a number of draws and a seed into counts and a list of minimised failures.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hfax.matrix.architectures import Architecture, architectures, small_config
from hfax.matrix.case import CaseResult
from hfax.matrix.command import HFAX_FAILS, check_mappings, replace_file
from hfax.matrix.runner import run_cases
from hfax.matrix.variations import Variation, draw
from hfax.synthetic.images import AROUND, SIZES
from hfax.synthetic.inputs import GENERATING

REFUSALS = ("UnsupportedModelError", "UnsupportedOptionError", "InvalidInputError")
"""hfax errors that reject unsupported input: not failures."""


def run_sweep(
    *,
    draws: int,
    seed: int = 0,
    mappings: Sequence[str] | None = None,
    model_types: Sequence[str] | None = None,
    num_jobs: int = 2,
    timeout_s: float = 300.0,
    corpus: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Counter[str]:
    """Sample variations, run and compare them.

    Args:
        draws: variations per architecture.
        seed: seed of the first variation; the others follow.
        mappings: keys of `MAPPINGS`; None: those that generate text.
        model_types: model types to run; None for all.
        num_jobs: number of parallel processes.
        timeout_s: time limit per case, in seconds.
        corpus: file to add minimised failures to.
        say: receives a line for each failure, and for each mapping.

    Returns:
        Count of each outcome; "refused" counts hfax's own errors.

    Raises:
        InvalidInputError: an unknown mapping.
    """
    check_mappings(mappings)
    total: Counter[str] = Counter()
    for mapping in mappings or GENERATING:
        cases = list(_cases(mapping, model_types, draws, seed))
        counts: Counter[str] = Counter()

        def show(result: CaseResult, counts: Counter[str] = counts) -> None:
            counts[outcome_of(result)] += 1
            if outcome_of(result) in HFAX_FAILS:
                say(f"{result.outcome:16} {result.model_type}: {result.reason[:200]} {result.variation}")

        results = run_cases(
            [a for a, _ in cases], [v for _, v in cases], num_jobs=num_jobs, timeout_s=timeout_s, on_result=show
        )
        say(f"{mapping}: {len(results)} drawn; " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
        total += counts
        if corpus is not None:
            failed = [r for r in results if outcome_of(r) in HFAX_FAILS]
            add_to_corpus(corpus, [minimise(r, timeout_s=timeout_s) for r in failed])
    return total


def outcome_of(result: CaseResult) -> str:
    """The outcome; "refused" for hfax's own errors."""
    is_refused = result.outcome in HFAX_FAILS and result.reason.partition(":")[0] in REFUSALS
    return "refused" if is_refused else result.outcome


def _cases(
    mapping: str, model_types: Sequence[str] | None, draws: int, seed: int
) -> Iterable[tuple[Architecture, Variation]]:
    for architecture in architectures(mapping):
        if model_types is not None and architecture.model_type not in model_types:
            continue
        try:
            config = small_config(architecture)
        except Exception:  # the matrix reports what cannot be shrunken
            continue
        for number in range(seed, seed + draws):
            yield architecture, draw(config, mapping, number)


def minimise(result: CaseResult, *, timeout_s: float = 300.0) -> CaseResult:
    """The same failure with a minimal set of changes, rows and tokens."""
    architecture = Architecture(mapping=result.mapping, model_type=result.model_type, class_name=result.class_name)
    smallest = result
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for variation in _smaller(smallest.variation or Variation()):
            (again,) = run_cases([architecture], [variation], num_jobs=1, timeout_s=timeout_s)
            if again.outcome == result.outcome and outcome_of(again) in HFAX_FAILS:
                smallest, is_smaller = again, True
                break
    return smallest


def _smaller(variation: Variation) -> Iterable[Variation]:
    for name in variation.changes:
        yield dataclasses.replace(variation, changes={n: v for n, v in variation.changes.items() if n != name})
    if len(variation.lengths) > 1:
        for length in variation.lengths:
            yield dataclasses.replace(variation, lengths=(length,))
    if variation.image_sizes:
        yield dataclasses.replace(variation, image_sizes=(), around=AROUND)
        for number, size in enumerate(variation.image_sizes):
            if size != SIZES[number]:
                sizes = [*variation.image_sizes]
                sizes[number] = SIZES[number]
                yield dataclasses.replace(variation, image_sizes=tuple(sizes))
    if variation.padding != "left":
        yield dataclasses.replace(variation, padding="left")
    if variation.new_tokens > 2:
        yield dataclasses.replace(variation, new_tokens=variation.new_tokens // 2)


def add_to_corpus(corpus: Path, results: Iterable[CaseResult]) -> None:
    """Add cases to the file, without duplicates."""
    known = read_corpus(corpus)
    for result in results:
        architecture = Architecture(mapping=result.mapping, model_type=result.model_type, class_name=result.class_name)
        if result.variation is not None and (architecture, result.variation) not in known:
            known.append((architecture, result.variation))
    rows: list[dict[str, Any]] = [dataclasses.asdict(a) | {"variation": dataclasses.asdict(v)} for a, v in known]
    replace_file(corpus, json.dumps(rows, indent=1))


def read_corpus(corpus: Path) -> list[tuple[Architecture, Variation]]:
    """The cases in a file; empty if it does not exist."""
    if not corpus.is_file():
        return []
    found = []
    for row in json.loads(corpus.read_text()):
        fields = row.pop("variation")
        fields["lengths"] = tuple(fields["lengths"])
        fields["image_sizes"] = tuple(map(tuple, fields.get("image_sizes", ())))
        fields["around"] = tuple(fields.get("around", AROUND))
        found.append((Architecture(**row), Variation(**fields)))
    return found
