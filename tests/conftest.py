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

import pytest

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


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels, whatever the environment says: for claims that hold with them alone."""
    from hfax.kernels.cpu import library

    monkeypatch.delenv("HFAX_CPU_KERNELS", raising=False)
    assert library.problem() is None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a C++ compiler nobody has the kernels: what is claimed of them alone is left out of the run."""
    needing = {item for item in items if "cpu_kernels" in getattr(item, "fixturenames", ())}
    if not needing:  # as in the environment of torch_xla, which has no jax
        return
    from hfax.kernels.cpu import library

    if library._compiler() is None:
        config.hook.pytest_deselected(items=sorted(needing, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in needing]
