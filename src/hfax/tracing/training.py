"""A differentiated forward pass: train mode, dropout from a PRNG key, and rematerialized layers.

Changes how a module is called inside a trace; the computation is still the module's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import _active_collector

from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.patches.control_flow import collecting_checks, merge_checks
from hfax.patches.patch import forwards_replaced
from hfax.tracing.structure import flatten, unflatten

_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a differentiated pass runs.

    Args:
        key: JAX PRNG key for dropout; None: evaluation mode, without dropout.
        lora_dropout: dropout rate of the inputs of low-rank adapters, in train mode.
        remat: keep only the input of each layer for the backward pass, and recompute the layer there.
    """

    key: jax.Array | None = None
    remat: bool = False
    lora_dropout: float = 0.0


@contextlib.contextmanager
def in_train_mode(module: torch.nn.Module) -> Iterator[None]:
    """`module.train()` within the block.

    Raises:
        UnsupportedModelError: the model updates running statistics in train mode, which a pure function cannot do, or generates
            random numbers on the host.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModelError(
                f"{type(module).__name__} cannot run in train mode: {path} is a {type(part).__name__}.",
                "It would update its running statistics, which a pure function cannot do.",
                "Train without dropout_rng (TrainingArguments(dropout=False)): running statistics are then frozen.",
            )
    _refuse_randomness_of_the_host(module)
    before = {part: part.training for part in module.modules()}
    module.train()
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


def _refuse_randomness_of_the_host(module: torch.nn.Module) -> None:
    """Raise for random choices that modelling code makes on the host while tracing, which every step would then share."""
    config: Any = module.config
    skipped = next((n for n in _LAYERDROP if isinstance(v := getattr(config, n, 0), float) and v > 0), None)
    if skipped is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses LayerDrop ({skipped}={getattr(config, skipped)}).",
            "A compiled program runs the same layers every time.",
            f"Set {skipped} to 0 in config.json, or train without dropout_rng (TrainingArguments(dropout=False)).",
        )
    if getattr(config, "apply_spec_augment", False) and (config.mask_time_prob or config.mask_feature_prob):
        raise UnsupportedModelError(
            f"{type(module).__name__} uses SpecAugment (apply_spec_augment).",
            "Its code samples the masks in numpy, once per compiled program.",
            "Set apply_spec_augment to false in config.json, or train without dropout_rng "
            "(TrainingArguments(dropout=False)).",
        )


@contextlib.contextmanager
def rematerialised(module: torch.nn.Module, environment: Any) -> Iterator[None]:
    """Within the block, layers that support gradient checkpointing in transformers run under `jax.checkpoint`.

    Raises:
        UnsupportedOptionError: the model has no such layers.
    """
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedOptionError(
            f"{type(module).__name__} does not support gradient checkpointing.",
            "None of its layers is a transformers GradientCheckpointingLayer.",
            "Disable gradient checkpointing.",
        )
    with forwards_replaced((layer, _checkpointed(layer.forward, environment)) for layer in layers):
        yield


def _checkpointed(forward: Callable[..., Any], environment: Any) -> Callable[..., Any]:
    """A layer's forward under `jax.checkpoint`.

    Only its results may be visible outside, so values that modelling code stores elsewhere (hidden states and router logits
    recorded by transformers' hooks, data-dependent checks) are returned as additional results.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors, inputs = flatten((args, kwargs), _is_traced)
        key = environment.get_and_rotate_prng_key()
        found: list[Any] = []
        recorded = _active_collector.get()

        def compute(arrays: list[jax.Array], key: jax.Array) -> list[jax.Array]:
            inner_args, inner_kwargs = unflatten(
                inputs, [_like(t, environment.wrap(a)) for t, a in zip(tensors, arrays, strict=True)]
            )
            checks: dict[str, Any] = {}
            records = {name: [] if isinstance(v, list) else v for name, v in (recorded or {}).items()}
            token = None if recorded is None else _active_collector.set(records)
            try:
                with environment.override_property(prng=key), collecting_checks(checks):
                    result = forward(*inner_args, **inner_kwargs)
            finally:
                if recorded is not None:
                    _active_collector.reset(token)
            leaves, structure = flatten((result, records, checks), lambda v: isinstance(v, torch.Tensor))
            found.append(structure)
            return [environment.t2j_iso(leaf) for leaf in leaves]

        arrays = jax.checkpoint(compute)([t.jax() for t in tensors], key)
        result, records, checks = unflatten(found[-1], [environment.wrap(a) for a in arrays])
        for name, values in records.items():
            if recorded is not None and isinstance(values, list):
                recorded[name].extend(values)
        merge_checks(checks)
        return result

    return run


def _is_traced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "jax") and getattr(value, "host", None) is None


def _like(tensor: Any, other: Any) -> Any:
    """The other tensor, with the metadata of a mask."""
    other.mask_structure = tensor.mask_structure
    return other
