"""Key selection of sparse attention for all queries at once, where modelling code loops over queries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from hfax.patches.patch import ForwardPatch, Patch


def _pooled_blocks(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any) -> Any:
        """Which keys each query attends to, [batch, 1, queries, keys] bool.

        The visible keys of a query form consecutive blocks of `compress_ratio`; the query attends to its best complete blocks and
        to the remaining keys after them. The visible keys of a query are a prefix of those of the last query, so all queries share
        the same blocks.
        """
        apply_rotary = sys.modules[type(module).__module__].apply_rotary_pos_emb
        batch, num_queries, _ = hidden_states.shape
        ratio, dim = module.compress_ratio, module.index_head_dim
        cos, sin = position_embeddings
        both = module.index_qk_proj(hidden_states)
        split = [module.index_n_heads * dim, module.index_kv_heads * dim]
        queries, keys = (part.reshape(batch, num_queries, -1, dim) for part in torch.split(both, split, dim=-1))
        queries = apply_rotary(
            module.q_layernorm(queries), cos=cos[:, -num_queries:], sin=sin[:, -num_queries:], unsqueeze_dim=2
        )
        keys = keys.squeeze(2)
        if cache is not None:
            keys = cache.update_indexer(keys, module.layer_idx)

        visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        if keys.shape[1] < ratio:  # no complete block
            return visible.unsqueeze(1)
        is_real = visible.long().sum(1) > 0
        rank = is_real.long().cumsum(-1) - 1
        num_blocks = keys.shape[1] // ratio
        order = torch.argsort((~is_real).int(), dim=-1, stable=True)[:, : num_blocks * ratio]
        pooled = keys.gather(1, order[..., None].expand(-1, -1, dim)).reshape(batch, num_blocks, ratio, dim)
        pooled = module.k_layernorm(pooled.float().mean(dim=2).to(keys.dtype))
        first = order.reshape(batch, num_blocks, ratio)[..., :1]
        at_first = {n: t.gather(1, first.expand(-1, -1, t.shape[-1])) for n, t in (("cos", cos), ("sin", sin))}
        pooled = apply_rotary(pooled.unsqueeze(2), **at_first, unsqueeze_dim=2).squeeze(2)

        scores = torch.einsum("bqhd,bnd->bqnh", queries.float(), pooled.float())
        scores = torch.relu(scores).sum(-1) / math.sqrt(dim)
        num_whole = visible.long().sum(-1, keepdim=True) // ratio
        is_whole = torch.arange(num_blocks, device=keys.device) < num_whole
        best = scores.masked_fill(~is_whole, -1.0).topk(min(module.block_topk, num_blocks), dim=-1).indices
        chosen = torch.zeros_like(is_whole).scatter(-1, best, True) & is_whole

        block = (rank // ratio).clamp(0, num_blocks - 1)[:, None].expand(-1, num_queries, -1)
        is_rest = rank[:, None] >= num_whole * ratio
        return (visible & (is_rest | chosen.gather(-1, block))).unsqueeze(1)

    return forward


PATCHES: list[Patch] = [
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="blocks-of-keys-at-once",
        why="Qwen4-Exp's indexer looks for the visible keys of one query after the other (`nonzero`)",
        classes=("transformers.models.qwen4_exp.modeling_qwen4_exp:Qwen4ExpTextQSAIndexer",),
        make=_pooled_blocks,
    ),
]
