"""`hfax env`: environment report for bug reports.

Reports this machine's versions, devices, settings and cache sizes. Values of variables that may contain secrets are never shown;
a part that cannot be read is reported as such, without failing the rest.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.home import hfax_home
from hfax.kernels.cpu.threads import usable_cores

EXAMPLES = """[bold]Examples[/bold]

  hfax env
  hfax env --json | jq .packages"""

_PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "libtpu",
    "torchax",
    "torch_xla",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
)
_SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HFAX_CPU_KERNELS",
    "HFAX_CPU_TARGET",
    "HFAX_DEBUG",
    "HFAX_HOME",
    "HFAX_NUM_THREADS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PLATFORMS",
    "LIBTPU_INIT_ARGS",
    "PJRT_DEVICE",
    "TPU_VISIBLE_CHIPS",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
_HIDDEN_VARIABLES = ("HF_ENDPOINT", "HF_TOKEN", "HTTPS_PROXY", "https_proxy")
"""Variables that may contain secrets: reported only as set or not set."""


def env(json_output: model_options.JsonOption = False, verbose: model_options.VerboseOption = False) -> None:
    """Show versions, devices, settings and caches, for bug reports.

    Tokens are never shown, only whether they are set.
    """
    with reporting(verbose):
        report = read_environment()
        typer.echo(json.dumps(report, indent=2) if json_output else _as_text(report))


def read_environment() -> dict[str, Any]:
    """Build the report as nested dictionaries of JSON-serializable values."""
    from hfax import __version__

    return {
        "hfax": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "usable_cores": usable_cores(), "memory_bytes": _memory_bytes()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "jax": _jax_devices(),
        "cpu_kernels": _cpu_kernels(),
        "variables": {
            **{name: os.environ[name] for name in _SHOWN_VARIABLES if name in os.environ},
            **{name: "set" if os.environ.get(name) else "not set" for name in _HIDDEN_VARIABLES},
        },
        "caches": {"hfax": _cache(hfax_home()), "huggingface_hub": _cache(_hub_cache())},
    }


def _as_text(report: dict[str, Any]) -> str:
    lines = [f"{name}: {report[name]}" for name in ("hfax", "python", "platform")]
    cpu, devices = report["cpu"], report["jax"]
    memory = "unknown memory" if cpu["memory_bytes"] is None else _size(cpu["memory_bytes"])
    lines.append(f"cpu: {cpu['model']}, {cpu['usable_cores']} usable cores, {memory}")
    lines += [f"{name}: {version or 'not installed'}" for name, version in report["packages"].items()]
    if devices["error"] is not None:
        lines.append(f"jax devices: none ({devices['error']})")
    else:
        lines.append(f"jax backend: {devices['backend']}")
        lines.append(f"jax devices: {', '.join(devices['devices'])}")
    if report["cpu_kernels"] is not None:
        lines.append(f"cpu kernels: {report['cpu_kernels']['text']}")
    lines += [f"{name}={value}" for name, value in report["variables"].items()]
    for name, cache in report["caches"].items():
        held = f"{_size(cache['bytes'])} in {cache['files']} files" if cache["exists"] else "does not exist yet"
        lines.append(f"{name} cache: {cache['path']} ({held})")
    return "\n".join(lines)


def _cpu_kernels() -> dict[str, Any] | None:
    """Instruction set of hfax's C++ kernels, and where their library is from; None without JAX."""
    try:
        from hfax.kernels.cpu import library
    except ImportError:
        return None
    kernels = library.kernels()
    return {**dataclasses.asdict(kernels), "text": str(kernels)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _jax_devices() -> dict[str, Any]:
    try:
        import jax

        devices = jax.devices()
        return {
            "backend": jax.default_backend(),
            "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
            "error": None,
        }
    except Exception as error:  # missing package, broken plugin, device in use: all go into the report
        return {
            "backend": None,
            "devices": [],
            "error": f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0]}",
        }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _cache(folder: Path) -> dict[str, Any]:
    """File count and size of a folder; symlinks are not counted."""
    num_files = num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                if not path.is_symlink():
                    num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
            except FileNotFoundError:  # deleted concurrently by another process
                continue
    return {"path": str(folder), "exists": folder.is_dir(), "files": num_files, "bytes": num_bytes}


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
