"""The torch_xla runtime: availability, device and counters.

The package is imported only here, so that every import failure says what to do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import warnings
from typing import Any

import torch

from hfax.errors import BackendNotAvailableError
from hfax.float32_products import told_torch
from hfax.home import hfax_home

TORCH_OF = {"2.9": "2.9.0", "2.8": "2.8.0"}
"""torch_xla releases, and the torch version each was built against, which is missing from their metadata."""


def require() -> Any:
    """The module `torch_xla`.

    Raises:
        BackendNotAvailableError: it is not installed, or was built against another torch version.
    """
    os.environ.setdefault("PJRT_DEVICE", _default_device())
    try:
        import torch_xla  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if importlib.util.find_spec("torch_xla") is None:
            raise BackendNotAvailableError(
                "The torch_xla backend is not installed.",
                str(error),
                "Install it: pip install 'hfax[torch-xla]'; or use backend=\"jax\".",
            ) from error
        own = importlib.metadata.version("torch_xla")
        wanted = TORCH_OF.get(".".join(own.split(".")[:2]), own)
        raise BackendNotAvailableError(
            f"torch_xla {own} is not compatible with torch {torch.__version__}.",
            f"{str(error).splitlines()[0]} (it was built against torch {wanted}).",
            f'Install matching versions: pip install torch=={wanted} torch_xla=={own}; or use backend="jax".',
        ) from error
    return torch_xla


def device() -> torch.device:
    """The first device of torch_xla.

    Raises:
        BackendNotAvailableError: no device was found.
    """
    torch_xla = require()
    _keep_programs()
    _multiply_as_torch()
    try:
        return torch_xla.device()
    except (RuntimeError, ValueError) as error:
        raise BackendNotAvailableError(
            f"torch_xla found no device (PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}).",
            str(error).strip().splitlines()[0],
            "Set PJRT_DEVICE to TPU, CUDA or CPU, depending on this machine.",
        ) from error


@functools.cache
def _keep_programs() -> None:
    """Enable torch_xla's on-disk compilation cache if its client supports it; the CPU client does not."""
    if kind() != "CPU":
        folder = hfax_home() / "torch_xla"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        module("runtime").initialize_cache(str(folder), readonly=False)


@functools.cache
def _multiply_as_torch() -> None:
    """Multiply float32 arrays with the precision that torch has been told, by default in float32, where XLA on a TPU would take
    bfloat16; unless torch_xla has been told another."""
    backends = module("backends")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of its older setting when it is read
        wanted = told_torch()
    if wanted != "default" and backends.get_mat_mul_precision() == "default":
        log = logging.getLogger("torch_xla.backends")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of every call, the first one, too
        try:
            backends.set_mat_mul_precision(wanted)
        finally:
            log.setLevel(level)


def kind() -> str:
    """The device type: "CPU", "TPU" or "CUDA"."""
    return os.environ.get("PJRT_DEVICE", "CPU")


def module(name: str) -> Any:
    """A submodule of torch_xla, such as "distributed.spmd"."""
    require()
    return importlib.import_module(f"torch_xla.{name}")


def sync() -> None:
    """Run everything recorded since the last call as one program."""
    require().sync()


def counters() -> dict[str, int]:
    """torch_xla's counters in this process: compilations, runs, transfers to the host, operations without a lowering."""
    metrics = module("debug.metrics")

    def count(name: str) -> int:
        data = metrics.metric_data(name)
        return 0 if data is None else int(data[0])

    fallbacks = {
        name: int(metrics.counter_value(name) or 0) for name in metrics.counter_names() if name.startswith("aten::")
    }
    return {
        "compilations": int(metrics.counter_value("UncachedCompile") or 0),
        "runs": count("ExecuteTime"),
        "transfers_to_host": count("TransferFromDeviceTime"),
        "transfers_to_device": count("TransferToDeviceTime"),
        **fallbacks,
    }


def _default_device() -> str:
    return "TPU" if os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0") else "CPU"  # noqa: PTH110
