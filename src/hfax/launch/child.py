"""The process that `hfax launch` starts: joins the run, then executes a script or an hfax command.

python -m hfax.launch.child script.py arguments…
python -m hfax.launch.child hfax generate …
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Iterator

_PATIENCE_S = 1.0


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Delay errors: if another process's exit caused this one, the launcher kills this process before it prints the error."""
    try:
        yield
    except Exception:
        time.sleep(_PATIENCE_S)
        raise


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123 (pathlib is slower to import)
        yield


def main(arguments: list[str]) -> int:
    """Join the run and execute the program; returns the exit code, unless the program exits itself."""
    from hfax.errors import HfaxError
    from hfax.launch.cluster import join, member_from

    program, *rest = arguments
    try:
        join()
    except HfaxError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if program != "hfax":
        sys.argv = [program, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))  # noqa: PTH100, PTH120 (as Python itself does)
        with _patience():
            runpy.run_path(program, run_name="__main__")
        return 0
    sys.argv = ["hfax", *rest]
    member = member_from(os.environ)
    is_silent = member is not None and member.process_id != 0  # only process 0 prints
    with _patience(), _silence() if is_silent else contextlib.nullcontext():
        runpy.run_module("hfax", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
