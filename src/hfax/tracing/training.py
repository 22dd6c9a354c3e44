"""A forward pass that gradients are taken of: in train mode, with dropout from a key, and with layers computed again.

Changes how a module is called inside a trace; what is computed stays the module's own code.
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
_OF_MASKS = ("causal", "block", "all_real")
"""What masks say of themselves beside their values, see `hfax.patches.masks`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a pass that is differentiated runs.

    Args:
        key: of the random numbers of dropout, a JAX PRNG key; None: in evaluation mode, without any.
        lora_dropout: of what low-rank adapters read, in train mode.
        remat: of each layer only the input is kept for the gradient; the layer is computed again when it is needed.
    """

    key: jax.Array | None = None
    remat: bool = False
    lora_dropout: float = 0.0


@contextlib.contextmanager
def in_train_mode(module: torch.nn.Module) -> Iterator[None]:
    """`module.train()` for the block.

    Raises:
        UnsupportedModelError: the model changes running statistics while it trains, which a pure function cannot; or draws random
            numbers on the host.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModelError(
                f"{type(module).__name__} cannot run in train mode: {path} is a {type(part).__name__}.",
                "It would change its running statistics, which a pure function has no place for.",
                "Train without dropout_rng (TrainingArguments(dropout=False)): statistics then stay as they are.",
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
    """Raise for what modelling code draws once, while it is traced, and every step would then share."""
    config: Any = module.config
    skipped = next((n for n in _LAYERDROP if isinstance(v := getattr(config, n, 0), float) and v > 0), None)
    if skipped is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} skips whole layers at random ({skipped}={getattr(config, skipped)}).",
            "A compiled program has the same layers each time.",
            f"Set {skipped} to 0 in config.json, or train without dropout_rng (TrainingArguments(dropout=False)).",
        )
    if getattr(config, "apply_spec_augment", False) and (config.mask_time_prob or config.mask_feature_prob):
        raise UnsupportedModelError(
            f"{type(module).__name__} masks parts of the sound at random (apply_spec_augment).",
            "Its code draws the places in numpy, once for a compiled program.",
            "Set apply_spec_augment to false in config.json, or train without dropout_rng "
            "(TrainingArguments(dropout=False)).",
        )


@contextlib.contextmanager
def rematerialised(module: torch.nn.Module, environment: Any) -> Iterator[None]:
    """For the block, the layers that transformers checkpoints on torch run under `jax.checkpoint`.

    Raises:
        UnsupportedOptionError: the model has no such layers.
    """
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedOptionError(
            f"{type(module).__name__} has no layers that could be computed again.",
            "transformers marks them by the class GradientCheckpointingLayer.",
            "Leave gradient checkpointing out.",
        )
    with forwards_replaced((layer, _checkpointed(layer.forward, environment)) for layer in layers):
        yield


def _checkpointed(forward: Callable[..., Any], environment: Any) -> Callable[..., Any]:
    """A layer's forward under `jax.checkpoint`.

    Nothing that it computes may be seen from outside but by its results, so what modelling code leaves elsewhere (hidden states
    and router logits that transformers' hooks record, checks of values) is returned beside them.
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
    """The other tensor, with what a mask says of itself."""
    for name in _OF_MASKS:
        if hasattr(tensor, name):
            setattr(other, name, getattr(tensor, name))
    return other
