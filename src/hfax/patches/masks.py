"""Attention masks built from positions and padding; values are never looked at.

Stands for transformers' mask functions inside a trace, whichever attention a model uses: theirs skip the mask when its values allow
it, and know neither a cache's ring of slots nor the padding of prompts in a model that gets no mask in decoding.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import masking_utils

from hfax.patches.patch import FunctionPatch, Patch

_local = threading.local()


@contextlib.contextmanager
def decoder_padding(attention_mask: Any | None) -> Iterator[None]:
    """Within the block, masks made without an `attention_mask` leave out the keys where this one, [batch, capacity], is 0.

    For models with recurrent layers: given a mask longer than the tokens of a step, some apply its last columns to the step, which
    are not the step's.
    """
    previous = getattr(_local, "padding", None)
    _local.padding = attention_mask
    try:
        yield
    finally:
        _local.padding = previous


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Any:
    """transformers' mask interface: bool, [batch, 1, queries, keys].

    `kv_offset` may be a vector over the keys, for a cache whose slots are not in the order of their positions. The result has the
    mask of any block of queries and keys as `block`, a function of their indices, for attention that works in blocks.

    Where transformers would leave out a causal mask if no token were padding, the result has that condition, a traced scalar, as
    `all_real`: the attention of modules that are not causal by themselves then sees everything, as there (PaliGemma without token
    types).
    """
    is_ring = isinstance(kv_offset, torch.Tensor) and kv_offset.ndim == 1
    if attention_mask is None:
        attention_mask = getattr(_local, "padding", None)
    if attention_mask is None and allow_is_bidirectional_skip and not is_ring:
        return None
    is_skipped = allow_is_causal_skip and not is_ring and _is_zero(q_offset) and q_length == kv_length
    is_skipped = is_skipped and (local_size is None or kv_length < local_size)
    if attention_mask is None and is_skipped:
        return None
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=device) + kv_offset
    batch = torch.arange(batch_size, device=device)
    heads = torch.arange(1, device=device)

    def seen(queries: Any, keys: Any) -> Any:
        mask = mask_function(
            batch[:, None, None, None],
            heads[None, :, None, None],
            queries[None, None, :, None],
            keys[None, None, None, :],
        )
        mask = mask.expand(batch_size, -1, queries.shape[0], keys.shape[0])
        if attention_mask is not None:
            mask = mask & _real_keys(attention_mask, keys)
        return mask & (keys >= 0)[None, None, None, :] if is_ring else mask

    mask = seen(queries, keys)
    if is_skipped:
        mask.all_real = (attention_mask != 0).all()
    if not is_ring and (window := _causal_window(mask_function)) is not _OTHER:
        mask.causal = window, attention_mask
    if not is_ring:
        mask.block = lambda queries, keys: seen(queries + q_offset, keys + kv_offset)
    return mask


_OTHER: Any = object()


def _causal_window(mask_function: Callable[..., Any]) -> Any:
    """How many tokens a causal mask lets each see, None for all before it; `_OTHER` for any other mask.

    transformers builds masks by putting functions together; these two are recognised by what they are put together from.
    """
    if mask_function is masking_utils.causal_mask_function:
        return None
    if _place(mask_function) != "and_masks.<locals>.and_mask":
        return _OTHER
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return _OTHER
    if _place(parts[0]) != "sliding_window_overlay.<locals>.inner_mask":
        return _OTHER
    return inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]


def _place(function: Any) -> str:
    """Where transformers' masking code defines a function; "" for those of others."""
    code = getattr(function, "__code__", None)
    return code.co_qualname if code is not None and code.co_filename == masking_utils.__file__ else ""


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0


def _real_keys(padding: Any, keys: Any) -> Any:
    """[batch, 1, 1, keys] bool: the key's position is inside of `padding`, [batch, length], which is nonzero there."""
    length = padding.shape[-1]
    picked = (padding != 0)[:, keys.clamp(0, length - 1)]
    return (picked & ((keys >= 0) & (keys < length))[None])[:, None, None, :]


def chosen_keys(indices: Any, mask: Any, num_keys: int) -> Any:
    """A mask, [batch, 1, queries, keys], narrowed to the keys that `indices`, [batch, queries, n], name."""
    chosen = torch.zeros((*indices.shape[:2], num_keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def additive_mask(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """The same as 0 where a query may look and the dtype's lowest number elsewhere, which eager attention adds.

    A causal mask is never left out: eager attention has no other way to know of it.
    """
    mask = attention_mask(dtype=dtype, **{**kwargs, "allow_is_causal_skip": False})
    if mask is None:
        return None
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    added: Any = torch.where(mask, torch.zeros_like(lowest), lowest)
    if hasattr(mask, "causal"):  # what it says, as long as nobody adds anything else
        added.causal = mask.causal
    return added


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(interface: Any, name: str) -> Any:
        if name == "sdpa":
            return attention_mask
        return additive_mask if name == "eager" else original(interface, name)

    return get


def _make_block_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad(block_sequence_ids: Any, attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
        if isinstance(kv_offset, torch.Tensor):  # a cache's ring, in decoding: what is written belongs to no block
            return torch.full_like(block_sequence_ids, -1)
        return original(block_sequence_ids, attention_mask, kv_length, kv_offset)

    return pad


def _make_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    def find(position_ids: Any) -> Any:
        found: Any = original(position_ids)
        if found is None or getattr(found, "host", None) is None:
            return found
        return None if bool((found[:, -1] == 0).all()) else found

    return find


PATCHES: list[Patch] = [
    FunctionPatch(
        backends=("jax", "torch_xla"),
        name="packed-only-where-positions-say-so",
        why="a trace takes every text for several packed ones, also where the positions are known and say otherwise",
        target="transformers.masking_utils:find_packed_sequence_indices",
        make=_make_packed,
    ),
    FunctionPatch(
        backends=("jax", "torch_xla"),
        name="blocks-beside-a-ring",
        why="transformers pads the blocks of image tokens to the cache's length plus its offset, which is a vector for a ring",
        target="transformers.masking_utils:maybe_pad_block_sequence_ids",
        make=_make_block_padding,
    ),
    FunctionPatch(
        backends=("jax", "torch_xla"),
        name="masks-from-positions",
        why="transformers' sdpa and eager masks look at values to skip themselves, and do not know the slots of hfax's cache: "
        "hybrid models would attend to padding in decoding",
        target="transformers.masking_utils:AttentionMaskInterface.__getitem__",
        make=_make,
    ),
]
