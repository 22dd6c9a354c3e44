"""Corrections of decoding steps that are wrong with a fixed-size cache or for several rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hfax.patches.patch import ForwardPatch, Patch


def _causal_by_position(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, attention_mask: Any = None, layer_past: Any = None, **kwargs: Any) -> Any:
        """GPT-Neo's attention, with its causal and window table cut at the end of the text instead of the cache."""
        if layer_past is None:
            return original(hidden_states, attention_mask=attention_mask, layer_past=None, **kwargs)
        start = layer_past.get_seq_length(module.layer_id)
        query, key, value = (
            module._split_heads(project(hidden_states), module.num_heads, module.head_dim)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        key, value = layer_past.update(key, value, module.layer_id)
        weights = torch.matmul(query.float(), key.float().transpose(-1, -2))
        queries = (torch.arange(query.shape[-2], device=query.device) + start)[:, None]
        keys = torch.arange(key.shape[-2], device=query.device)[None]
        seen = keys <= queries
        if module.attention_type == "local":
            seen = seen & (keys > queries - module.config.window_size)
        weights = torch.where(seen, weights, torch.finfo(weights.dtype).min)
        if attention_mask is not None:
            weights = weights + attention_mask
        weights = module.attn_dropout(torch.softmax(weights, dim=-1).to(value.dtype))
        output = module._merge_heads(torch.matmul(weights, value), module.num_heads, module.head_dim)
        return module.resid_dropout(module.out_proj(output)), weights

    return forward


def _before(hidden: Any, state: Any, layer: int) -> Any:
    """The previous token of each of [batch, length, width]; the state's token before the first."""
    first = torch.zeros_like(hidden[:, 0]) if state is None else state[:, :, layer].to(hidden.dtype)
    return torch.cat([first[:, None], hidden[:, :-1]], dim=1)


def _mixed(hidden: Any, shifted: Any, share: Any) -> Any:
    return hidden * share + shifted * (1 - share)


def _mixed_attention_inputs(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def extract(hidden: Any, state: Any = None) -> Any:
        shifted = _before(hidden, None if state is None else state[1], module.layer_id)
        key = module.key(_mixed(hidden, shifted, module.time_mix_key))
        value = module.value(_mixed(hidden, shifted, module.time_mix_value))
        receptance = torch.sigmoid(module.receptance(_mixed(hidden, shifted, module.time_mix_receptance)))
        if state is not None:
            state[1][:, :, module.layer_id] = hidden[:, -1]
        return receptance, key, value, state

    return extract


def _mixed_feed_forward(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden: Any, state: Any = None) -> Any:
        shifted = _before(hidden, None if state is None else state[0], module.layer_id)
        key = torch.square(torch.relu(module.key(_mixed(hidden, shifted, module.time_mix_key))))
        receptance = torch.sigmoid(module.receptance(_mixed(hidden, shifted, module.time_mix_receptance)))
        if state is not None:
            state[0][:, :, module.layer_id] = hidden[:, -1]
        return receptance * module.value(key), state

    return forward


def _hide_unwritten_keys(
    mask: str, cache: str, token_axis: int
) -> Callable[[Any, Callable[..., Any]], Callable[..., Any]]:
    """Makes a decoder layer's forward that gives its self-attention a mask where modelling code gives none.

    Args:
        mask: the argument that is added to self-attention's scores; where it is None, it becomes [batch, 1, queries, keys].
        cache: the argument with the cache.
        token_axis: the axis of tokens in the layer's first argument, [batch, tokens, width] or [tokens, batch, width].
    """

    def make(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            held = bound.arguments.get(cache)
            if held is not None and bound.arguments.get(mask) is None:
                hidden = args[0]
                new, rows, layer = hidden.shape[token_axis], hidden.shape[1 - token_axis], module.self_attn.layer_idx
                num_keys, _ = held.get_mask_sizes(new, layer)
                is_written = torch.arange(num_keys, device=hidden.device) < held.get_seq_length(layer) + new
                bias = torch.where(is_written, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype)
                bound.arguments[mask] = bias.expand(rows, 1, new, num_keys)
            return original(*bound.args, **bound.kwargs)

        return forward

    return make


def _positions_in_the_table(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input_ids: Any, *, cache_length: Any = 0) -> Any:
        """FSMT's sinusoids of places after the cache, [batch, length, width]."""
        if isinstance(cache_length, int):
            return original(input_ids, cache_length=cache_length)
        positions = module.make_positions(input_ids, module.padding_idx) + cache_length
        return torch.nn.functional.embedding(positions, module.weight)

    return forward


def _positions_after_the_cache(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        inputs_shape: Any, device: Any, attention_mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> Any:
        """ProphetNet's embedding of a step's position, [1, 1, width], and the position."""
        if position_ids is not None or cache is None or cache.get_seq_length() == 0:
            return original(inputs_shape, device, attention_mask=attention_mask, cache=cache, position_ids=position_ids)
        length = cache.get_seq_length() + inputs_shape[1] + module.padding_idx
        positions = torch.ones((1, 1), dtype=torch.long, device=device) * length
        return module._forward(positions), positions

    return forward


def _hide_unwritten_keys_of_streams(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, cache: Any = None, **kwargs: Any) -> Any:
        """ProphetNet's self-attention, [batch, 1 + streams, width] in a step, over the written part of the cache.

        A predicting stream's own key stands after the main stream's, so its place and distance are not the cache's.
        """
        if cache is None or kwargs.get("main_relative_position_buckets") is not None:
            return original(hidden_states, cache=cache, **kwargs)
        own = getattr(cache, "self_attention_cache", cache)
        layer, position, device = module.layer_idx, kwargs["position_ids"][0, 0], hidden_states.device
        length = own.get_seq_length(layer) + 1
        num_keys, _ = own.get_mask_sizes(1, layer)
        places = torch.arange(num_keys, device=device)

        def bucketed(distances: Any) -> Any:
            from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

            found = compute_relative_buckets(module.num_buckets, module.relative_max_distance, distances)
            return found.expand(len(hidden_states), 1, -1)

        bias = torch.where(places < length, 0.0, torch.finfo(hidden_states.dtype).min).to(hidden_states.dtype)
        of_own_key = torch.zeros(1, dtype=bias.dtype, device=device)
        distances = torch.cat([places - position, (length - position).reshape(1)])
        kwargs |= {
            "main_relative_position_buckets": bucketed(places + 1 - position),
            "predict_relative_position_buckets": bucketed(distances),
            "attention_mask": bias[None, None, None],
            "extended_predict_attention_mask": torch.cat([bias, of_own_key])[None, None, None, None],
        }
        return original(hidden_states, cache=cache, **kwargs)

    return forward


_NO_MASK = "its decoder gives no mask to a single token, which would see the unwritten end of a cache of fixed size"
_ROWS_MIX = (
    "in a decoding step RWKV adds its state, [batch, width], to tokens [batch, 1, width]: every row of a batch then reads all "
    "rows' states, and the last row's step is taken for all (transformers 5.23)"
)

_BACKENDS = ("jax", "torch_xla")

PATCHES: list[Patch] = [
    ForwardPatch(
        name="gpt-neo-positions",
        why="GPT-Neo cuts its table of causal order and windows at the number of keys, which in a cache of fixed size is not the "
        "text's length: windows then begin too late",
        classes=("GPTNeoSelfAttention",),
        make=_causal_by_position,
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="led-unwritten-keys",
        why=_NO_MASK,
        classes=("LEDDecoderLayer",),
        make=_hide_unwritten_keys("attention_mask", "cache", token_axis=1),
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="fsmt-unwritten-keys",
        why=_NO_MASK,
        classes=("transformers.models.fsmt.modeling_fsmt:DecoderLayer",),
        make=_hide_unwritten_keys("causal_mask", "layer_state", token_axis=0),
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="fsmt-positions",
        why="FSMT compares the traced length with its table of positions to make a longer one; generate() keeps to the table",
        classes=("transformers.models.fsmt.modeling_fsmt:SinusoidalPositionalEmbedding",),
        make=_positions_in_the_table,
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="prophetnet-positions",
        why="ProphetNet converts the length of its cache to a Python number",
        classes=("ProphetNetPositionalEmbeddings",),
        make=_positions_after_the_cache,
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="prophetnet-unwritten-keys",
        why="its decoder gives no masks to a single token, and places a predicting stream's key after all keys of the cache",
        classes=("ProphetNetNgramSelfAttention",),
        make=_hide_unwritten_keys_of_streams,
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="rwkv-rows-of-attention",
        why=_ROWS_MIX,
        classes=("RwkvSelfAttention",),
        method="extract_key_value",
        make=_mixed_attention_inputs,
        backends=_BACKENDS,
    ),
    ForwardPatch(
        name="rwkv-rows-of-feed-forward",
        why=_ROWS_MIX,
        classes=("RwkvFeedForward",),
        make=_mixed_feed_forward,
        backends=_BACKENDS,
    ),
]
