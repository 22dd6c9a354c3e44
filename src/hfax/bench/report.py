"""Benchmark results as tables and as a plot. Depends only on the report's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from hfax.bench.drawing import pyplot


def tables(report: dict[str, Any]) -> list[Table]:
    """A table of measurements, and a table of loading and compilation."""
    speed = Table(title=_title(report), title_justify="left")
    for column in ("what", "case"):
        speed.add_column(column)
    for column in ("tokens/s", "ms/step", "spread", "of bandwidth", "of FLOP/s", "x slower than first"):
        speed.add_column(column, justify="right")
    start = Table(title=_start_title(report), title_justify="left")
    start.add_column("what")
    for column in ("load s", "first call s", "trace s", "compile s", "peak GB"):
        start.add_column(column, justify="right")
    for name, entry in report["subjects"].items():
        if "failure" in entry:
            speed.add_row(name, entry["failure"])
            continue
        for case_name, case in entry["cases"].items():
            speed.add_row(name, case_name, *_cells(case))
        cases = [c for c in entry["cases"].values() if "failure" not in c]
        peak = entry.get("device_peak_bytes") or entry.get("peak_bytes")
        start.add_row(
            name,
            f"{entry['load_seconds']:.2f}",
            f"{sum(c['first_call_seconds'] for c in cases):.2f}",
            *(
                f"{sum(c[n] for c in cases):.2f}" if cases and n in cases[0] else ""
                for n in ("trace_seconds", "compile_seconds")
            ),
            "" if peak is None else f"{peak / 1e9:.2f}",
        )
    return [speed, start]


def failures(report: dict[str, Any]) -> list[str]:
    """One line per failed subject or case."""
    lines = []
    for name, entry in report["subjects"].items():
        if "failure" in entry:
            lines.append(f"{name}: {entry['failure']}")
        lines += [f"{name}, {n}: {c['failure']}" for n, c in entry["cases"].items() if "failure" in c]
    return lines


def _title(report: dict[str, Any]) -> str:
    machine = report["machine"]
    limits = []
    if report.get("read_bandwidth"):
        limits.append(f"{report['read_bandwidth'] / 1e9:.1f} GB/s read")
    limits += [f"{v / 1e12:.2f} TFLOP/s {dtype}" for dtype, v in report.get("matrix_operations", {}).items()]
    return f"{machine['processor']}, {machine['cores']} cores: {', '.join(limits)}"


def _start_title(report: dict[str, Any]) -> str:
    warm = report.get("warm_start_seconds")
    return "" if warm is None else f"Warm start (second process): {warm:.1f} s to the first token"


def _cells(case: dict[str, Any]) -> list[str]:
    if "failure" in case:
        return [case["failure"], "", "", "", "", ""]
    steps = case["tokens"] if case["kind"] == "decode" else 1
    low, high = min(case["seconds"]), max(case["seconds"])
    share = lambda name: f"{case[name]:.0%}" if name in case else ""  # noqa: E731
    return [
        f"{case['tokens_per_second']:.1f}",
        f"{1e3 * case['median_seconds'] / steps:.2f}",
        f"±{(high - low) / 2 / case['median_seconds']:.0%}",
        share("share_of_bandwidth"),
        share("share_of_operations"),
        f"{case['first_is_times_faster']:.2f}" if "first_is_times_faster" in case else "",
    ]


def plot(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: tokens/s over batch size, and time per step over context length.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, entry in report["subjects"].items():
        cases = [
            c for c in entry["cases"].values() if c["kind"] == "decode" and c.get("seconds") and not c["draft_tokens"]
        ]
        _line(left, name, {c["batch_size"]: c["tokens_per_second"] for c in cases if c["context"] == _least(cases)})
        ones = {c["context"]: 1e3 * c["median_seconds"] / c["tokens"] for c in cases if c["batch_size"] == 1}
        _line(right, name, ones)
    left.set(xlabel="batch size", ylabel="tokens/s", title="Throughput", ylim=(0, None))
    right.set(xlabel="context length, tokens", ylabel="ms/step", title="Batch size 1", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(_title(report), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _least(cases: list[dict[str, Any]]) -> int:
    return min((c["context"] for c in cases), default=0)


def _line(axes: Any, name: str, points: dict[int, float]) -> None:
    if points:
        places = sorted(points)
        axes.plot(places, [points[p] for p in places], marker="o", label=name)
