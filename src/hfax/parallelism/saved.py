"""What a file of `hfax plan --json-file` says for this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from hfax.errors import InvalidInputError


def read_plan(path: str | Path) -> tuple[dict[str, int], Any]:
    """Mesh and quantization of the first plan for as many devices as there are here.

    Raises:
        InvalidInputError: the file holds no plan, or none for so many devices.
    """
    try:
        plans = json.loads(Path(path).read_text())["plans"]
        found = [(p["machine"], p["num_devices"], dict(p["mesh"]), p["quantization"]) for p in plans]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} holds no plan of hfax.",
            f"{type(error).__name__}: {error}",
            "Write one with hfax plan --json-file.",
        ) from error
    count = jax.device_count()
    for _, num_devices, mesh, quantization in found:
        if num_devices == count:
            return mesh, quantization
    raise InvalidInputError(
        f"{path} has no plan for {count} devices.",
        f"Its plans are for {', '.join(sorted({f'{machine} ({n})' for machine, n, _, _ in found}))}.",
        "Plan for this machine's topology.",
    )
