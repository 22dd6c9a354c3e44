"""Sliding windows with global tokens, as Longformer and LED have them, as attention under one mask.

Modelling code counts the global tokens of each row to make tensors of that size. The same scores are those of a dense mask: a query
attends to the keys in its window and to the global keys; a global query attends to all keys, with projections of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfax.errors import UnsupportedOptionError
from hfax.patches.control_flow import note_check
from hfax.patches.masks import ATTENTION_NAME, MaskStructure
from hfax.patches.patch import ForwardPatch, FunctionPatch, Patch


def _attention_under_a_mask(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        hidden_states: Any,
        attention_mask: Any = None,
        is_index_masked: Any = None,
        is_index_global_attn: Any = None,
        is_global_attn: Any = None,
        output_attentions: bool = False,
    ) -> tuple[Any]:
        """The context of each token, [batch, length, width]; arguments as in the original, masks are [batch, length]."""
        if output_attentions:
            raise UnsupportedOptionError(
                f"{type(module).__name__} has no attention weights in a compiled program (output_attentions=True).",
                "The shape of its weights depends on how many tokens have global attention, which a program cannot know.",
                "Call the model without output_attentions, or run plain transformers.",
            )
        rows, length, width = hidden_states.shape
        attention = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
        places = torch.arange(length, device=hidden_states.device)

        # Padding attends to itself at least, so that no row of the softmax is empty; its context is zero in the end.
        def in_windows(queries: Any, keys: Any) -> Any:
            distance = (queries[:, None] - keys).abs()
            is_near = (distance <= module.one_sided_attn_window_size) & ~is_index_masked[:, keys][:, None]
            return (is_near | is_index_global_attn[:, keys][:, None] | (distance == 0))[:, None]

        def everywhere(queries: Any, keys: Any) -> Any:
            return (~is_index_masked[:, keys][:, None] | (queries[:, None] == keys))[:, None]

        def attend(query: Any, key: Any, value: Any, seen: Callable[[Any, Any], Any]) -> Any:
            split = (
                p(hidden_states).view(rows, length, module.num_heads, module.head_dim).transpose(1, 2)
                for p in (query, key, value)
            )
            mask = seen(places, places)
            mask.mask_structure = MaskStructure(
                block=seen
            )  # of long texts, blocks in which nothing is seen are skipped
            dropout = module.dropout if module.training else 0.0
            found, _ = attention(module, *split, mask, dropout=dropout, is_causal=False)
            return found.reshape(rows, length, width)

        context = attend(module.query, module.key, module.value, in_windows)
        context = context.masked_fill(is_index_masked[..., None], 0.0)
        if is_global_attn:
            to_all = attend(module.query_global, module.key_global, module.value_global, everywhere)
            context = torch.where(is_index_global_attn[..., None], to_all, context)
        return (context,)

    return forward


def _first_separator(original: Callable[..., Any]) -> Callable[..., Any]:
    def question_end(input_ids: Any, sep_token_id: int) -> Any:
        """The place of each row's first separator, [batch] int64."""
        is_separator = input_ids == sep_token_id
        note_check(is_separator.sum(1) == 3, "a row has not exactly three separator tokens; pass global_attention_mask")
        return is_separator.long().argmax(1)

    return question_end


PATCHES: list[Patch] = [
    ForwardPatch(
        name="windows-with-global-tokens",
        why="Longformer and LED make tensors whose sizes are the numbers of global tokens (`nonzero`, `max`)",
        classes=("LongformerSelfAttention", "LEDEncoderSelfAttention"),
        make=_attention_under_a_mask,
    ),
    FunctionPatch(
        name="longformer-question-end",
        why="Longformer looks for the separators of a question by their places (`nonzero`)",
        target="transformers.models.longformer.modeling_longformer:_get_question_end_index",
        make=_first_separator,
        model_types=("longformer",),
    ),
]
