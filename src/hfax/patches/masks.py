"""Attention masks built from positions and padding, without reading values.

Replaces transformers' mask functions inside a trace, for any attention implementation: theirs skip the mask if its values allow it,
and support neither ring caches nor prompt padding in models that get no mask in decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import masking_utils

from hfax.patches.patch import FunctionPatch, Patch

_local = threading.local()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """Segments of packed tokens.

    Args:
        ids: number of each token's segment, [tokens] int. The tokens of a segment follow each other.
        longest: tokens that a segment has at most.
    """

    ids: Any
    longest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskStructure:
    """What is known about a mask besides its values, so that attention can do without them.

    Args:
        is_causal: the mask is causal, within `window` and `padding`, and nothing else.
        window: tokens that each query sees, itself included; None: all before it. Only if `is_causal`.
        padding: [batch, length], nonzero for real tokens; None: no padding. Only if `is_causal`.
        block: a function from query and key indices to their part of the mask, for blockwise attention; None: there is none.
        segments: each token attends to those of its own segment, and nothing else; None: otherwise.
        seen: the mask of truth values that an additive one was made from; None: it is one itself.
        all_real: a traced scalar: no token is padding, where transformers would then skip the mask; None: it never would.
    """

    is_causal: bool = False
    window: int | None = None
    padding: Any = None
    block: Callable[[Any, Any], Any] | None = None
    segments: Segments | None = None
    seen: Any = None
    all_real: Any = None


_UNKNOWN = MaskStructure()


class AttentionName(str):
    """The name of an attention function of hfax's, equal to transformers' name of the kind that it implements.

    Some modelling code looks at the name to choose what it passes: with "sdpa" and "eager" the keys selected by a sparse layer are
    part of the mask, else they are an argument for a kernel (DeepSeek-V3.2, MiniMax-M3). Interfaces find the function by its own
    name, which alone makes the hash.

    Args:
        name: the function's own name in transformers' interfaces.
        kind: "sdpa" for masks of truth values, "eager" for additive ones.
    """

    kind: str

    def __new__(cls, name: str, kind: str) -> AttentionName:
        made = super().__new__(cls, name)
        made.kind = kind
        return made

    def __reduce__(self) -> tuple[type[AttentionName], tuple[str, str]]:
        return AttentionName, (str(self), self.kind)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.kind

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


ATTENTION_NAME = AttentionName("hfax", "sdpa")
"""The name of hfax's functions for JAX in transformers' attention, mask and experts interfaces."""
ADDITIVE_NAME = AttentionName("hfax_additive", "eager")
"""The same attention with additive masks of 0 and minus infinity, for modelling code that extends masks with floats."""
PACKED_NAME = "hfax_flash_packed"
"""The same attention within the segments of packed images."""


def structure_of(mask: Any) -> MaskStructure:
    """The structure of a mask made by `attention_mask`; nothing is known about any other mask, or about None."""
    return getattr(mask, "mask_structure", None) or _UNKNOWN


@contextlib.contextmanager
def decoder_padding(attention_mask: Any | None) -> Iterator[None]:
    """Within the block, masks built without an `attention_mask` exclude the keys where this one, [batch, capacity], is 0.

    For models with recurrent layers: given a mask longer than the tokens of a step, some apply its last columns to the step, though
    they belong to other positions.
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

    `kv_offset` may be a vector over the keys, for a cache with slots that are not in position order. `structure_of` the result
    tells what is known about it.

    Where transformers would skip a causal mask if no token is padding, that condition is part of the structure: modules with
    `is_causal=False` then attend to everything, as in transformers (PaliGemma without token types).
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
    window = _OTHER if is_ring else _causal_window(mask_function)
    mask.mask_structure = MaskStructure(
        is_causal=window is not _OTHER,
        window=None if window is _OTHER else window,
        padding=None if window is _OTHER else attention_mask,
        block=None if is_ring else lambda queries, keys: seen(queries + q_offset, keys + kv_offset),
        all_real=(attention_mask != 0).all() if is_skipped else None,
    )
    return mask


_OTHER: Any = object()


def _causal_window(mask_function: Callable[..., Any]) -> Any:
    """The window of a causal mask, None for full causal attention; `_OTHER` for any other mask.

    transformers composes masks from functions; these two are recognised by their components.
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
    """The qualified name of a function in transformers' masking code; "" for other functions."""
    code = getattr(function, "__code__", None)
    return code.co_qualname if code is not None and code.co_filename == masking_utils.__file__ else ""


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0


def _real_keys(padding: Any, keys: Any) -> Any:
    """[batch, 1, 1, keys] bool: whether `padding`, [batch, length], is nonzero at the position of each key."""
    length = padding.shape[-1]
    picked = (padding != 0)[:, keys.clamp(0, length - 1)]
    return (picked & ((keys >= 0) & (keys < length))[None])[:, None, None, :]


def additive_mask(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """`attention_mask` in additive form, for eager attention: 0 for visible keys and the dtype's lowest value elsewhere.

    A causal mask is never skipped, since eager attention is not causal otherwise.
    """
    mask = attention_mask(dtype=dtype, **{**kwargs, "allow_is_causal_skip": False})
    if mask is None:
        return None
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    added: Any = torch.where(mask, torch.zeros_like(lowest), lowest)
    # valid as long as nothing else is added; a block would be one of truth values
    added.mask_structure = dataclasses.replace(structure_of(mask), block=None, seen=mask, all_real=None)
    return added


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(interface: Any, name: str) -> Any:
        if name == "sdpa":
            return attention_mask
        return additive_mask if name == "eager" else original(interface, name)

    return get


def _make_block_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad(block_sequence_ids: Any, attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
        if isinstance(kv_offset, torch.Tensor):  # a ring cache, in decoding: generated tokens belong to no block
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
