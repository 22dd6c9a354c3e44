"""Runs a benchmark: starts the subjects' processes, interleaves their measurements, and assembles the report.

Does not import jax or torch; models run only in the subjects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hfax.bench.spec import Case, SubjectSpec
from hfax.bench.subject import as_json

_VERSIONED = ("hfax", "torch", "transformers", "jax", "jaxlib", "torchax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A subject and its cases."""

    subject: SubjectSpec
    cases: tuple[Case, ...]


class SubjectFailed(Exception):
    """A subject's process ended or timed out."""


class SubjectProcess:
    """A subject's process, which handles one request at a time.

    Args:
        spec: the subject.
        limit_s: timeout per request, in seconds.
        environment: additional environment variables.
    """

    def __init__(self, spec: SubjectSpec, *, limit_s: float, environment: dict[str, str]) -> None:
        self.spec, self._limit_s = spec, limit_s
        self.started = time.perf_counter()
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hfax.bench.subject", json.dumps(as_json(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        self._replies: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read_replies, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.rstrip()]

    def reply(self) -> dict[str, Any]:
        """Wait for the next reply.

        Raises:
            SubjectFailed: the subject failed, ended or timed out.
        """
        try:
            line = self._replies.get(timeout=self._limit_s)
        except queue.Empty:
            self.close()
            raise SubjectFailed(f"timed out after {self._limit_s:g} s") from None
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise SubjectFailed(
                next((e for e in reversed(self._errors) if e), f"ended with {self._process.returncode}")
            )
        found = json.loads(line)
        if "failure" in found:
            raise SubjectFailed(found["failure"])
        return found

    def ask(self, what: str, argument: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({what: argument}), file=self._process.stdin, flush=True)
        except OSError:
            return self.reply()  # the process has ended; its reply has the reason
        return self.reply()

    def close(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(
    plans: Sequence[Plan],
    *,
    rounds: int = 3,
    limit_s: float = 600,
    environment: dict[str, str] | None = None,
    profile: Path | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure every plan.

    Args:
        plans: the first is the baseline for comparison, and must be hfax.
        rounds: runs per case; results are medians.
        limit_s: timeout per load, compilation or run, in seconds.
        environment: additional environment variables of the subjects' processes.
        profile: folder for a trace of the first plan's first case, for xprof or Perfetto.
        tell: called with progress messages.

    Returns:
        JSON-serializable report, as in `benchmarks/results/`.
    """
    names = {name: _version(name) for name in _VERSIONED}
    report: dict[str, Any] = {"machine": _machine(), "versions": names, "rounds": rounds, "subjects": {}}
    environment = environment or {}
    with contextlib.ExitStack() as stack:
        running: list[tuple[Plan, SubjectProcess, dict[str, Any]]] = []
        for plan in plans:
            tell(f"loading {plan.subject.name}")
            entry: dict[str, Any] = {**as_json(plan.subject), "cases": {}}
            report["subjects"][plan.subject.name] = entry
            process = SubjectProcess(plan.subject, limit_s=limit_s, environment=environment)
            stack.callback(process.close)
            try:
                entry.update(process.reply())
            except SubjectFailed as failed:
                entry["failure"] = str(failed)
                continue
            for case in plan.cases:
                tell(f"compiling {plan.subject.name}: {case.name}")
                with _noting_failure(entry["cases"], case):
                    entry["cases"][case.name] = {
                        **as_json(case),
                        **process.ask("prepare", as_json(case)),
                        "seconds": [],
                    }
            running.append((plan, process, entry))
        if not running or "failure" in report["subjects"][plans[0].subject.name]:
            return report
        first = running[0][1]
        bandwidths: list[float] = []
        for index in range(rounds):
            for plan, process, entry in running:
                tell(f"round {index + 1} of {rounds}: {plan.subject.name}")
                for case in plan.cases:
                    if "failure" in entry["cases"][case.name]:
                        continue
                    with _noting_failure(entry["cases"], case):
                        process.ask("run", as_json(case))  # untimed warm-up: the process was idle while others ran
                        before = first.ask("limits", "")["read_bandwidth"]
                        done = process.ask("run", as_json(case))
                        after = first.ask("limits", "")["read_bandwidth"]
                        bandwidths += [before, after]
                        entry["cases"][case.name]["seconds"].append(done["seconds"])
                        entry["cases"][case.name].setdefault("read_bandwidth", []).append((before + after) / 2)
                        entry["cases"][case.name]["tokens_written"] = done["tokens"]
        report["read_bandwidth"] = statistics.median(bandwidths) if bandwidths else None
        report["read_bandwidth_range"] = [min(bandwidths, default=None), max(bandwidths, default=None)]
        for _, process, entry in running:
            with contextlib.suppress(SubjectFailed):
                entry.update(process.ask("facts", None))
        dtypes = sorted({entry["dtype_of_weights"] for _, _, entry in running if "dtype_of_weights" in entry})
        report["matrix_operations"] = {d: first.ask("limits", d)["matrix_operations"] for d in dtypes}
        if profile is not None:
            case = plans[0].cases[0]
            report["profile"] = first.ask("profile", {"folder": str(profile), "case": as_json(case)})["folder"]
    tell("starting a second process")
    report["warm_start_seconds"] = _warm_start(plans[0], limit_s, environment)
    for name, entry in report["subjects"].items():
        for case in entry["cases"].values():
            _summarize(
                case, entry, report, report["subjects"][plans[0].subject.name], is_first=name == plans[0].subject.name
            )
    return report


@contextlib.contextmanager
def _noting_failure(cases: dict[str, Any], case: Case) -> Iterator[None]:
    try:
        yield
    except SubjectFailed as failed:
        cases[case.name] = {**as_json(case), "failure": str(failed)}


def _warm_start(plan: Plan, limit_s: float, environment: dict[str, str]) -> float | None:
    """Seconds from process start to the first token of the first case, with all programs cached on disk."""
    process = SubjectProcess(plan.subject, limit_s=limit_s, environment=environment)
    try:
        process.reply()
        process.ask("prepare", as_json(plan.cases[0]))
        return time.perf_counter() - process.started
    except SubjectFailed:
        return None
    finally:
        process.close()


def _summarize(
    case: dict[str, Any], entry: dict[str, Any], report: dict[str, Any], first: dict[str, Any], *, is_first: bool
) -> None:
    """Add rates, fractions of the machine's limits, and the first subject's speedup."""
    if not case.get("seconds"):
        return
    median = statistics.median(case["seconds"])
    case["median_seconds"] = median
    if case["kind"] == "decode":
        case["tokens_per_second"] = case["batch_size"] * case["tokens"] / median
        moved = entry.get("weight_bytes_a_step")
        if moved is not None and entry.get("cache_bytes_a_token") is not None and not case["draft_tokens"]:
            tokens = case["context"] + 2 + case["tokens"] / 2
            moved += case["batch_size"] * tokens * entry["cache_bytes_a_token"]
            case["bytes_a_step"] = moved
            # relative to the bandwidth measured just before and after, since it fluctuates on shared machines
            rates = [case["tokens"] * moved / s for s in case["seconds"]]
            case["bytes_per_second"] = statistics.median(rates)
            pairs = zip(rates, case["read_bandwidth"], strict=True)
            case["share_of_bandwidth_each_round"] = [rate / limit for rate, limit in pairs]
            case["share_of_bandwidth"] = statistics.median(case["share_of_bandwidth_each_round"])
    else:
        case["tokens_per_second"] = case["batch_size"] * case["context"] / median
        if (parameters := entry.get("product_parameters")) is not None:
            operations = 2 * parameters * case["batch_size"] * case["context"] / median
            case["operations_per_second"] = operations
            case["share_of_operations"] = operations / report["matrix_operations"][entry["dtype_of_weights"]]
    ours = next((c for c in first["cases"].values() if _is_same(c, case) and c.get("seconds")), None)
    if ours is not None and not is_first:
        ratios = [theirs / own for theirs, own in zip(case["seconds"], ours["seconds"], strict=False)]
        case["first_is_times_faster"] = statistics.median(ratios)


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = [f.name for f in dataclasses.fields(Case)]
    return all(one.get(n) == other.get(n) for n in names)


def _machine() -> dict[str, Any]:
    processor = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"processor": processor, "machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
