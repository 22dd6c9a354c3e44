"""Training throughput, and its share of the devices' peak."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.bench.limits import matrix_operations
from hfax.planning.chips import chip_of_kind
from hfax.planning.operations import operations_per_token, used_numbers
from hfax.train.ignored import IGNORED


class Speed:
    """Measures tokens and time between readings.

    Args:
        model: the trained model.
        trainable: names of the trained weights.
    """

    def __init__(self, model: JaxModel, trainable: Sequence[str]) -> None:
        used = used_numbers(model.skeleton)
        trained = 2 * sum(size for name, size in used.items() if name in set(trainable))
        forward = operations_per_token(model.skeleton)
        # forward pass, input gradients, and gradients of trained weights; recomputation is not counted
        self._operations = 2 * forward + trained
        devices = list(model.mesh.devices.flat) if model.mesh is not None else [model.jax_device]
        self._peak = len(devices) * _peak(devices[0], str(model.dtype).removeprefix("torch."))
        self._steps = self._tokens = 0
        self._start: float | None = None

    def note(self, batch: Mapping[str, Any]) -> None:
        """Record that a step with this batch has started."""
        if self._start is None:  # the first step includes compilation
            self._start = time.perf_counter()
            return
        self._steps += 1
        self._tokens += count_tokens(batch)

    def pause(self) -> None:
        """Restart the measurement, after time spent on something else."""
        self._start, self._steps, self._tokens = None, 0, 0

    def read(self) -> dict[str, float]:
        """Since the last reading: "step_s", "tokens_per_s", and "peak_share" of the devices' matrix operations (counts only
        products with weights, without recomputation). Empty before two steps."""
        if self._start is None or not self._steps:
            return {}
        seconds = time.perf_counter() - self._start
        found = {"step_s": seconds / self._steps, "tokens_per_s": self._tokens / seconds}
        if self._peak:
            found["peak_share"] = self._operations * self._tokens / seconds / self._peak
        self._start, self._steps, self._tokens = time.perf_counter(), 0, 0
        return found


def count_tokens(batch: Mapping[str, Any]) -> int:
    """Non-padding tokens of a batch: from masks, else from labels (packed rows), else all ids."""
    if masks := [mask for name, mask in batch.items() if name.endswith("attention_mask")]:
        return sum(int(np.sum(np.asarray(mask) != 0)) for mask in masks)
    labels = batch.get("labels")
    if labels is not None and np.ndim(labels) > 1:
        return int(np.sum(np.asarray(labels) != IGNORED))
    return int(np.size(batch.get("input_ids", 0)))


def _peak(device: jax.Device, dtype: str) -> float:
    """Operations per second: published for accelerators, measured on CPU; 0 if unknown."""
    if device.platform == "cpu":
        return matrix_operations(device, dtype)
    chip = chip_of_kind(device.device_kind)
    return 0.0 if chip is None else chip.operations
