"""Seconds from the start of a process to its first token, and to a server that is ready: cold, warm, and beside transformers.

    python benchmarks/start.py --json-file benchmarks/results/start.json    # a fresh cache and 1.5 GB of random weights in
                                                                            # a temporary folder, removed afterwards

Every run is a process of its own, timed from outside, subjects in turns. "cold" has an empty folder of programs (the C++ kernels
are compiled before), before each of three runs; "warm" is every later run. A cold server is ready with its first programs. "full"
is warm without stored starts: torch, transformers and the model's code are imported, and programs come from the disk, as before
there were stored starts. A "bundle" has the programs of the server, too. "int4" is quantized while it is loaded. "read" is a plain
read of the checkpoint's file; it is in the page cache where a name does not say "from the disk".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shapes.published import config_of

from hfax.launch.ports import free_port

_GENERATE = [sys.executable, "-m", "hfax.cli", "generate"]
_PYTHON = """
import sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
print(model.generate([[5, 6, 7, 8]], max_new_tokens=1, do_sample=False))
"""
_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=1, do_sample=False))
"""
_READ = "import sys; open(sys.argv[1], 'rb', buffering=0).read()"


def run(command: list[str], **variables: str) -> tuple[float, float]:
    """Wall and processor seconds of a process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ready(model: str, **variables: str) -> tuple[float, float]:
    """Wall and processor seconds until a server answers /health with 200; then it is stopped."""
    port = free_port()
    command = [sys.executable, "-m", "hfax.cli", "serve", model, "--port", str(port), "--max-model-len", "256"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    server = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            assert server.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    seconds = time.perf_counter() - began
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.01)
    finally:
        server.terminate()
        server.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def emptied(home: Path, subject: Callable[[], tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    """The subject, each time without programs and stored starts."""

    def run_cold() -> tuple[float, float]:
        for name in ("programs", "starts"):
            shutil.rmtree(home / name, ignore_errors=True)
        return subject()

    return run_cold


def dropped(path: str) -> str:
    """The path of a file that is no longer in the page cache."""
    os.sync()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return path


def make_checkpoint(folder: Path) -> None:
    """Random weights of Qwen3-0.6B's shape, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of("qwen3-0.6b"), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def measure(subjects: Mapping[str, Callable[[], tuple[float, float]]], repeats: int) -> dict[str, Any]:
    """Medians of each subject, in turns after one round that is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for round_ in range(repeats + 1):
        for name, subject in subjects.items():
            result = subject()
            if round_:
                taken[name].append(result)
    found = {}
    for name, results in taken.items():
        wall, processor = (statistics.median(part) for part in zip(*results, strict=True))
        spread = [min(seconds for seconds, _ in results), max(seconds for seconds, _ in results)]
        found[name] = {"seconds": wall, "processor seconds": processor, "least and most": spread}
        print(f"{name}: {wall:.2f} s ({spread[0]:.2f} to {spread[1]:.2f}), {processor:.2f} s of processor", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as on a user's machine, hfax's own modules are compiled once
    with tempfile.TemporaryDirectory(prefix="hfax-start-") as folder:
        root = Path(folder)
        make_checkpoint(root / "qwen3")
        qwen3, weights = str(root / "qwen3"), str(root / "qwen3/model.safetensors")
        os.environ["HFAX_HOME"] = str(root / "home")
        os.environ["PYTHONPYCACHEPREFIX"] = str(root / "bytecode")
        run([sys.executable, "-c", "from hfax.kernels.cpu import library; print(library.problem())"])
        bundle = str(root / "bundle")
        sizes = ["--for-server", "--max-model-len", "256"]
        run([sys.executable, "-m", "hfax.cli", "export", "demo", "--out", bundle, *sizes])
        demo = [*_GENERATE, "demo", "Return a", "--max-new-tokens", "1"]
        two_programs = [*_GENERATE, "demo", "Return a", "--max-new-tokens", "4"]
        cold = measure(
            {
                "generate demo, two programs, cold": emptied(root / "home", lambda: run(two_programs)),
                "serve demo, cold": emptied(root / "home", lambda: ready("demo")),
                "serve a bundle, cold": emptied(root / "home", lambda: ready(bundle)),
                "serve demo, all programs first, cold": emptied(
                    root / "home", lambda: ready("demo", HFAX_BACKGROUND_COMPILATION="0")
                ),
                "python, Qwen3-0.6B's shape, cold": emptied(
                    root / "home", lambda: run([sys.executable, "-c", _PYTHON, qwen3])
                ),
            },
            3,
        )
        classify = [sys.executable, "-m", "hfax.cli", "classify", "demo", "Return a", "--labels", "list,error"]
        int4 = _PYTHON.replace("sys.argv[1]", 'sys.argv[1], quantization="int4"')
        full = [sys.executable, "-c", "import torch\n" + _PYTHON]
        warm = measure(
            {
                "hfax --help": lambda: run([sys.executable, "-m", "hfax.cli", "--help"]),
                "generate demo": lambda: run(demo),
                "python, demo": lambda: run([sys.executable, "-c", _PYTHON, "demo"]),
                "python, demo, full": lambda: run([*full, "demo"]),
                "serve demo": lambda: ready("demo"),
                "serve a bundle": lambda: ready(bundle),
                "classify demo": lambda: run(classify),
                "read from the disk, Qwen3-0.6B's shape": lambda: run([sys.executable, "-c", _READ, dropped(weights)]),
                "python, Qwen3-0.6B's shape from the disk": lambda: run(
                    [sys.executable, "-c", _PYTHON, str(Path(dropped(weights)).parent)]
                ),
                "read, Qwen3-0.6B's shape": lambda: run([sys.executable, "-c", _READ, weights]),
                "python, Qwen3-0.6B's shape": lambda: run([sys.executable, "-c", _PYTHON, qwen3]),
                "python, Qwen3-0.6B's shape, full": lambda: run([*full, qwen3]),
                "python, Qwen3-0.6B's shape, int4": lambda: run([sys.executable, "-c", int4, qwen3]),
                "python, Qwen3-0.6B's shape, int4, full": lambda: run(
                    [sys.executable, "-c", "import torch\n" + int4, qwen3]
                ),
                "transformers, Qwen3-0.6B's shape": lambda: run([sys.executable, "-c", _TRANSFORMERS, qwen3]),
            },
            options.repeats,
        )
    if options.json_file:
        found = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "cold": cold,
            "warm": warm,
        }
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
