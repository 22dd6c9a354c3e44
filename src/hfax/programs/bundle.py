"""A bundle: a checkpoint folder with its programs, compiled ahead of time for specific devices.

Reads the mesh and shardings of the programs from `bundle.json`, after checking that this process has the required devices and
versions. It neither compiles nor runs programs.

Programs are pickles, as are JAX's serialized executables, so a bundle can run arbitrary code: load only bundles you trust. Bundles
are read only from local folders, never from the Hub.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hfax.errors import CheckpointCorruptError, InvalidInputError
from hfax.kernels.cpu import library
from hfax.programs.buckets import Size
from hfax.programs.bundle_file import FILE, PROGRAMS
from hfax.programs.program_cache import kernels_digest
from hfax.programs.versions import source_digest, version_of
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import AXES

Spec = list[str | list[str] | None]
"""A `PartitionSpec` in JSON."""
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """The contents of `bundle.json`.

    Args:
        runtime: requirements of the programs on the process, by name.
        device_ids: device ids in mesh order.
        mesh: sizes by axis, for the axes of `hfax.sharding.mesh.AXES`; None: one device.
        specs: sharding of each weight: for each array axis, the mesh axes that split it.
        attn_implementation: the `attn_implementation` passed to `from_pretrained`.
        task: the `task` passed to `from_pretrained`.
        programs: program names by file.
        sizes: prompt and cache sizes that the programs of `generate` were compiled for.
    """

    runtime: dict[str, str]
    device_ids: list[int]
    mesh: dict[str, int] | None
    specs: dict[str, Spec]
    attn_implementation: str | None
    task: str | None
    programs: dict[str, str]
    sizes: list[Size]

    def write(self, folder: Path) -> None:
        """Write `bundle.json` to a bundle's folder."""
        (folder / FILE).write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")

    def given_specs(self) -> dict[str, P]:
        """The specs in the form that `make_plan` takes."""
        return {name: P(*(tuple(a) if isinstance(a, list) else a for a in spec)) for name, spec in self.specs.items()}

    def make_mesh(self) -> Mesh | None:
        """The mesh over this process's devices; None for one device.

        Raises:
            InvalidInputError: the programs were compiled for other devices or by other versions.
        """
        devices = {device.id: device for device in jax.devices()}
        here = runtime_of(jax.devices(), is_one_device=self.mesh is None)
        if version_of("transformers") == "none":  # programs run without it
            here["transformers"] = self.runtime["transformers"]
        differing = [
            f"{n}: {made} there, {here.get(n)} here" for n, made in self.runtime.items() if here.get(n) != made
        ]
        absent = [i for i in self.device_ids if i not in devices]
        if differing or absent:
            raise InvalidInputError(
                "The bundle's programs were compiled for another runtime.",
                "; ".join(differing or [f"devices {absent} are not here"]) + ".",
                'Export a bundle for this runtime, or pass parallelism (for one device {"tensor": 1}) to load only the weights.',
            )
        if self.mesh is None:
            return None
        grid = np.array([devices[i] for i in self.device_ids]).reshape([self.mesh[name] for name in AXES])
        return Mesh(grid, AXES)


def read_bundle(folder: Path) -> Bundle | None:
    """The bundle in a folder; None for a plain checkpoint.

    Raises:
        CheckpointCorruptError: `bundle.json` is not in this version's format.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found: Any = json.loads(path.read_text())
        if found.pop("format") != _FORMAT:
            raise ValueError("it was written by another version of hfax")
        bundle = Bundle(**{**found, "sizes": [tuple(size) for size in found["sizes"]]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"{path} is not a bundle that this version of hfax can read.",
            f"{type(error).__name__}: {error}",
            "Export the bundle again with hfax export.",
        ) from error
    missing = [name for name in bundle.programs if not (folder / PROGRAMS / name).is_file()]
    if missing:
        raise CheckpointCorruptError(
            f"{len(missing)} of {len(bundle.programs)} programs are missing from {folder / PROGRAMS}.",
            "The bundle was not copied completely.",
            "Copy it again, or export it again.",
        )
    return bundle


def runtime_of(devices: Sequence[Any], *, is_one_device: bool) -> dict[str, str]:
    """The requirements on a process that runs a program compiled for these devices.

    Args:
        devices: all devices of the run, or of a topology.
        is_one_device: the program uses only one device, so the device count is not required to match.
    """
    first = devices[0]
    versions = {name: version_of(name) for name in ("hfax", "transformers", "jax", "jaxlib")}
    counts = {"devices": str(len(devices)), "processes": str(len({d.process_index for d in devices}))}
    found = {
        **versions,
        "hfax's source": source_digest()[:12],
        "platform": first.platform,
        "device kind": first.device_kind,
        **({} if is_one_device else counts),
    }
    if first.platform == "tpu":
        found["libtpu"] = version_of("libtpu")
    if first.platform == "cpu":
        processor = hashlib.sha256(library.processor_features().encode()).hexdigest()[:12]
        found |= {"processor": processor, "kernels": kernels_digest("cpu")[:12]}
    return found


def specs_of(layout: Layout) -> dict[str, Spec]:
    """The sharding of each weight in a layout, in the form of `Bundle.specs`."""
    if layout.plan is None:
        return {}
    return {
        name: [list(axes) if isinstance(axes, tuple) else axes for axes in weight.spec]
        for name, weight in layout.plan.weights.items()
    }


def sizes_of(mesh: Mesh | None) -> dict[str, int] | None:
    """Mesh sizes by axis."""
    return None if mesh is None else {name: int(size) for name, size in mesh.shape.items()}
