"""Prompts with an image, compiled for accelerators that are not there: attention of the image by kernels, or in blocks by XLA.

    python benchmarks/image_prompts.py --json-file benchmarks/results/image-prompts.json      # needs hfax[tpu] and hfax[plan-gpu]

Qwen2.5-VL-7B with eight of its 32 vision layers, one of them over the whole image and seven within windows, and two of its 28
language layers. Prints estimated milliseconds (`hfax.planning.program_time`), temporaries and kernels. Takes ten minutes, most of
them libtpu's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from shapes.published import config_of

from hfax.kernels.gpu import ranges
from hfax.kernels.tpu import attention
from hfax.planning.program_time import estimate
from hfax.planning.topology import compile_for

SIZES = {448: 512, 1120: 6144}
"""Prompt lengths in tokens by the side of an image in pixels."""


def config() -> Any:
    """The shape with fewer layers."""
    found = config_of("qwen2.5-vl-7b")
    text: Any = found.get_text_config(decoder=True)
    text.num_hidden_layers, text.layer_types, found.vision_config.depth = 2, text.layer_types[:2], 8
    return found


@contextlib.contextmanager
def in_blocks() -> Any:
    """Within the block, no kernel takes packed images."""
    with (
        mock.patch.object(attention, "can_splash_segments", return_value=False),
        mock.patch.object(ranges, "fits", side_effect=lambda query, key, value: query.shape[2] != key.shape[2]),
    ):
        yield


def measure(machine: str, side: int, *, has_kernels: bool) -> dict[str, Any]:
    """One row of the table."""
    sizes: dict[str, Any] = {
        "batch_size": 1,
        "prompt_length": SIZES[side],
        "capacity": 8192,
        "image_size": (side, side),
    }
    with contextlib.nullcontext() if has_kernels else in_blocks():
        prefill, _ = compile_for(config(), machine, **sizes)
    time = estimate(prefill.hlo, machine)
    return {
        "machine": machine,
        "side": side,
        "has_kernels": has_kernels,
        "estimated_ms": 1e3 * time.seconds,
        "shares_ms": {name: 1e3 * seconds for name, seconds in time.shares.items()},
        "temporary_bytes": prefill.temporary_bytes,
        "kernels": prefill.kernels,
        "compile_s": prefill.compile_seconds,
    }


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=["h100:1", "v6e:1x1"])
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    rows = []
    for machine in options.machines:
        for side in SIZES:
            for has_kernels in (False, True):
                rows.append(row := measure(machine, side, has_kernels=has_kernels))
                way = "kernels" if has_kernels else "blocks"
                print(
                    f"{machine}, {side} x {side} pixels, {way}: {row['estimated_ms']:.1f} ms, temporaries "
                    f"{row['temporary_bytes'] / 1e6:.1f} MB, kernels {row['kernels']}, compiled in {row['compile_s']:.0f} s",
                    flush=True,
                )
    if options.json_file:
        options.json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
