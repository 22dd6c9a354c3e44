"""Benchmark results as tables and as a plot. Depends only on the report's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from hfax.bench.drawing import pyplot

_RATES = ("tokens/s", "ms/step", "spread", "of bandwidth", "of FLOP/s")
_RATIO = "x slower than first"


def tables(report: dict[str, Any]) -> list[Table]:
    """A table of measurements, and a table of loading and compilation."""
    speed = Table(title=_title(report), title_justify="left")
    for column in ("what", "case"):
        speed.add_column(column)
    for column in (*_RATES, *([_RATIO] if len(report["subjects"]) > 1 else [])):
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
            speed.add_row(name, case_name, *_cells(case)[: len(speed.columns) - 2])
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
    """Write a PNG. With one batch size and one context length: bars of tokens/s, beside what the machine's limits allow; else
    tokens/s over batch size, and time per step over context length.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    decode = {name: _cases(entry, "decode") for name, entry in report["subjects"].items()}
    if all(len(cases) <= 1 for cases in decode.values()):
        prefill = {name: _cases(entry, "prefill") for name, entry in report["subjects"].items()}
        _bars(left, "Decoding", decode, "share_of_bandwidth", "limit by bandwidth")
        _bars(right, "Prefill", prefill, "share_of_operations", "limit by FLOP/s")
    else:
        for name, cases in decode.items():
            _line(left, name, {c["batch_size"]: c["tokens_per_second"] for c in cases if c["context"] == _least(cases)})
            ones = {c["context"]: 1e3 * c["median_seconds"] / c["tokens"] for c in cases if c["batch_size"] == 1}
            _line(right, name, ones)
        left.set(xlabel="batch size", ylabel="tokens/s", title="Throughput", ylim=(0, None))
        right.set(xlabel="context length, tokens", ylabel="ms/step", title="Batch size 1", ylim=(0, None))
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
    figure.suptitle(f"{report['model']}\n{_title(report)}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cases(entry: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The measured cases of a kind, without draft tokens."""
    return [c for c in entry["cases"].values() if c["kind"] == kind and c.get("seconds") and not c["draft_tokens"]]


def _bars(axes: Any, what: str, subjects: dict[str, list[dict[str, Any]]], share: str, limit: str) -> None:
    """A bar for each subject's first case, before a paler one to its limit. The first subject is on top."""
    rows = [(name, cases[0]) for name, cases in subjects.items() if cases]
    if not rows:
        axes.set_axis_off()
        return
    places = list(range(len(rows)))[::-1]
    rates = [case["tokens_per_second"] for _, case in rows]
    limits = [case["tokens_per_second"] / case[share] if case.get(share) else 0 for _, case in rows]
    if any(limits):
        axes.barh(places, limits, height=0.6, color="tab:blue", alpha=0.2, label=limit)
        axes.legend(loc="upper right", fontsize=8)
    axes.barh(places, rates, height=0.6, color="tab:blue")
    for place, rate, (_, case) in zip(places, rates, rows, strict=True):
        of_limit = f" ({case[share]:.0%})" if case.get(share) else ""
        axes.annotate(f"{rate:,.1f}{of_limit}", (rate, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [name for name, _ in rows])
    sizes = {(c["batch_size"], c["context"]) for _, c in rows}
    title = f"{what}, " + "; ".join(f"batch {batch}, {context} tokens" for batch, context in sorted(sizes))
    axes.set(xlabel="tokens/s", title=title, xlim=(0, 1.2 * max(rates + limits)), ylim=(-0.6, len(rows) + 0.1))


def _least(cases: list[dict[str, Any]]) -> int:
    return min((c["context"] for c in cases), default=0)


def _line(axes: Any, name: str, points: dict[int, float]) -> None:
    if points:
        places = sorted(points)
        axes.plot(places, [points[p] for p in places], marker="o", label=name)
