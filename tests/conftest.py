"""For all tests: the CPU platform, a cache folder of their own, so that no test reads or writes the user's, and Ctrl-C as usual.

Programs are compiled without LLVM's optimisation and, where XLA still has it, with its older way to emit fusions, which takes a
third of the time and changes no claim of a test; `XLA_FLAGS` in the environment wins: `make test-parity` and `make test-docs`
compile as users do.

Many tests read one tiny Llama: its fixtures, at the end, make it once for each worker.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

if TYPE_CHECKING:  # the environment of torch_xla has no jax, and many tests need neither
    from transformers import LlamaForCausalLM

    from hfax.backends.jax.model import JaxModel


def _xla_flags() -> str:
    flags = ["--xla_backend_optimization_level=0"]
    if Version(importlib.metadata.version("jaxlib") if importlib.util.find_spec("jaxlib") else "0") < Version("0.11"):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # XLA ends the process for a flag that it does not know
    if devices := os.environ.get("HFAX_TESTS_DEVICES"):
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    return " ".join(flags)


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", _xla_flags())
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of a run share the programs that each of them compiles
    if kept := os.environ.get("HFAX_TESTS_HOME"):  # and so do the runs, until hfax's source changes
        os.environ["HFAX_HOME"] = str(Path(kept).resolve())
    else:
        os.environ["HFAX_HOME"] = tempfile.mkdtemp(prefix="hfax-tests-")
        atexit.register(shutil.rmtree, os.environ["HFAX_HOME"], ignore_errors=True)

# A shell starts its background jobs with SIGINT ignored, and their children inherit it: the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Forget compiled programs before there are too many: each takes some five of the 65,530 mappings that Linux allows a process,
    and loading one more ended a worker with a segmentation fault."""
    yield
    jax, maps = sys.modules.get("jax"), Path("/proc/self/maps")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > _MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels, whatever the environment says: for claims that hold with them alone."""
    from hfax.kernels.cpu import library

    monkeypatch.delenv("HFAX_CPU_KERNELS", raising=False)
    assert library.problem() is None


@pytest.fixture
def tpu_compiler() -> None:
    """libtpu: for claims about what it makes of a program."""


@pytest.fixture
def gpu_compiler() -> None:
    """JAX's CUDA plugin: for claims about what XLA's GPU compiler makes of a program."""


@pytest.fixture
def gpu_assembler() -> None:
    """NVIDIA's assembler and disassembler: for claims about the instructions of a kernel."""


def _has_gpu_assembler() -> bool:
    spec = importlib.util.find_spec("nvidia")
    return spec is not None and any(
        (Path(place) / "cu13" / "bin" / "nvdisasm").exists() for place in spec.submodule_search_locations or ()
    )


def _has_cpp_compiler() -> bool:
    from hfax.kernels.cpu import compiler

    return compiler.find_compiler() is not None


_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu_kernels": _has_cpp_compiler,
    "tpu_compiler": lambda: importlib.util.find_spec("libtpu") is not None,  # its wheels are for Linux on x86-64
    "gpu_compiler": lambda: importlib.util.find_spec("jax_cuda13_plugin") is not None,
    "gpu_assembler": _has_gpu_assembler,
}
"""By fixture: whether this machine has the compiler that its tests are about."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of the run what is claimed of a compiler that this machine does not have, and other parts than HFAX_TESTS_PART.

    "2/3" is the second of three parts, which hold the same tests in every run.
    """
    if part := os.environ.get("HFAX_TESTS_PART"):
        number, count = map(int, part.split("/"))
        others = {item for item in items if zlib.crc32(item.nodeid.encode()) % count != number - 1}
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]
    for fixture, is_available in _AVAILABLE.items():
        needing = {item for item in items if fixture in getattr(item, "fixturenames", ())}
        if needing and not is_available():
            config.hook.pytest_deselected(items=sorted(needing, key=lambda item: item.nodeid))
            items[:] = [item for item in items if item not in needing]


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny_llama()`, with a tokenizer, written by plain transformers. Whoever changes files copies it."""
    from tiny_models import save, tiny_llama, word_tokenizer

    return save(tmp_path_factory.mktemp("llama"), tiny_llama(), word_tokenizer())


@pytest.fixture(scope="session")
def plain_llama(llama_folder: Path) -> LlamaForCausalLM:
    """Plain transformers' model of `llama_folder`, the reference, in eval mode. Whoever changes a model loads another."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(llama_folder).eval()


@pytest.fixture(scope="session")
def hfax_llama(llama_folder: Path) -> JaxModel:
    """hfax's model of `llama_folder`. Whoever changes a model, or counts what it compiles first, loads another."""
    from hfax import AutoModelForTPU

    return AutoModelForTPU.from_pretrained(llama_folder)
