"""Fuzzing with random variations of architectures, for `hfax matrix --draws`.

Turns mappings, a number of draws and a seed into counts and a list of minimised failures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hfax.matrix import records
from hfax.matrix.architectures import Architecture, architectures, small_config
from hfax.matrix.case import HFAX_FAILS, CaseResult
from hfax.matrix.command import check_mappings, replace_file
from hfax.matrix.runner import run_cases
from hfax.matrix.variations import Variation, draw
from hfax.synthetic.images import AROUND, SIZES
from hfax.synthetic.inputs import GENERATING


def run_sweep(
    *,
    draws: int,
    seed: int = 0,
    mappings: Sequence[str] | None = None,
    model_types: Sequence[str] | None = None,
    num_jobs: int = 2,
    timeout_s: float = 300.0,
    corpus: Path | None = None,
    json_file: Path | None = None,
    markdown: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Counter[str]:
    """Sample variations, run and compare them; each architecture gets its first before any gets its second.

    Args:
        draws: variations per architecture.
        seed: seed of the first variation; the others follow.
        mappings: keys of `MAPPINGS`; None: those that generate text.
        model_types: model types to run; None for all.
        num_jobs: number of parallel processes.
        timeout_s: time limit per case, in seconds.
        corpus: file to add minimised failures to.
        json_file: file of `Record`s, a line each, added to as they arrive. Variations that it has are not run again, but for
            hfax failures.
        markdown: page of all records of `json_file`, written at the end.
        say: receives a line for each failure, and for each mapping.

    Returns:
        Count of each outcome; "refused" counts hfax's own errors.

    Raises:
        InvalidInputError: an unknown mapping.
    """
    check_mappings(mappings)
    known = records.resume(json_file) if json_file is not None else {}
    total: Counter[str] = Counter()
    for mapping in mappings or GENERATING:
        drawn = list(_cases(mapping, model_types, draws, seed))
        cases = [(a, v, n) for a, v, n in drawn if not _is_done(known.get((mapping, a.model_type, n)))]
        numbers = {(a.model_type, repr(v)): n for a, v, n in cases}
        counts: Counter[str] = Counter()

        def keep(result: CaseResult, counts: Counter[str] = counts, numbers: dict[Any, int] = numbers) -> None:
            counts[result.verdict] += 1
            if result.verdict in HFAX_FAILS:
                say(f"{result.outcome:16} {result.model_type}: {result.reason[:200]} {result.variation}")
            record = records.record_of(result, numbers[result.model_type, repr(result.variation)])
            known[record.key] = record
            if json_file is not None:
                records.append(json_file, record)

        results = run_cases(
            [a for a, _, _ in cases], [v for _, v, _ in cases], num_jobs=num_jobs, timeout_s=timeout_s, on_result=keep
        )
        say(f"{mapping}: {len(results)} drawn; " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
        total += counts
        if corpus is not None:
            failed = [r for r in results if r.verdict in HFAX_FAILS]
            add_to_corpus(corpus, [minimise(r, timeout_s=timeout_s) for r in failed])
    if markdown is not None:
        replace_file(markdown, records.render(known.values()))
    return total


def _is_done(record: records.Record | None) -> bool:
    return record is not None and record.outcome not in HFAX_FAILS


def _cases(
    mapping: str, model_types: Sequence[str] | None, draws: int, seed: int
) -> Iterable[tuple[Architecture, Variation, int]]:
    configs = {}
    for architecture in architectures(mapping):
        if model_types is None or architecture.model_type in model_types:
            with contextlib.suppress(Exception):  # the matrix reports what cannot be shrunken
                configs[architecture] = small_config(architecture)
    for number in range(seed, seed + draws):
        for architecture, config in configs.items():
            yield architecture, draw(config, mapping, number), number


def minimise(result: CaseResult, *, timeout_s: float = 300.0) -> CaseResult:
    """The same failure with a minimal set of changes, rows and tokens."""
    architecture = Architecture(mapping=result.mapping, model_type=result.model_type, class_name=result.class_name)
    smallest = result
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for variation in _smaller(smallest.variation or Variation()):
            (again,) = run_cases([architecture], [variation], num_jobs=1, timeout_s=timeout_s)
            if again.outcome == result.outcome and again.verdict in HFAX_FAILS:
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
