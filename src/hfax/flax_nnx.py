"""Wraps a model as a `flax.nnx.Module` with parameters named and nested as in the torch module.

Turns a model into a tree of modules that hold its arrays, and such a tree, or its state, back into weights by name. Arrays are
shared with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from hfax.backends.jax.model import JaxModel
from hfax.errors import BackendNotAvailableError, UnsupportedOptionError
from hfax.kernels.quantized import has_packed
from hfax.load.nnx_state import weights_of
from hfax.tracing.traced_model import TracedModel
from hfax.tracing.training import Training

try:
    from flax import nnx
except ImportError as error:
    raise BackendNotAvailableError(
        "to_nnx requires flax.", str(error), "Install it: pip install 'hfax[flax]'."
    ) from error


class Buffer(nnx.Variable):
    """An array of a module that is not trained: position tables, running statistics, parameters that the class freezes."""


class Part(nnx.Module):
    """Counterpart of one torch module: its parameters and submodules by name; layer lists are `nnx.List`s."""


class TransformersModule(Part):
    """A transformers model as an nnx module. Created by `to_nnx`."""

    _forward: Any

    def __call__(self, *args: Any, dropout_rng: jax.Array | None = None, remat: bool = False, **inputs: Any) -> Any:
        """Run the forward pass, like `JaxModel.apply` with this module's parameters.

        Args:
            *args: positional arguments of the transformers class.
            dropout_rng: PRNG key (`rngs.dropout()`); if given, the model is in train mode.
            remat: recompute layers in the backward pass.
            **inputs: inputs by name.
        """
        state = nnx.state(self, (nnx.Param, Buffer))
        return self._forward(weights_of(state), args, inputs, Training(key=dropout_rng, remat=remat))


class _Forward:
    """A model's static part: its code. Two modules of one model compare equal, so `nnx.jit` traces once."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced

    def __call__(self, weights: Mapping[str, Any], args: Any, inputs: Any, training: Training) -> Any:
        return self._traced.apply(weights, args, inputs, training)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Forward) and other._traced is self._traced

    def __hash__(self) -> int:
        return id(self._traced)


def to_nnx(model: JaxModel) -> TransformersModule:
    """The model as a flax.nnx module; arrays are not copied.

    Args:
        model: the model; its weights are shared with the module until either updates them.

    Returns:
        A module with an `nnx.Param` for each weight, under the weight's own path ("model.layers.0.self_attn.q_proj.weight" is
        `module.model.layers[0].self_attn.q_proj.weight`), and a `Buffer` for each array that torch does not train: buffers, and
        parameters that the class freezes. On a mesh they carry sharding metadata. Tied weights are one parameter.
        `model.update(module)` copies trained values back.

    Raises:
        BackendNotAvailableError: flax is not installed.
        UnsupportedOptionError: the weights are quantized, or an adapter is active.

    Examples:
        >>> module = to_nnx(model)
        >>> optimizer = nnx.Optimizer(module, optax.adamw(1e-4), wrt=nnx.Param)
        >>> gradients = nnx.grad(lambda m: m(input_ids=ids, labels=ids).loss)(module)
        >>> _ = optimizer.update(module, gradients)
        >>> model.update(module)
    """
    if has_packed(model.params) or model.active_adapters():
        raise UnsupportedOptionError(
            f"{type(model).__name__} has quantized weights or an active adapter.",
            "An nnx module holds floating-point weights under the torch module's names.",
            "Load the model without quantization, or merge the adapter first.",
        )
    plan = model.sharding_plan()
    tree: dict[str, Any] = {}
    for name, array in model.buffers.items():
        _put(tree, name, Buffer(array))
    for name, array in model.params.items():
        split: dict[str, Any] = (
            {} if plan is None or name not in plan.weights else {"out_sharding": tuple(plan.weights[name].spec)}
        )
        kind = Buffer if name in model.skeleton.untrained else nnx.Param
        _put(tree, name, kind(array, eager_sharding=False, **split))
    module = TransformersModule()
    _fill(module, tree)
    module._forward = _Forward(model.parts.traced)
    return module


def _put(tree: dict[str, Any], name: str, variable: Any) -> None:
    *owners, leaf = name.split(".")
    node = tree
    for owner in owners:
        node = node.setdefault(owner, {})
    node[leaf] = variable


def _fill(part: nnx.Module, tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        setattr(part, name, _part(value) if isinstance(value, dict) else value)


def _part(tree: dict[str, Any]) -> Any:
    """A `Part`, or a list if all names are consecutive indices; lists with gaps (layers without weights) stay a `Part`."""
    numbers = sorted(int(n) for n in tree) if all(n.isdigit() for n in tree) else []
    if numbers and numbers == list(range(len(numbers))) and all(isinstance(v, dict) for v in tree.values()):
        return nnx.List([_part(tree[str(n)]) for n in numbers])
    part = Part()
    _fill(part, tree)
    return part
