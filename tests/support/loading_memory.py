"""Host memory that loading a model takes, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = """
import gc, json, sys, threading
import jax
from hfax import AutoModelForTPU

def anonymous():  # this process's own pages, without those of files
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

AutoModelForTPU.from_pretrained("demo")  # imports, and what a first load sets up
found = []
for folder, options in json.loads(sys.argv[1]):
    gc.collect()
    before, peak, done = anonymous(), 0, threading.Event()
    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = AutoModelForTPU.from_pretrained(folder, **options)
    done.set()
    watcher.join()
    arrays = jax.tree.leaves(model.params)
    found.append({"held": sum(a.nbytes for a in arrays), "largest": max(a.nbytes for a in arrays),
                  "peak": peak - before, "end": anonymous() - before})
    del model, arrays
print(json.dumps(found))
"""


def measure(loads: Sequence[tuple[Path, dict[str, Any]]], **environment: str) -> list[dict[str, int]]:
    """Bytes for each load, one after the other.

    Args:
        loads: folder or file, and options of `from_pretrained`.
        environment: additional environment variables.

    Returns:
        "held" by the model's arrays, the "largest" of them, the "peak" of the process's own pages while it is loaded and at the
        "end", both less what there was before.
    """
    # A demo that started from stored programs would leave torch to be imported by the first load that is measured.
    environment = {**os.environ, "HFAX_PROGRAM_CACHE": "0", **environment}
    calls = json.dumps([[str(path), options] for path, options in loads])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, calls], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
