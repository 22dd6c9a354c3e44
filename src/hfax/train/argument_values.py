"""Checks the types and ranges of training options by their annotations, so that a bad value has a clear error of its own."""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from pathlib import Path
from typing import Any

from hfax.errors import InvalidInputError

_RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(
        ("warmup_steps", "learning_rate", "weight_decay", "dataloader_num_workers"), (0, math.inf, "at least 0")
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, math.nextafter(1, 0), "at least 0 and below 1")),
    "max_grad_norm": (math.nextafter(0, 1), math.inf, "above 0, or None for no clipping"),
    "neftune_noise_alpha": (math.nextafter(0, 1), math.inf, "above 0, or None for no noise"),
    "adam_epsilon": (math.nextafter(0, 1), math.inf, "above 0"),
    **dict.fromkeys(("warmup_ratio", "label_smoothing_factor"), (0, 1, "from 0 to 1")),
    "seed": (0, 2**32 - 1, "from 0 to 2**32 - 1"),
}
"""Smallest and largest value by name; other whole numbers are counts, of at least 1."""
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
    dict: "a mapping",
    tuple: "a tuple of names",
}


def check_values(arguments: Any) -> None:
    """Compare a dataclass's values with its annotations and with the ranges that its options have.

    Raises:
        InvalidInputError: names the first option with another type, an unknown word, or a value out of range.
    """
    for name, hint in typing.get_type_hints(type(arguments)).items():
        if name == "_" or name not in {field.name for field in dataclasses.fields(arguments)}:
            continue
        value = getattr(arguments, name)
        kinds = (
            typing.get_args(hint)
            if typing.get_origin(hint) is not typing.Literal and typing.get_args(hint)
            else (hint,)
        )
        _check_type(name, value, _flat(kinds))
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            _check_range(name, value)


def _check_type(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    if words:
        return  # checked by what reads them, which lists what exists
    if not any(_is(value, kind) for kind in kinds):
        wanted = " or ".join(dict.fromkeys(_WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds))
        raise InvalidInputError(
            f"{name}={value!r} is not {wanted}.",
            f"It is of type {type(value).__name__}.",
            f"Pass {wanted}.",
        )


def _check_range(name: str, value: Any) -> None:
    low, high, words = _RANGES.get(name, (1, math.inf, "at least 1"))
    if not low <= value <= high or math.isinf(value):
        raise InvalidInputError(
            f"{name}={value} is too {'small' if value < low else 'large'}."
            if not math.isnan(value)
            else f"{name} is not a number.",
            f"It must be {words}.",
            f"Pass another {name}.",
        )


def _flat(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Classes of a union, `dict[str, Any]` as `dict`."""
    found: list[Any] = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal or not typing.get_args(kind):
            found.append(kind)
        else:
            found.append(typing.get_origin(kind))
    return tuple(found)


def _is(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real)
    if kind is tuple:
        return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)
    return (kind is Path and hasattr(value, "__fspath__")) or isinstance(value, kind)
