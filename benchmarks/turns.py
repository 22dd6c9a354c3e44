"""What `cpu.py` and `gpu.py` share: their arguments, and groups of subjects that take turns, measured, printed and written."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hfax.bench import report as reports
from hfax.bench.run import Plan, run


def parser_of(doc: str | None, shapes: Iterable[str], shape: str, groups: list[str]) -> argparse.ArgumentParser:
    """The arguments of a benchmark.

    Args:
        doc: its docstring.
        shapes: names to choose from.
        shape: the default.
        groups: names to choose from; all by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes, default=shape)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--limit-s", type=float, default=300, help="longest load, compilation or run")
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    return parser


def measure(
    options: argparse.Namespace,
    fields: Mapping[str, Any],
    groups_of: Callable[[str], dict[str, list[Plan]]],
    *,
    environment: dict[str, str],
    lines_of: Callable[[dict[str, Any]], list[str]] = lambda found: [],
) -> int:
    """Measure the wanted groups.

    Args:
        options: what a parser of `parser_of` read.
        fields: of the shape's config.json.
        groups_of: the subjects of each group, from the path of that file.
        environment: additional environment variables of the subjects' processes.
        lines_of: lines to print below a group's tables, from its report.

    Returns:
        1 when something has no figure, else 0.
    """
    with tempfile.TemporaryDirectory(prefix="hfax-bench-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(fields))
        wanted = groups_of(str(config))
        results = {}
        for name in options.groups:
            results[name] = run(
                wanted[name],
                rounds=options.rounds,
                limit_s=options.limit_s,
                # every group begins like a machine that has never seen the model
                environment={"HFAX_HOME": f"{folder}/{name}", **environment},
                tell=lambda message: print(message, file=sys.stderr, flush=True),
            )
            for table in reports.tables(results[name]):
                Console(width=150).print(table)
            for line in lines_of(results[name]):
                print(line, flush=True)
    entries = [entry for found in results.values() for entry in found["subjects"].values()]
    for entry in entries:
        entry["model"] = options.shape
    if options.json_file:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")
    return int(any("failure" in e or any("failure" in c for c in e["cases"].values()) for e in entries))
