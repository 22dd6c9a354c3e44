"""Low-rank adapters next to a module's weights, in a trace.

Separates the adapter arrays from a model's weights, where they have peft's names ("….q_proj.lora_A.weight"), and adds the outputs
of adapters to their layers, and those of parameters ("….experts.down_proj.lora_A.weight") to the weights themselves.
LoRA: Hu et al., 2021 (https://arxiv.org/abs/2106.09685); with a magnitude, DoRA: Liu et al., 2024
(https://arxiv.org/abs/2402.09353). It does not know where adapters come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.pytorch_utils import Conv1D

from hfax.patches.patch import forwards_replaced

LORA_A, LORA_B, SCALING, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_scaling", "lora_magnitude_vector.weight"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
PARTS = (LORA_A, LORA_B, SCALING, MAGNITUDE, EMBEDDING_A, EMBEDDING_B)
"""Names of an adapter's arrays, appended to the layer name."""


def split_adapters(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The weights without adapters, and the adapter arrays by layer name and array name."""
    own: dict[str, Any] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for name, array in weights.items():
        part = next((p for p in PARTS if name.endswith(f".{p}")), None) if "lora_" in name else None
        if part is None:
            own[name] = array
        else:
            adapters.setdefault(name.removesuffix(f".{part}"), {})[part] = array
    return own, adapters


def onto_parameters(
    module: torch.nn.Module, own: dict[str, Any], adapters: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The weights with the adapters of parameters added to them, as peft's `target_parameters`, and the adapters of layers.

    Args:
        module: the model.
        own: the weights without adapters, by name.
        adapters: adapter arrays by name of the layer or parameter; for a stack of experts `lora_A` is [experts, rank, in] and
            `lora_B` [experts, out, rank].
    """
    changed: dict[str, Any] = {}
    for name in set(adapters) & set(own):
        weight, parts = own[name], adapters[name]
        added = low_rank_product(parts[LORA_A], parts[LORA_B], parts[SCALING])
        added = added.swapaxes(-1, -2) if is_turned(module, name) else added
        changed[name] = (weight.astype(jnp.float32) + added).astype(weight.dtype)
    return {**own, **changed}, {name: parts for name, parts in adapters.items() if name not in changed}


def is_turned(module: torch.nn.Module, path: str) -> bool:
    """Whether the weight of a layer, or a parameter, is stored as [in, out]; embedding tables are, as [rows, width]."""
    owner, _, name = path.rpartition(".")
    parent = module.get_submodule(owner)
    part = getattr(parent, name)
    if isinstance(part, torch.nn.Module):
        return isinstance(part, (torch.nn.Embedding, Conv1D))
    return part.ndim == 3 and bool(getattr(parent, "is_transposed", False))


def low_rank_product(a: jax.Array, b: jax.Array, scaling: Any) -> jax.Array:
    """`scaling · b @ a` [.., out, in] float32 of `a` [.., rank, in] and `b` [.., out, rank]."""
    return scaling * jnp.matmul(b.astype(jnp.float32), a.astype(jnp.float32), precision="highest")


@contextlib.contextmanager
def adapted(
    module: torch.nn.Module, adapters: Mapping[str, Mapping[str, jax.Array]], environment: Any, dropout: float
) -> Iterator[None]:
    """Within the block, layers add their adapter outputs.

    Args:
        module: the model.
        adapters: by layer name: `lora_A` [rank, in], `lora_B` [out, rank], a scalar scaling, and for DoRA a magnitude [out]; for
            embeddings `lora_embedding_A` [rank, rows] and `lora_embedding_B` [width, rank].
        environment: the environment of the trace.
        dropout: dropout rate of the adapter inputs, in train mode.
    """
    layers = [(module.get_submodule(path), arrays) for path, arrays in adapters.items()]

    def run(layer: torch.nn.Module, arrays: Mapping[str, jax.Array]) -> Callable[..., Any]:
        make = _embedding if isinstance(layer, torch.nn.Embedding) else _linear
        return make(layer, layer.forward, arrays, environment, dropout)

    def marked(forward: Callable[..., Any]) -> Callable[..., Any]:
        forward.has_adapter = True  # type: ignore[attr-defined]
        return forward

    with forwards_replaced((layer, marked(run(layer, arrays))) for layer, arrays in layers):
        yield


def _linear(
    layer: torch.nn.Module,
    forward: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    environment: Any,
    dropout: float,
) -> Callable[..., Any]:
    a, b, scaling = (environment.wrap(arrays[part]) for part in (LORA_A, LORA_B, SCALING))
    magnitude = environment.wrap(arrays[MAGNITUDE]) if MAGNITUDE in arrays else None

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(x, *args, **kwargs)
        drops = layer.training and dropout > 0
        given = torch.nn.functional.dropout(x.to(a.dtype), dropout) if drops else x.to(a.dtype)
        low = torch.nn.functional.linear(torch.nn.functional.linear(given, a), b)
        if magnitude is None:
            return (result + low * scaling).to(result.dtype)
        own: Any = layer.weight
        weight = own.t() if isinstance(layer, Conv1D) else own
        norm = environment.wrap(column_norms(*environment.t2j_iso((weight, a, b, scaling))))
        scale = magnitude / norm
        if drops:  # the whole layer reads the input after dropout
            base = torch.nn.functional.linear(given, weight.to(given.dtype))
        else:
            base = result if layer.bias is None else result - layer.bias
        return (result + (scale - 1) * base + scale * low * scaling).to(result.dtype)

    return run


def column_norms(weight: jax.Array, a: jax.Array, b: jax.Array, scaling: jax.Array) -> jax.Array:
    """Norm of each row of `weight + scaling · b @ a`, [out, in]: [out] float32, with stopped gradient as in DoRA."""
    merged = weight.astype(jnp.float32) + scaling * (b.astype(jnp.float32) @ a.astype(jnp.float32))
    return jax.lax.stop_gradient(jnp.linalg.norm(merged, axis=1))


def _embedding(
    layer: torch.nn.Module,
    forward: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    environment: Any,
    dropout: float,
) -> Callable[..., Any]:
    a, b, scaling = (environment.wrap(arrays[part]) for part in (EMBEDDING_A, EMBEDDING_B, SCALING))

    def run(ids: Any) -> Any:
        result = forward(ids)
        low = torch.nn.functional.embedding(ids, a.t()) @ b.t() * scaling
        own_scale: Any = getattr(layer, "embed_scale", None)  # Gemma's tables scale their rows
        return (result + (low if own_scale is None else low * own_scale)).to(result.dtype)

    return run
