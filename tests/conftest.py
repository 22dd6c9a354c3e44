"""For all tests: the CPU platform, a cache folder of their own, so that no test reads or writes the user's, and Ctrl-C as usual.

Programs are compiled without LLVM's optimisation, which takes half the time and changes no claim of a test; `XLA_FLAGS` in the
environment wins.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of a run share the programs that each of them compiles
    if kept := os.environ.get("HFAX_TESTS_HOME"):  # and so do the runs, until hfax's source changes
        os.environ["HFAX_HOME"] = str(Path(kept).resolve())
    else:
        os.environ["HFAX_HOME"] = tempfile.mkdtemp(prefix="hfax-tests-")
        atexit.register(shutil.rmtree, os.environ["HFAX_HOME"], ignore_errors=True)

# A shell starts its background jobs with SIGINT ignored, and their children inherit it: the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
