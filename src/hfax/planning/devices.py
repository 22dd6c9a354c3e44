"""Descriptions of absent accelerators that XLA's compilers accept, and placeholders where nothing is compiled.

`topology_devices` describes TPU slices ("v5e:2x4"; requires libtpu) and machines with NVIDIA GPUs ("h100:8", "h100:2x8" for two
hosts of eight; requires JAX's CUDA plugin). Neither requires the hardware, or NVIDIA's libraries.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from hfax.errors import BackendNotAvailableError
from hfax.planning.chips import GPUS, TPUS, chip_of, kind_of, num_devices, sizes_of

_CHIPS_OF_A_HOST = 8
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}
"""libtpu environment on machines without a TPU."""


def topology_devices(topology: str) -> list[Any]:
    """Device descriptions of a topology; no hardware needed. Up to eight v5e or v6e chips form one host, as on Google Cloud.

    Args:
        topology: a TPU topology ("v5e:2x4"), or a GPU with a count ("h100:8") or hosts and GPUs of each ("h100:2x8").

    Raises:
        BackendNotAvailableError: the compiler is not installed, or the topology is unknown.
    """
    if (missing := missing_compiler(topology)) is not None:
        raise BackendNotAvailableError(f"Cannot compile for the topology {topology!r}.", *missing)
    if kind_of(topology) in GPUS:
        hosts, count = (1, *sizes_of(topology))[-2:]
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the compiler needs none of NVIDIA's libraries
        config, shape = _gpu_target(kind_of(topology)), f"1x{hosts}x{count}"
        name, platform, options = topology, "cuda", {"target_config": config, "topology": shape}
    else:
        if jax.default_backend() != "tpu":  # otherwise libtpu searches for a TPU and warns
            for variable, value in _NO_TPU.items():
                os.environ.setdefault(variable, value)
        name, platform, options = topology, "tpu", _host_of(topology)
    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except NotImplementedError as error:
        raise BackendNotAvailableError(
            f"Cannot compile for the topology {topology!r}.",
            "JAX has started in this process without its CUDA plugin.",
            "Set JAX_PLATFORMS=cpu before JAX starts.",
        ) from error
    except Exception as error:  # jaxlib raises several unrelated classes here
        raise BackendNotAvailableError(
            f"Cannot compile for the topology {topology!r}.",
            str(error).splitlines()[0],
            "Use a topology such as v5e:2x4, v6e:2x2, tpu7x:2x2x1, h100:8 or h100:2x8.",
        ) from error


def missing_compiler(machine: str) -> tuple[str, str] | None:
    """Why a machine's compiler is not there, and what to do; None if it is, or the machine is no known accelerator."""
    kind = kind_of(machine)
    if kind in GPUS and find_spec("jax_cuda13_plugin") is None and find_spec("jax_cuda12_plugin") is None:
        return "XLA's GPU compiler is in JAX's CUDA plugin, which is not installed.", "Install hfax[plan-gpu]."
    if kind in TPUS and find_spec("libtpu") is None:
        return "XLA's TPU compiler is in libtpu, which is not installed.", "Install hfax[tpu]."
    return None


def devices_of(machine: str, compiles: bool = True) -> tuple[list[Any], str]:
    """The machine's devices, and why nothing will be compiled for them, or "".

    Args:
        machine: as in `topology_devices`, or "cpu:8".
        compiles: otherwise the devices are placeholders, which need no compiler.

    Raises:
        BackendNotAvailableError: the compiler is there but does not know the topology.
        InvalidInputError: the machine's name is invalid.
    """
    chip = chip_of(machine)
    if chip.name not in (*TPUS, *GPUS):
        return _placeholders(machine, "cpu"), "there is no ahead-of-time compiler for this machine; memory is estimated"
    platform = "tpu" if chip.name in TPUS else "gpu"
    if not compiles:
        return _placeholders(machine, platform), ""
    if (missing := missing_compiler(machine)) is not None:
        return _placeholders(machine, platform), f"not compiled, memory is estimated: {' '.join(missing)}"
    return topology_devices(machine), ""


class _Placeholder:
    """A device of a mesh for which nothing is compiled."""

    process_index, slice_index = 0, 0

    def __init__(self, index: int, platform: str, kind: str) -> None:
        self.id, self.platform, self.device_kind = index, platform, kind


def _placeholders(machine: str, platform: str) -> list[Any]:
    kind = chip_of(machine).name
    return [_Placeholder(index, platform, kind) for index in range(num_devices(machine))]


def _host_of(topology: str) -> dict[str, tuple[int, ...]]:
    """Chips per host, if different from libtpu's default of four."""
    kind, _, shape = topology.partition(":")
    sizes = [int(n) for n in shape.split("x") if n.isdigit()]
    is_one_host = kind in ("v5e", "v6e") and math.prod(sizes) <= _CHIPS_OF_A_HOST
    if sizes and (is_one_host or math.prod(sizes) == 1):
        return {"chips_per_host_bounds": (*sizes, 1, 1)[:3]}
    return {}


def _gpu_target(name: str) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, as protobuf text."""
    described = json.loads(Path(__file__).with_name("gpus.json").read_text())
    gpu = described["gpus"][name]
    info = {**described["common"], **gpu["fields"], "cuda_compute_capability": gpu["capability"]}
    cudnn, cuda = {"major": 9, "minor": 10, "patch": 0}, {"major": 13, "minor": 0, "patch": 0}
    config = {
        "gpu_device_info": info,
        "platform_name": "CUDA",
        "dnn_version_info": cudnn,
        "runtime_version": cuda,
        "device_description_str": gpu["name"],
    }
    return "\n".join(_protobuf_text(config))


def _protobuf_text(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Mapping):
            yield f"{name} {{"
            yield from _protobuf_text(value)
            yield "}"
        else:
            yield f"{name}: {json.dumps(value)}"
