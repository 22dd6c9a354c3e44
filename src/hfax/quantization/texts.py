"""The calibration data on its way through a model's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hfax.load.weights import Weight
from hfax.quantization.layer_steps import LayerSteps


class Texts:
    """Hidden states of the calibration data at a layer.

    Args:
        steps: the layers.
        batches: [rows, length] int32 each; the last ones are held out.
        held: how many are.
    """

    def __init__(self, steps: LayerSteps, batches: Sequence[jax.Array], held: int) -> None:
        self._steps, self._batches = steps, batches
        self._held = range(len(batches) - held, len(batches))
        self._hidden: list[Any] = [None] * len(batches)
        self._plain: dict[int, Any] = dict.fromkeys(self._held)
        """Of the held-out ones, hidden states with the checkpoint's own weights."""

    def moments(self, name: str, weights: Mapping[str, Weight]) -> dict[tuple[str, ...], jax.Array]:
        """See `LayerSteps.observe`; the sums over the data that is not held out."""
        total: dict[tuple[str, ...], jax.Array] = {}
        for number in range(self._held.start):
            found = self._steps.observe(name, weights, self._batches[number], self._hidden[number])
            total = {part: total[part] + moment for part, moment in found.items()} if total else found
        return total

    def first_output(self, name: str, weights: Mapping[str, Weight]) -> jax.Array:
        """A layer's output for the first of the data."""
        return self._steps.run(name, weights, self._batches[0], self._hidden[0])

    def advance(self, name: str, weights: Mapping[str, Weight], packed: Mapping[str, Weight]) -> None:
        """Go through a layer: all with its quantized weights, and the held-out ones with its own, too."""
        is_last = name == [*self._steps.layers][-1]
        for number in self._held:
            hidden = self._steps.run(name, weights, self._batches[number], self._plain[number])
            self._plain[number] = np.asarray(hidden)
        for number in self._held if is_last else range(len(self._batches)):
            hidden = self._steps.run(name, packed, self._batches[number], self._hidden[number])
            self._hidden[number] = np.asarray(hidden)

    def perplexities(self, outside: Mapping[str, Weight]) -> tuple[float, float]:
        """Of the held-out texts: with the checkpoint's own weights, and with the quantized ones."""
        found = []
        for states in (self._plain, self._hidden):
            losses = [self._steps.losses(outside, self._batches[n], states[n]) for n in self._held]
            found.append(math.exp(min(float(np.mean([np.asarray(loss) for loss in losses])), 700.0)))
        return found[0], found[1]
