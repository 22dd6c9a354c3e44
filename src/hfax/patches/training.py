"""Parts of models whose gradients are better written out than derived; only in programs through which gradients are taken.

Their classes and functions are copied from model to model, so they are known by their source, not by their names alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from hfax.kernels import target
from hfax.patches.patch import ForwardPatch, FunctionPatch, Patch


@functools.cache
def _body(function: Any) -> str:
    """A function's statements without its docstring and types; "" if nobody knows them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return ast.unparse(ast.Module(body=statements, type_ignores=[]))


def _is_copy(function: Any, of: Any) -> bool:
    """Whether both are known, and say the same."""
    return _body(function) == _body(of) != ""


def _is_llamas_norm(module: Any) -> bool:
    if not target.is_differentiated():
        return False
    from transformers.models.llama import modeling_llama  # only training pays for its import

    return _is_copy(type(module).forward, modeling_llama.LlamaRMSNorm.forward)


def _is_llamas_rotation(function: Any) -> bool:
    if not target.is_differentiated():
        return False
    from transformers.models.llama import modeling_llama

    return _is_copy(inspect.unwrap(function), inspect.unwrap(modeling_llama.apply_rotary_pos_emb))


def _rms_norm(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any) -> Any:
        weight = module.weight
        return torch.nn.functional.rms_norm(hidden_states, tuple(weight.shape), weight, module.variance_epsilon)

    return forward


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if q.shape[-1] % 2:
            return original(q, k, cos, sin, unsqueeze_dim)
        half = q.shape[-1] // 2
        cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return tuple((x.float() * cos + torch.roll(x.float(), half, dims=-1) * sin).to(x.dtype) for x in (q, k))

    return rotate


PATCHES: list[Patch] = [
    ForwardPatch(
        name="rms-norm-with-gradient",
        why="the gradient of its steps keeps float32 copies of every layer's input (docs/performance.md)",
        classes=(),
        make=_rms_norm,
        only_if=_is_llamas_norm,
    ),
    FunctionPatch(
        name="rotation-with-gradient",
        why="the gradient of halves that are swapped pads and adds, and rounds after every step (docs/performance.md)",
        target="*:apply_rotary_pos_emb",
        make=_rotation,
        only_if=_is_llamas_rotation,
    ),
]
