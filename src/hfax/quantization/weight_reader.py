"""Reads a checkpoint's weights a layer at a time, onto one device, plain or with the codes that the checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable

import jax

from hfax.load.conversion import ConversionStep, check_complete, plan_conversion, run_packed_step, run_step
from hfax.load.placement import place
from hfax.load.quantize import pack
from hfax.load.rules import check_shape, draw_missing, dtype_rule
from hfax.load.skeleton import Skeleton
from hfax.load.store import TensorStore
from hfax.load.weights import Weight
from hfax.sharding.layout import Layout

LayerOf = Callable[[str], str | None]
"""The layer that a weight belongs to, by name; None: it is outside of the layers."""


class WeightReader:
    """The weights of a checkpoint by layer.

    Args:
        skeleton: the model.
        store: the checkpoint's tensors.
        layout: one device.
        layer_of: the layer of a weight.

    Raises:
        CheckpointCorruptError: tensors are unexpected.
    """

    def __init__(self, skeleton: Skeleton, store: TensorStore, layout: Layout, layer_of: LayerOf) -> None:
        self._skeleton, self._store, self._where = skeleton, store, layout.replicated
        self._layer_of = layer_of
        plan = plan_conversion(skeleton, store.names, store.rules)
        self._unexpected = plan.unexpected
        self._steps: dict[str | None, list[ConversionStep]] = {}
        for step in plan.steps:
            self._steps.setdefault(layer_of(step.target), []).append(step)
        self._dtype_of = dtype_rule(skeleton.module, skeleton.dtype)

    def read(self, layer: str | None) -> dict[str, Weight]:
        """The weights of a layer by name, or those outside of the layers; packed where a kernel multiplies with the stored codes.

        Raises:
            CheckpointCorruptError: tensors are missing, unexpected or misshapen.
        """
        tied = self._skeleton.tied
        found: dict[str, Weight] = {}
        for step in self._steps.get(layer, ()):
            for name, weight in self._read_step(step).items():
                found.setdefault(tied.get(name, name), weight)
        own = {name for name in self._skeleton.shapes if self._layer_of(name) == layer}
        present = set(self._skeleton.shapes) - (own - found.keys())
        absent = check_complete(self._skeleton, present, self._unexpected, strict=True)
        return {**found, **{n: place(t, self._where) for n, t in draw_missing(self._skeleton, absent).items()}}

    def _read_step(self, step: ConversionStep) -> dict[str, Weight]:
        shapes = {**self._skeleton.shapes, **{a: self._skeleton.shapes[n] for a, n in self._skeleton.tied.items()}}
        packed = None
        if all(source in self._store.packed for source, _ in step.sources):
            packed = run_packed_step(step, self._store.read_packed, self._skeleton.module)
        found: dict[str, Weight] = {}
        if packed is not None:
            for name, tensor in packed.items():
                wanted = self._dtype_of(name, shapes[name])
                kept = pack(tensor, wanted, self._where)
                found[name] = place(tensor.dequantize().to(wanted), self._where) if kept is None else kept
            return found
        for name, tensor in run_step(step, self._store.read, self._skeleton.module):
            check_shape(name, tensor, shapes[name], step)
            is_float = tensor.is_floating_point()
            found[name] = place(tensor.to(self._dtype_of(name, shapes[name])) if is_float else tensor, self._where)
        return found


def plain(weights: dict[str, Weight]) -> dict[str, jax.Array]:
    """The weights as numbers."""
    return {name: w if isinstance(w, jax.Array) else w.dequantize() for name, w in weights.items()}
