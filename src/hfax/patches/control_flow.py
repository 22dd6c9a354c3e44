"""Python code of transformers and torch that looks at values, replaced by code that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfax.patches.patch import ForwardPatch, FunctionPatch, Patch


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _prophetnet_positions(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        inputs_shape: Any, device: Any, attention_mask: Any = None, past_key_values: Any = None, position_ids: Any = None
    ) -> Any:
        length = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None and isinstance(length, torch.Tensor):
            position_ids = torch.ones((1, 1), dtype=torch.long, device=device) * (module.padding_idx + inputs_shape[1] + length)
            return torch.nn.functional.embedding(position_ids, module.weight), position_ids
        return original(inputs_shape, device, attention_mask, past_key_values, position_ids)

    return forward


PATCHES: list[Patch] = [
    FunctionPatch(
        name="no-value-checks-with",
        why="`aten::_is_all_true` has no lowering: transformers' checks read values, which a trace does not have",
        target="torch:_check_tensor_all_with",
        make=_skip,
    ),
    FunctionPatch(
        name="no-value-checks",
        why="the same check, in the form that transformers uses when it knows that it is traced",
        target="torch:_check_tensor_all",
        make=_skip,
    ),
    FunctionPatch(
        name="xglm-static-table",
        why="XGLM compares the traced length with its table of positions, unless it believes to be compiled by torch",
        target="transformers.models.xglm.modeling_xglm:is_torchdynamo_compiling",
        make=lambda original: lambda: True,
        model_types=("xglm",),
    ),
    ForwardPatch(
        name="prophetnet-positions",
        why="ProphetNet's table of positions turns the traced length into a Python int",
        classes=("ProphetNetPositionalEmbeddings",),
        make=_prophetnet_positions,
    ),
]
