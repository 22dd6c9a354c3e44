"""Patches of transformers and torch for torch_xla, besides the masks and experts shared by all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfax.patches.patch import FunctionPatch, Patch


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, [..., heads, length, dim], fully masked rows are 0.

    Heads of keys and values are not repeated: queries that share a head are batched in its products. Accumulates in float32.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 3 and query.shape[-3] != key.shape[-3] else 1
    if attn_mask is None and is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones((rows, columns), dtype=torch.bool, device=query.device).tril()
    shape = query.shape
    if groups > 1:
        query = query.reshape(*shape[:-3], key.shape[-3], groups * shape[-2], shape[-1])
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * factor
    if attn_mask is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        wide = scores.reshape(*shape[:-1], key.shape[-2])
        probabilities = masked_softmax(wide, attn_mask).reshape(scores.shape)
    out = torch.matmul(probabilities.to(value.dtype), value)
    return out.reshape(*shape[:-1], value.shape[-1])


def masked_softmax(scores: Any, mask: Any) -> Any:
    """The softmax of float32 scores over the last axis, under a mask of truth values or an additive one; 0 where all is masked."""
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    else:
        scores = scores + mask.float()
    seen = (scores > float("-inf")).any(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~seen, 0.0), dim=-1).masked_fill(~seen, 0.0)


def _make_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    return attention


def _make_tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor=None: True


PATCHES: list[Patch] = [
    FunctionPatch(
        name="attention-with-zero-rows",
        why="torch's attention on XLA gives NaN for a row that may attend to nothing, and repeats the heads of grouped queries",
        target="torch.nn.functional:scaled_dot_product_attention",
        make=_make_attention,
        backends=("torch_xla",),
    ),
    FunctionPatch(
        name="masks-without-host-reads",
        why="mask code that looks at values runs what is pending, and compiles another program for each answer",
        target="transformers.masking_utils:is_tracing",
        make=_make_tracing,
        backends=("torch_xla",),
    ),
]
