"""torch's attention operation, for modelling code that bypasses transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable

import jax

from hfax.kernels.attention import Dropout, attention, causal_positions
from hfax.patches.patch import OpPatch, Patch


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    next_key: Callable[[], jax.Array],
) -> jax.Array:
    """`torch.nn.functional.scaled_dot_product_attention`, [..., heads, length, dim]; fully masked rows are 0.

    `next_key` gives the PRNG key of a dropout.
    """
    lead = query.shape[:-3] if query.ndim >= 3 else ()
    four: list[jax.Array] = [a.reshape(-1, *((1,) * (3 - a.ndim) + a.shape)[-3:]) for a in (query, key, value)]
    mask = attn_mask
    if mask is None and is_causal:
        mask = causal_positions(query.shape[-2], key.shape[-2])
    if mask is not None and mask.ndim > 4:
        mask = mask.reshape(-1, *mask.shape[-3:])
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    dropout = Dropout(rate=dropout_p, key=next_key()) if dropout_p else None
    out, _ = attention(four[0], four[1], four[2], mask, scale=factor, dropout=dropout)
    out = out.swapaxes(1, 2)
    return out.reshape(*lead, *out.shape[1:]) if query.ndim >= 3 else out.reshape(out.shape[-2:])


PATCHES: list[Patch] = [
    OpPatch(
        name="scaled-dot-product-attention",
        why="torchax gives NaN for a row that may attend to nothing, and repeats the heads of grouped queries",
        ops=("torch.nn.functional.scaled_dot_product_attention", "aten.scaled_dot_product_attention"),
        lower=scaled_dot_product_attention,
        draws=True,
    ),
]
