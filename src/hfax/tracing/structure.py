"""The structure of a call's arguments and results: which leaves are arrays, and everything around them.

Splits nested Python values into a flat list of arrays and a `Structure` to rebuild them. A structure holds no array and can be
compared, hashed through its `repr`, and pickled, so it is part of a program's key and stored with it on disk. It knows
transformers' `ModelOutput` and cache classes, but not how arrays are made.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A placeholder for array number `index` of the flat list."""

    index: int


@dataclasses.dataclass(frozen=True)
class Static:
    """A value that is part of the program."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A container.

    Args:
        cls: class of the container, or its name, "module:class", in a structure that was pickled: reading that imports no class.
        keys: names of the children; None for lists and tuples.
        children: the contents.
    """

    cls: type | str
    keys: tuple[Any, ...] | None
    children: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return Node, (_name_of(self.cls), self.keys, self.children)

    def child(self, key: Any) -> Structure:
        """The child of this name.

        Raises:
            KeyError: there is none.
        """
        if self.keys is None or key not in self.keys:
            raise KeyError(key)
        return self.children[self.keys.index(key)]


def _name_of(cls: type | str) -> type | str:
    """The name of a class that is found by it; others, and those of Python itself, are pickled as they are."""
    if isinstance(cls, str) or cls.__module__ == "builtins":
        return cls
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{cls.__module__}:{cls.__qualname__}" if found is cls else cls


def class_of(node: Node) -> Any:
    """The class of a container."""
    if not isinstance(node.cls, str):
        return node.cls
    module, _, name = node.cls.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


Structure = Leaf | Static | Node


def is_array(value: Any) -> bool:
    """Whether a value is traced: a numpy, jax or torch array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    module = type(value).__module__
    return (
        hasattr(value, "shape")
        and hasattr(value, "dtype")
        and module.split(".")[0] in ("jax", "jaxlib", "torch", "torchax")
    )


def is_traced(value: Any) -> bool:
    """Whether a value is a JAX tracer, an array without values."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def is_of_jax(value: Any) -> bool:
    """Whether a value is a `jax.Array`, a tracer included."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def flatten(value: Any, is_leaf: Callable[[Any], bool] = is_array) -> tuple[list[Any], Structure]:
    """Split `value` into its arrays and its structure.

    Traverses lists, tuples (including named ones), mappings, `ModelOutput`s, dataclasses and transformers' cache objects;
    anything else is static.
    """
    arrays: list[Any] = []

    def visit(item: Any) -> Structure:
        if is_leaf(item):
            arrays.append(item)
            return Leaf(len(arrays) - 1)
        if is_model_output(item):
            names = tuple(field.name for field in dataclasses.fields(item))
            return Node(type(item), names, tuple(visit(getattr(item, n)) for n in names))
        if isinstance(item, Mapping):
            return Node(type(item), tuple(item), tuple(visit(v) for v in item.values()))
        if isinstance(item, (list, tuple)):
            return Node(type(item), None, tuple(visit(v) for v in item))
        if _is_state_object(item):
            names = tuple(vars(item))
            return Node(type(item), names, tuple(visit(vars(item)[n]) for n in names))
        return Static(item)

    return arrays, visit(value)


def has_torch(value: Any) -> bool:
    """Whether any array in nested arguments is a torch tensor."""
    arrays, _ = flatten(value)
    return any(type(a).__module__.split(".")[0] == "torch" for a in arrays)


def unflatten(structure: Structure, arrays: list[Any]) -> Any:
    """Rebuild a value from its arrays; the inverse of `flatten`."""
    if isinstance(structure, Leaf):
        return arrays[structure.index]
    if isinstance(structure, Static):
        return structure.value
    children: list[Any] = [unflatten(child, arrays) for child in structure.children]
    cls: Any = class_of(structure)
    keys = structure.keys
    if keys is None:
        is_named_tuple = hasattr(cls, "_fields")
        return cls(*children) if is_named_tuple else cls(children)
    items = dict(zip(keys, children, strict=True))
    if issubclass(cls, Mapping):
        is_output = dataclasses.is_dataclass(cls)
        return make_model_output(cls, items) if is_output else cls(items)  # pyright: ignore[reportCallIssue]
    instance = cls.__new__(cls)
    instance.__dict__.update(items)
    return instance


def is_model_output(item: Any) -> bool:
    """Whether a value is an instance of a transformers `ModelOutput` class."""
    return isinstance(item, Mapping) and dataclasses.is_dataclass(item)


def make_model_output(cls: Any, fields: Mapping[str, Any]) -> Any:
    """Build a `ModelOutput` from all its fields, including None.

    Bypasses the constructor, which inspects the first field to guess the argument form.
    """
    output = cls.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(output, name, value)
        if value is not None:
            OrderedDict.__setitem__(output, name, value)
    return output


def _is_state_object(item: Any) -> bool:
    """Caches and their layers, and plain dataclass results that are not mappings."""
    if isinstance(item, (type, enum.Enum)):
        return False
    if dataclasses.is_dataclass(item):
        return not dataclasses.fields(item) or not type(item).__dataclass_params__.frozen  # type: ignore[attr-defined]
    names = {cls.__name__ for cls in type(item).__mro__}
    return bool(
        names & {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "EncoderDecoderCache", "DummyLayer"}
    )
