"""Large models planned for TPUs that are not there, by the real compiler: `python benchmarks/plans.py [--json-file FILE]`.

Needs hfax[tpu] and no TPU. One process for each model and topology, since the compiler keeps its memory.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from shapes.published import config_of

CASES = [
    ("llama-3-8b", "v5e:2x4"),
    ("llama-3-70b", "v6e:2x4"),
    ("llama-3-70b", "v5p:2x2x2"),
    ("llama-3-70b", "v5e:4x4"),
    ("qwen3-235b-a22b", "v5p:2x2x2"),
    ("qwen3-235b-a22b", "v6e:4x4"),
    ("qwen3-235b-a22b", "v5e:8x8"),
    ("deepseek-v3", "v5p:4x4x2"),
    ("deepseek-v3", "v6e:8x8"),
    ("deepseek-v3", "v5e:16x16"),
]
LIMIT_S = 1500


def measure(shape: str, topology: str) -> dict:
    """One plan, with what it took."""
    from hfax.planning.plan import make_plans

    begin = time.perf_counter()
    (plan,) = make_plans(shape, config_of(shape), [topology], batches=[8], context=8192)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**dataclasses.asdict(plan), "seconds": round(seconds, 1), "peak_memory_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--only", help="a shape")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    results = []
    for shape, topology in CASES:
        if arguments.only not in (None, shape):
            continue
        command = [sys.executable, __file__, "--case", shape, topology]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            lines = (done.stderr if done.returncode else done.stdout).splitlines()
            last = lines[-1] if lines else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            done, last = None, f"not done after {LIMIT_S} s"
        if done is None or done.returncode:
            results.append({"model": shape, "machine": topology, "error": last})
            print(f"{shape} on {topology}: {last}", flush=True)
            continue
        found = json.loads(last)
        results.append(found)
        temporaries = found["temporary_bytes"]
        print(
            f"{shape} on {topology}, {found['mesh']}: {'fits' if found['fits'] else 'does not fit'}; "
            f"GB a device: weights {found['weight_bytes'] / 1e9:.2f}, cache {found['cache_bytes'] / 1e9:.2f}, "
            f"temporaries {'?' if temporaries is None else f'{temporaries / 1e9:.2f}'} of {found['memory_bytes'] / 1e9:.1f}; "
            f"compiled in {found['compile_s'] or 0:.0f} s, all {found['seconds']:.0f} s, "
            f"{found['peak_memory_bytes'] / 1e9:.1f} GB here" + (f"; {found['problem']}" if found["problem"] else ""),
            flush=True,
        )
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
