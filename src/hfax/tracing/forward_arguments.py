"""Which keyword arguments a model's forward makes use of: so that a name that it would pass over in silence is an error.

Nearly every forward of transformers ends in `**kwargs`, which are handed down to parts, attention and the loss; a misspelt
`atention_mask` disappears in them. Known are the names in the signatures of the forward and of the models inside of it, in the
typed dicts that it declares (`Unpack[TransformersKwargs]`), in its loss, and those that its source takes out of `kwargs` by name.
For every backend; it imports none.
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
"""What transformers' decorators of forward take out of the arguments (`can_return_tuple`, `merge_with_config_defaults`)."""
_OF_PROCESSORS = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What tokenizers and processors write beside the ids for every model, and most models pass over, in transformers as well."""


def known_arguments(module: torch.nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names that forward takes, and the beginnings of names ("decoder_") that it hands to a part without them."""
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
    """Whether a forward makes use of an argument of that name, from its `known_arguments`."""
    names, beginnings = known
    return name in names or any(name.startswith(b) and name.removeprefix(b) in names for b in beginnings)


def reject_unknown(class_name: str, given: Iterable[str], known: tuple[frozenset[str], tuple[str, ...]]) -> None:
    """Raise for a keyword argument that forward makes no use of.

    Args:
        class_name: of the model.
        given: names.
        known: of `known_arguments`.

    Raises:
        InvalidInputError: naming it, with the nearest name that is known.
    """
    names, _ = known
    for name in given:
        if is_known(name, known):
            continue
        near = difflib.get_close_matches(name, sorted(names), n=1)
        raise InvalidInputError(
            f"{class_name} was called with {name!r}, which its forward does not take.",
            "It would be passed over, and the result would be as if it had not been given.",
            f"Did you mean {near[0]!r}?" if near else f"Leave it out; forward takes {', '.join(sorted(names))}.",
        )


def _declared(annotation: Any) -> Iterator[str]:
    """Keys of the typed dict in `**kwargs: Unpack[...]`."""
    if typing.get_origin(annotation) is typing.Unpack or getattr(annotation, "__origin__", None) is typing.Unpack:
        yield from _keys(typing.get_args(annotation)[0])


def _keys(typed_dict: Any) -> Iterator[str]:
    yield from getattr(typed_dict, "__annotations__", ())
    for base in getattr(typed_dict, "__orig_bases__", ()):
        yield from _keys(base)


@functools.cache
def _taken_by_source(place: str) -> tuple[frozenset[str], frozenset[str]]:
    """What a module's code reads of its `kwargs` by name, and the beginnings of names that it looks for."""
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
