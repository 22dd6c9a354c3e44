"""Norms and rotary embeddings, with custom gradients if differentiated, and as a single call on CPU.

Their classes and functions are copied from model to model, so they are identified by their source and that of everything they call
(`patches/copies.py`), not only by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfax.kernels import norms, target
from hfax.kernels.cpu import library
from hfax.patches import copies
from hfax.patches.patch import ForwardPatch, FunctionPatch, OpPatch, Patch


def _is_worth_it(_: Any) -> bool:
    return target.is_differentiated() or library.may_be_called()


def _is_one_call_possible(_: Any) -> bool:
    return library.may_be_called()


def _why_not_llamas_norm(module: Any) -> str | None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # imported only for programs that need it

    kind = type(module)
    name = copies.difference(kind.forward, LlamaRMSNorm.forward, owner=kind, reference_owner=LlamaRMSNorm)
    return None if name is None else f"{name} of {kind.__name__} differs from Llama's"


def _why_not_gemmas_norm(module: Any) -> str | None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    kind = type(module)
    name = copies.difference(kind.forward, GemmaRMSNorm.forward, owner=kind, reference_owner=GemmaRMSNorm)
    return None if name is None else f"{name} of {kind.__name__} differs from Gemma's"


def _why_not_llamas_rotation(function: Any) -> str | None:
    from transformers.models.llama import modeling_llama

    name = copies.difference(function, modeling_llama.apply_rotary_pos_emb)
    return None if name is None else f"{name} differs from Llama's"


def _llamas_norm(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any) -> Any:
        weight = module.weight
        is_one_call = hidden_states.dtype == weight.dtype and norms.is_one_call(hidden_states.shape, multiple=16)
        if not is_one_call and not target.is_differentiated():
            return original(hidden_states)
        return torch.nn.functional.rms_norm(hidden_states, tuple(weight.shape), weight, module.variance_epsilon)

    return forward


def _gemmas_norm(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Any) -> Any:
        if not norms.is_one_call(x.shape, multiple=16):
            return original(x)
        weight = 1.0 + module.weight.float()
        return torch.nn.functional.rms_norm(x, tuple(weight.shape), weight, module.eps).type_as(x)

    return forward


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        is_one_call = all(norms.is_one_call(x.shape, multiple=2) for x in (q, k))
        if q.shape[-1] % 2 or not (is_one_call or target.is_differentiated()):
            return original(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(torch.ops.hfax.rotate(x, cos, sin) for x in (q, k))

    return rotate


@torch.library.custom_op("hfax::rotate", mutates_args=())
def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's rotary embedding of one tensor; traces replace it by `hfax.kernels.norms.rotate`."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


PATCHES: list[Patch] = [
    OpPatch(
        name="rotate",
        why="the operation that the patched rotary embeddings call",
        ops=("torch.ops.hfax.rotate",),
        lower=norms.rotate,
    ),
    ForwardPatch(
        name="llama-norm",
        why="one call on CPU instead of four, whatever the number of rows; the gradient of its steps keeps float32 copies",
        classes=(),
        make=_llamas_norm,
        only_if=_is_worth_it,
        why_not=_why_not_llamas_norm,
        candidates="*RMSNorm",
    ),
    ForwardPatch(
        name="gemma-norm",
        why="one call on CPU instead of four, whatever the number of rows (docs/performance.md)",
        classes=(),
        make=_gemmas_norm,
        only_if=_is_one_call_possible,
        why_not=_why_not_gemmas_norm,
        candidates="*RMSNorm",
    ),
    FunctionPatch(
        name="llama-rotation",
        why="one call on CPU instead of several, whatever the number of rows; the gradient of swapped halves pads and adds",
        target="*:apply_rotary_pos_emb",
        make=_rotation,
        only_if=_is_worth_it,
        why_not=_why_not_llamas_rotation,
    ),
]
