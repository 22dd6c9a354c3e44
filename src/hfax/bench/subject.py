"""One subject's process: loads the model, then handles measurement requests as JSON lines on stdin and stdout.

python -m hfax.bench.subject SUBJECT_AS_JSON
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hfax.bench.spec import Case, SubjectSpec
from hfax.phases import PhaseEvent, listen


class Subject(Protocol):
    """A loaded model."""

    def prepare(self, case: Case) -> Callable[[], tuple[float, list[int]]]:
        """Compile the case's programs; returns a function that runs it once and returns seconds and the first sequence's tokens."""
        ...

    def facts(self) -> dict[str, Any]:
        """Sizes for computing fractions of the machine's limits."""
        ...


def open_subject(spec: SubjectSpec) -> Subject:
    """Load the model."""
    if spec.kind == "hfax":
        from hfax.bench.own import HfaxSubject

        return HfaxSubject(spec)
    from hfax.bench.peers import PEERS

    return PEERS[spec.kind](spec)


def peak_bytes() -> int | None:
    """Peak resident memory of this process; None if unavailable. getrusage would include the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def serve(spec: SubjectSpec) -> None:
    """Handle requests until stdin closes: {"prepare": case}, {"run": case}, {"limits": dtype}, {"facts": null}."""
    out = sys.stdout
    seconds: dict[str, float] = defaultdict(float)

    def hear(event: PhaseEvent) -> None:
        seconds[event.name] += event.seconds or 0.0

    def answer(reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=out, flush=True)

    with contextlib.redirect_stdout(sys.stderr), listen(hear):
        start = time.perf_counter()
        try:
            subject = open_subject(spec)
        except Exception as error:
            answer({"failure": _first_line(error)})
            return
        answer({"load_seconds": time.perf_counter() - start})
        prepared: dict[Case, Callable[[], tuple[float, list[int]]]] = {}
        for line in sys.stdin:
            ((what, argument),) = json.loads(line).items()
            try:
                if what == "prepare":
                    case = Case(**argument)
                    start, before = time.perf_counter(), dict(seconds)
                    prepared[case] = subject.prepare(case)
                    more = {f"{n}_seconds": seconds[n] - before.get(n, 0.0) for n in ("trace", "compile")}
                    answer({"first_call_seconds": time.perf_counter() - start, **(more if spec.kind == "hfax" else {})})
                elif what == "run":
                    took, tokens = prepared[Case(**argument)]()
                    answer({"seconds": took, "tokens": tokens})
                elif what == "limits":
                    answer(_limits(argument))
                elif what == "facts":
                    answer(subject.facts() | {"peak_bytes": peak_bytes()})
                elif what == "profile":
                    answer(_profile(argument["folder"], prepared[Case(**argument["case"])]))
            except Exception as error:
                answer({"failure": _first_line(error)})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _limits(dtype: str) -> dict[str, float]:
    import jax

    from hfax.bench import limits

    device = jax.devices()[0]
    if dtype == "":
        return {"read_bandwidth": limits.read_bandwidth(device)}
    return {"matrix_operations": limits.matrix_operations(device, dtype)}


def _profile(folder: str, run: Callable[[], Any]) -> dict[str, Any]:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        run()
    return {"folder": folder}


def main() -> None:
    """Serve the subject described by the first argument."""
    serve(SubjectSpec(**json.loads(sys.argv[1])))


def as_json(value: Case | SubjectSpec) -> dict[str, Any]:
    """Convert to a JSON-serializable dictionary."""
    return dataclasses.asdict(value)


if __name__ == "__main__":
    main()
