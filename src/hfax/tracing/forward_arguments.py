"""Which keyword arguments a model's forward uses, so that a silently ignored name is an error.

Nearly every transformers forward ends in `**kwargs`, which are passed on to submodules, attention and the loss; a misspelt
`atention_mask` disappears in them. Known names are those in the signatures of the forward and of its submodels, in the typed dicts
it declares (`Unpack[TransformersKwargs]`), in its loss, and those that its source reads from `kwargs` by name. For every backend;
imports none.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import TransformersKwargs

from hfax.errors import InvalidInputError

_OF_DECORATORS = frozenset({"use_cache", "return_dict"})
"""Arguments consumed by transformers' decorators of forward (`can_return_tuple`, `merge_with_config_defaults`)."""
_OF_PROCESSORS = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of tokenizers and processors besides ids that most models ignore, in transformers too."""


def known_arguments(module: torch.nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names that forward takes, and the prefixes ("decoder_") that it strips when passing arguments to a submodule."""
    own = inspect.signature(module.forward).parameters.values()
    names = {p.name for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if all(p.kind is not p.VAR_KEYWORD for p in own):
        return frozenset(names), ()
    names |= _OF_DECORATORS | _OF_PROCESSORS | set(_keys(TransformersKwargs)) | set(_keys(FlashAttentionKwargs))
    beginnings: set[str] = set()
    parts = [m for m in module.modules() if m is module or isinstance(m, PreTrainedModel)]
    for part in parts:
        for parameter in inspect.signature(part.forward).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                names |= set(_declared(parameter.annotation))
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names.add(parameter.name)
    for place in {cls.__module__ for part in parts for cls in type(part).__mro__ if issubclass(cls, PreTrainedModel)}:
        taken, begun = _taken_by_source(place)
        names |= taken
        beginnings |= begun
    if callable(loss := getattr(module, "loss_function", None)):
        names |= {p.name for p in inspect.signature(loss).parameters.values() if p.kind is not p.VAR_KEYWORD}
    return frozenset(names - {"kwargs", "self"}), tuple(sorted(beginnings))


def is_known(name: str, known: tuple[frozenset[str], tuple[str, ...]]) -> bool:
    """Whether a forward uses an argument of that name, from its `known_arguments`."""
    names, beginnings = known
    return name in names or any(name.startswith(b) and name.removeprefix(b) in names for b in beginnings)


def reject_unknown(class_name: str, given: Iterable[str], known: tuple[frozenset[str], tuple[str, ...]]) -> None:
    """Raise for a keyword argument that forward does not use.

    Args:
        class_name: class name of the model.
        given: names of the arguments.
        known: the result of `known_arguments`.

    Raises:
        InvalidInputError: names the argument, with the nearest known name.
    """
    names, _ = known
    for name in given:
        if is_known(name, known):
            continue
        near = difflib.get_close_matches(name, sorted(names), n=1)
        raise InvalidInputError(
            f"{class_name} was called with {name!r}, which its forward does not take.",
            "It would be silently ignored.",
            f"Did you mean {near[0]!r}?" if near else f"Remove it; forward takes {', '.join(sorted(names))}.",
        )


def _declared(annotation: Any) -> Iterator[str]:
    """Keys of the typed dict in `**kwargs: Unpack[...]`."""
    if typing.get_origin(annotation) is typing.Unpack or getattr(annotation, "__origin__", None) is typing.Unpack:
        yield from _keys(typing.get_args(annotation)[0])


def _keys(typed_dict: Any) -> Iterator[str]:
    yield from getattr(typed_dict, "__annotations__", ())
    for base in getattr(typed_dict, "__orig_bases__", ()):
        yield from _keys(base)


@functools.lru_cache(maxsize=256)
def _taken_by_source(place: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a module's code reads from its `kwargs`, and the name prefixes it looks for."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[place]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return frozenset(), frozenset()
    names: set[str] = set()
    beginnings: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first = node.args[0] if node.args else None
            text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
            if text is not None and node.func.attr in ("get", "pop") and _is_kwargs(node.func.value):
                names.add(text)
            elif text is not None and node.func.attr == "startswith" and text.endswith("_"):
                beginnings.add(text)
        elif isinstance(node, ast.Subscript) and _is_kwargs(node.value) and isinstance(node.slice, ast.Constant):
            names.add(str(node.slice.value))
    return frozenset(names), frozenset(beginnings)


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and "kwargs" in node.id
