"""Judges what an attack measured: the table, and the list of what was violated."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hfax.bench.attacks.runner import grown

MAX_DELAY_S = 5.0
"""A valid request may take this much longer than the slowest one without attackers, in seconds."""
_SHOWN = 5


def violations(report: dict[str, Any]) -> list[str]:
    """What the server did that it should not do; empty if it stood the attack.

    Args:
        report: what `runner.run_attack` returned.

    Returns:
        A line for each claim violated in a stage: a valid request failed, or took more than 5 s longer than alone; /health
        failed, or took longer than `max_health_s`; a status of 500 or more but 503; a well-formed request without an answer;
        memory that was not given back.
    """
    alone_s = report["stages"][0]["valid"]["slowest_s"]
    return [
        f"{stage['name']}: {what}" for stage in report["stages"] for what in _wrong(stage, alone_s, report["attack"])
    ]


def _wrong(stage: dict[str, Any], alone_s: float, attack: dict[str, Any]) -> list[str]:
    found = []
    for what in ("valid", "health"):
        if failed := stage[what]["failed"]:
            found.append(f"{sum(failed.values())} of {stage[what]['count']} {what} requests failed: {_counts(failed)}")
        if not stage[what]["count"]:
            found.append(f"no {what} request was answered")
    if (slowest := stage["valid"]["slowest_s"]) > alone_s + MAX_DELAY_S:
        found.append(f"a valid request took {slowest:.1f} s; alone, at most {alone_s:.1f} s{_during(stage['valid'])}")
    if (slowest := stage["health"]["slowest_s"]) > attack["max_health_s"]:
        found.append(
            f"/health took {slowest:.2f} s; the limit is {attack['max_health_s']:g} s{_during(stage['health'])}"
        )
    if names := [case["name"] for case in stage["cases"] if any(_is_fault(label) for label in case["results"])]:
        found.append(f"statuses of 500 or more: {_some(names)}")
    if names := [case["name"] for case in stage["cases"] if case["is_broken"]]:
        found.append(f"connections closed without an answer: {_some(names)}")
    for source in grown(stage["memory_before"], stage["memory_after"]):
        before, after = stage["memory_before"][source], stage["memory_after"][source]
        found.append(f"memory ({source}) grew from {before >> 20} to {after >> 20} MB")
    return found


def _is_fault(label: str) -> bool:
    return label.isdigit() and int(label) >= 500 and label != "503"


def _during(summary: dict[str, Any]) -> str:
    return f" (during {_some(summary['slowest_during'])})" if summary["slowest_during"] else ""


def _counts(results: dict[str, int]) -> str:
    return ", ".join(f"{label} x {count}" for label, count in results.items())


def _some(names: list[str]) -> str:
    return "; ".join(names[:_SHOWN]) + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def table_of(report: dict[str, Any]) -> Table:
    """One row for the valid traffic alone, and one for each class."""
    load = report["load"]
    title = f"{report['attack']['url']}, load average {load['before'][0]:.1f} before and {load['after'][0]:.1f} after"
    table = Table(title=title, title_justify="left")
    for column in ("class", "cases", "results"):
        table.add_column(column)
    for column in ("valid", "failed", "changed", "slowest valid, s", "slowest /health, s", "memory, MB", "s"):
        table.add_column(column, justify="right")
    for stage in report["stages"]:
        valid, health = stage["valid"], stage["health"]
        table.add_row(
            stage["name"],
            str(len(stage["cases"]) or ""),
            _counts(stage["results"]),
            str(valid["count"]),
            str(sum(valid["failed"].values())),
            str(valid["changed"]),
            f"{valid['slowest_s']:.2f}",
            f"{health['slowest_s']:.2f}",
            "\n".join(
                f"{stage['memory_before'].get(source, 0) >> 20} to {size >> 20}"
                for source, size in stage["memory_after"].items()
            ),
            f"{stage['seconds']:.0f}",
        )
    return table
