"""Sliding windows with global tokens, as Longformer and LED have them, as attention under one mask.

Modelling code counts the global tokens of each row to make tensors of that size. The same scores are those of a dense mask: a query
attends to the keys in its window and to the global keys; a global query attends to all keys, with projections of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfax.errors import UnsupportedOptionError
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
        places = torch.arange(length, device=hidden_states.device)
        distance = (places[:, None] - places).abs()
        is_near = (distance <= module.one_sided_attn_window_size) & ~is_index_masked[:, None]
        # padding attends to itself alone, so that no row of the softmax is empty; its context is zero in the end
        mask = is_near | is_index_global_attn[:, None] | (distance == 0)

        def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
            split = (
                p(hidden_states).view(rows, length, module.num_heads, module.head_dim).transpose(1, 2)
                for p in (query, key, value)
            )
            dropout = module.dropout if module.training else 0.0
            found = torch.nn.functional.scaled_dot_product_attention(*split, attn_mask=mask, dropout_p=dropout)
            return found.transpose(1, 2).reshape(rows, length, width)

        context = attend(module.query, module.key, module.value, mask[:, None])
        context = context.masked_fill(is_index_masked[..., None], 0.0)
        if is_global_attn:
            lowest = torch.finfo(hidden_states.dtype).min  # not infinite: all tokens of a row may be padding
            bias = is_index_masked[:, None, None].to(hidden_states.dtype) * lowest
            to_all = attend(module.query_global, module.key_global, module.value_global, bias)
            context = torch.where(is_index_global_attn[..., None], to_all, context)
        return (context,)

    return forward


def _first_separator(original: Callable[..., Any]) -> Callable[..., Any]:
    from hfax.patches.control_flow import note_check

    def question_end(input_ids: Any, sep_token_id: int) -> Any:
        """The place of each row's first separator, [batch] int64."""
        is_separator = input_ids == sep_token_id
        note_check(is_separator.sum(1) == 3, "a row has not exactly three separator tokens; pass global_attention_mask")
        return is_separator.long().argmax(1)

    return question_end


PATCHES: list[Patch] = [
    ForwardPatch(
        backends=("jax", "torch_xla"),
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
