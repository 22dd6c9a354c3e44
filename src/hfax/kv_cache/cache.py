"""The KV cache of a whole model: built from its config, and converted to and from a flat dict of arrays.

A program carries a cache as `dict[str, array]` (`layers.3.keys`, `layers.3.conv_states.0`, …); inside a trace the same arrays
are in the objects that transformers' modelling code expects. Independent of the backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DummyLayer, EncoderDecoderCache

from hfax.errors import UnsupportedModelError
from hfax.kv_cache.layer_kinds import layer_kinds
from hfax.kv_cache.layers import (
    CacheOps,
    CrossAttentionLayer,
    FullAttentionLayer,
    HybridLayer,
    HybridSlidingLayer,
    IndexedLayer,
    RecurrentLayer,
    SlidingWindowLayer,
    Tensor,
)
from hfax.kv_cache.paged import PagedLayer, PagedSlidingLayer
from hfax.kv_cache.scales import scales_of


class LayeredCache(Cache):
    """transformers' cache with hfax's layers; reports which of them keep only a recurrent state."""

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer keeps recurrent states and no keys."""
        return [isinstance(x, RecurrentLayer) and not isinstance(x, FullAttentionLayer) for x in self.layers]


_WINDOWS = ("sliding_attention", "chunked_attention")


def make_cache(
    config: PretrainedConfig,
    ops: CacheOps,
    capacity: int,
    *,
    length: Tensor | None = None,
    arrays: dict[str, Tensor] | None = None,
    has_encoder: bool = False,
    prompt_length: int | None = None,
    keeps_windows: bool = True,
    padding: Tensor | None = None,
) -> Cache:
    """A cache object for one trace.

    Args:
        config: the model's configuration (for composite models, the text config is used).
        ops: the backend's array operations.
        capacity: maximum tokens in full-attention layers.
        length: tokens held so far, a scalar array; None for an empty cache to be filled by prefill.
        arrays: the result of `cache_arrays`, to continue; required with `length`.
        has_encoder: the model is an encoder-decoder whose cross-attention is cached too.
        prompt_length: prompt tokens that fill an empty cache; further entries precede them.
        keeps_windows: sliding-window layers hold only their window; False: all tokens.
        padding: [batch], padding tokens before each prompt; None: no layer is paged.

    Raises:
        UnsupportedModelError: hfax has no cache for a kind of layer in the config.
    """
    types, kwargs = layer_kinds(config)
    if not keeps_windows:
        types = ["full_attention" if kind in _WINDOWS else kind for kind in types]
    own = LayeredCache(
        layers=[_make_layer(t, k, ops, capacity, length, padding) for t, k in zip(types, kwargs, strict=True)]
    )
    for layer, scales in zip(own.layers, scales_of(config), strict=False):
        if isinstance(layer, FullAttentionLayer):
            layer.prompt_length, layer.scales = prompt_length, scales
    if not has_encoder:
        _restore(own, arrays or {}, "layers")
        return own
    _restore(own, arrays or {}, "layers")
    cross = LayeredCache(layers=[CrossAttentionLayer(ops, capacity, None) for _ in types])
    _restore(cross, arrays or {}, "cross_layers")
    return EncoderDecoderCache(own, cross)


def only_read(config: PretrainedConfig, names: Iterable[str]) -> set[str]:
    """The names of arrays that decoding only reads, and that are the same for all texts of a prompt: keys and values of an
    encoder's output, or of images."""
    names = set(names)
    kinds = layer_kinds(config)[0] if any(name.startswith("layers.") for name in names) else []
    crossing = tuple(f"layers.{index}." for index, kind in enumerate(kinds) if kind == "cross_attention")
    return {name for name in names if name.startswith(("cross_layers.", *crossing))}


def cache_arrays(cache: Cache | EncoderDecoderCache) -> dict[str, Tensor]:
    """The arrays a cache holds, by name; the inverse of `make_cache(arrays=…)`."""
    if isinstance(cache, EncoderDecoderCache):
        return _collect(cache.self_attention_cache, "layers") | _collect(cache.cross_attention_cache, "cross_layers")
    return _collect(cache, "layers")


def _make_layer(
    kind: str, kwargs: dict[str, Any], ops: Any, capacity: int, length: Tensor | None, padding: Tensor | None
) -> Any:
    if padding is not None and kind == "full_attention":
        return PagedLayer(ops, capacity, length, padding=padding)
    if padding is not None and kind == "sliding_attention":
        return PagedSlidingLayer(ops, capacity, length, padding=padding, window=kwargs["sliding_window"])
    if kind == "full_attention":
        return FullAttentionLayer(ops, capacity, length)
    if kind == "cross_attention":
        return CrossAttentionLayer(ops, capacity, length)
    if kind in _WINDOWS:
        return SlidingWindowLayer(ops, capacity, length, window=kwargs["sliding_window"])
    if kind in ("linear_attention", "conv"):
        return RecurrentLayer(length, num_states=kwargs["number_of_states"])
    if kind == "hybrid":
        return HybridLayer(ops, capacity, length, num_states=kwargs["number_of_states"])
    if kind == "indexed_attention":
        return IndexedLayer(ops, capacity, length)
    if kind == "hybrid_sliding":
        states = kwargs["number_of_states"]
        return HybridSlidingLayer(ops, capacity, length, window=kwargs["sliding_window"], num_states=states)
    if kind == "dummy":
        return DummyLayer()
    raise UnsupportedModelError(
        f"The model has layers of kind {kind!r}, for which hfax has no cache.",
        "Cached decoding needs a cache class for each kind of layer.",
        "Call the model with use_cache=False, or report the model at the project's issue tracker.",
    )


def _collect(cache: Cache, prefix: str) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PagedLayer):
            layer.settle()
        if isinstance(layer, FullAttentionLayer):
            held = {name: getattr(layer, name) for name in layer.state_names}
            arrays |= {f"{prefix}.{index}.{name}": array for name, array in held.items() if array is not None}
        if isinstance(layer, RecurrentLayer):
            for kind in ("conv_states", "recurrent_states"):
                for state, array in getattr(layer, kind).items():
                    if array is not None:
                        arrays[f"{prefix}.{index}.{kind}.{state}"] = array
    return arrays


def _restore(cache: Cache, arrays: dict[str, Tensor], prefix: str) -> None:
    for name, array in arrays.items():
        first, index, kind, *state = name.split(".")
        if first != prefix:
            continue
        layer: Any = cache.layers[int(index)]
        if state:
            getattr(layer, kind)[int(state[0])] = array
            getattr(layer, f"is_{kind}_initialized")[int(state[0])] = True
        else:
            setattr(layer, kind, array)
            layer.is_initialized = True
    for layer in cache.layers:
        if isinstance(layer, FullAttentionLayer) and layer.keys is not None:
            layer.restored()
