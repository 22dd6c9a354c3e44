"""The cache object of a trace: what a model's forward takes as its cache, made from arrays and read back into arrays.

Usually hfax's cache in transformers' protocol; a list of states or a class of their own for the models that know no other. Paged
where the target keeps pages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.ops import mappings
from transformers.cache_utils import Cache

from hfax.kernels import paged
from hfax.kv_cache.axes import is_paged
from hfax.kv_cache.cache import cache_arrays, make_cache
from hfax.tracing import torchax as tracing
from hfax.tracing.traits import ModelTraits

Arrays = dict[str, jax.Array]


def open_cache(
    module: torch.nn.Module,
    traits: ModelTraits,
    capacity: int,
    *,
    length: jax.Array | None = None,
    arrays: Arrays | None = None,
    prompt_length: int | None = None,
    keeps_windows: bool = True,
    attention_mask: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> Any:
    """The value that forward takes as `cache_argument`.

    Args:
        module: the model.
        traits: its traits.
        capacity: cache capacity, in tokens.
        length: scalar int32, tokens in the cache; None for an empty cache.
        arrays: what `arrays_in` returned for the previous call, to continue.
        prompt_length: prompt tokens that fill an empty cache.
        keeps_windows: sliding-window layers keep only their window; False: all tokens.
        attention_mask: [batch, length], 0 at prompt padding; None for encoder-decoders.
        dtype: of the keys and values in an empty cache; None: the model's.
    """
    config: Any = module.config
    if traits.cache_argument == "state":
        return [tracing.wrap(arrays[f"state.{i}"]) for i in range(len(arrays))] if arrays else None
    if config.model_type == "xlstm":
        return _RnnStates(tracing.wrap(arrays)) if arrays else None
    traced_length = None
    if length is not None:
        traced_length = tracing.wrap(length)
        traced_length.at_least = 1  # a prompt has at least one token, so code that checks for an empty cache gets False
    padding = None
    if attention_mask is not None and _is_paged(module, arrays, dtype):
        padding = tracing.wrap((attention_mask == 0).sum(axis=1, dtype=jnp.int32))
    return make_cache(
        config,
        tracing.JaxCacheOps(dtype),
        capacity,
        length=traced_length,
        arrays=tracing.wrap(arrays) if arrays is not None else None,
        has_encoder=traits.is_encoder_decoder,
        prompt_length=prompt_length,
        keeps_windows=keeps_windows,
        padding=padding,
    )


def cache_arguments(traits: ModelTraits, cache: Any) -> dict[str, Any]:
    """The keyword arguments that make forward use and return a cache."""
    assert traits.cache_argument is not None
    return {traits.cache_argument: cache, "use_cache": True, "return_dict": True}


def arrays_in(cache: Any, out: Any) -> Arrays:
    """The arrays of a cache, or of the states in an output.

    Args:
        cache: from `open_cache`, after the call.
        out: what forward returned.
    """
    if isinstance(cache, Cache):
        return {name: tracing.unwrap(a) for name, a in cache_arrays(cache).items()}
    if (own := getattr(out, "cache", None)) is not None:
        layers = own.rnn_state.items()
        return {f"state.{layer}.{i}": tracing.unwrap(a) for layer, states in layers for i, a in enumerate(states)}
    return {f"state.{i}": tracing.unwrap(a) for i, a in enumerate(out.state)}


def take_texts(array: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """An array with the texts of each prompt, on `axis`, in another order.

    Args:
        array: [batch · texts, …], or with these rows on another axis.
        order: [batch, texts] int32, the text of the prompt that each place takes.
        axis: the axis of rows.
    """
    split = array.reshape(*array.shape[:axis], *order.shape, *array.shape[axis + 1 :])
    take = functools.partial(
        jnp.take, axis=axis, mode="clip"
    )  # a gather in each prompt, which devices do for their own
    return jax.vmap(take, in_axes=(axis, 0), out_axes=axis)(split, order).reshape(array.shape)


def _is_paged(module: Any, arrays: Arrays | None, dtype: jnp.dtype | None) -> bool:
    """Whether a cache has layers in pages: a new one of `dtype` if the target wants it, another one if it has."""
    if arrays is not None:
        return any(is_paged(name) for name in arrays)
    return paged.are_kept(mappings.t2j_dtype(module.dtype), dtype)


class _RnnStates:
    """xLSTM's cache: three states per layer, which its code writes in place."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.seqlen_offset = 0
        self.rnn_state: dict[int, list[Any]] = {}
        for name in sorted(arrays, key=lambda name: [int(n) for n in name.split(".")[1:]]):
            self.rnn_state.setdefault(int(name.split(".")[1]), []).append(arrays[name])
