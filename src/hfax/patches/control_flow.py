"""Python code of transformers and torch that looks at values, replaced by code that does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.patches.patch import ForwardPatch, FunctionPatch, OpPatch, Patch


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _prophetnet_positions(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        inputs_shape: Any,
        device: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Any = None,
    ) -> Any:
        length = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None and isinstance(length, torch.Tensor):
            position_ids = torch.ones((1, 1), dtype=torch.long, device=device) * (
                module.padding_idx + inputs_shape[1] + length
            )
            return torch.nn.functional.embedding(position_ids, module.weight), position_ids
        return original(inputs_shape, device, attention_mask, past_key_values, position_ids)

    return forward


def _lengths_on_host(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        given: Any = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        rows, length = given.shape[:2]
        if kwargs.get("lengths") is None:
            if attention_mask is None and input_ids is not None:
                count = (input_ids != module.pad_index).sum(dim=1)
                attention_mask = torch.arange(length, device=input_ids.device)[None] < count[:, None]
            kwargs["lengths"] = torch.full((rows,), length)
        return original(input_ids, attention_mask, *args, **kwargs)

    return forward


_local = threading.local()


def _any(x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    if dim is None and getattr(_local, "any_is_true", False):
        with jax.ensure_compile_time_eval():
            return jnp.asarray(True)
    return jnp.any(x, axis=dim, keepdims=keepdim)


def _any_is_true(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, _local.any_is_true = getattr(_local, "any_is_true", False), True
        try:
            return original(*args, **kwargs)
        finally:
            _local.any_is_true = before

    return forward


PATCHES: list[Patch] = [
    OpPatch(
        name="any",
        why="for models that ask `if mask.any()` only to save work: see any-is-true",
        ops=("torch.any", "torch.Tensor.any", "aten.any", "aten.any.default", "aten.any.dim"),
        lower=_any,
    ),
    ForwardPatch(
        name="any-is-true",
        why="the model asks `if mask.any()` of a traced mask, and does nothing for a mask that is all false",
        classes=("Ovis2Model", "FSMTModel"),
        make=_any_is_true,
    ),
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
    *(
        FunctionPatch(
            name=f"{name}-static-table",
            why="the model compares the traced length with its table of positions, unless it believes to be compiled by torch",
            target=f"transformers.models.{name}.modeling_{name}:is_torchdynamo_compiling",
            make=lambda original: lambda: True,
            model_types=(name, name.replace("_", "-")),
        )
        for name in ("xglm", "nllb_moe", "m2m_100", "seamless_m4t", "seamless_m4t_v2")
    ),
    ForwardPatch(
        name="lengths-on-the-host",
        why="XLM and Flaubert assert that the longest length, computed from the traced ids, fits (`item`)",
        classes=("XLMModel", "FlaubertModel"),
        make=_lengths_on_host,
    ),
    ForwardPatch(
        name="prophetnet-positions",
        why="ProphetNet's table of positions turns the traced length into a Python int",
        classes=("ProphetNetPositionalEmbeddings",),
        make=_prophetnet_positions,
    ),
]
