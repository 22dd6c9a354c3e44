"""A digest of modelling code that no installed version names: code that comes with a checkpoint, or the user's own.

Programs on disk are found by it, so an edited layer never runs as the program of the old one, whichever file it is in.
"""

from __future__ import annotations

import hashlib
import itertools
import marshal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_VERSIONED = frozenset({"transformers", "torch", "torchax", "jax", "jaxlib", "numpy", "hfax"})
"""Packages whose versions are in the keys of programs, or that compute nothing in a trace."""


def custom_code_digest(module: nn.Module) -> str:
    """A digest of the files of a model's own classes and of the modules that they reach; "" if all are transformers'.

    Files are followed through the names that modules hold, as far as those belong to the same package as a class of the model, or
    are not installed (a script, a folder on the path). A module without a file, such as a notebook, counts with its bytecode, and
    so does a class that its module does not hold. Of other installed packages, the version counts.
    """
    classes = {cls for part in module.modules() for cls in type(part).__mro__ if cls is not object}
    todo = [sys.modules[name] for name in {cls.__module__ for cls in classes} if name in sys.modules]
    own = {_package(one) for one in todo} - _VERSIONED - sys.stdlib_module_names
    loose = sorted((cls for cls in classes if _is_loose(cls)), key=lambda cls: cls.__qualname__)
    found: dict[str, ModuleType] = {}
    others: set[str] = set()
    while todo:
        one = todo.pop()
        if not _is_custom(one, own):
            others.add(_package(one))
        elif one.__name__ not in found:
            found[one.__name__] = one
            todo += _reached(one)
    if not found and not loose:
        return ""
    versions = [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in sorted(others - _VERSIONED)]
    digest = hashlib.sha256(repr(versions).encode())
    for code in itertools.chain.from_iterable(map(_codes, loose)):
        digest.update(marshal.dumps(code))
    for name in sorted(found):
        digest.update(name.encode())
        digest.update(_content(found[name]))
    return digest.hexdigest()


def _package(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def _is_custom(module: ModuleType, own: set[str]) -> bool:
    package = _package(module)
    if package in own:
        return True
    if package in _VERSIONED or package in sys.stdlib_module_names:
        return False
    path = getattr(module, "__file__", None)
    return path is not None and not any(Path(path).is_relative_to(folder) for folder in _INSTALLED)


_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib", "platstdlib"))


def _reached(module: ModuleType) -> list[ModuleType]:
    """Modules that a module's names belong to."""
    names = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in list(vars(module).values())
    }
    return [sys.modules[name] for name in names if isinstance(name, str) and name in sys.modules]


def _is_loose(cls: type) -> bool:
    """Whether a class is not what its module holds under its name, as one that `exec` made."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not cls and cls.__module__.partition(".")[0] not in _VERSIONED


def _content(module: ModuleType) -> bytes:
    try:
        return Path(module.__file__ or "").read_bytes()
    except OSError:
        values = [vars(module)[name] for name in sorted(vars(module))]
        return b"".join(marshal.dumps(code) for value in values for code in _codes(value, module.__name__))


def _codes(value: Any, module: str | None = None) -> Iterator[CodeType]:
    """The code of a function, or of the methods of a class: of any, or of one of this module."""
    value = getattr(value, "__func__", value)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        yield value.__code__
    elif isinstance(value, type) and module in (None, value.__module__):
        for name in sorted(vars(value)):
            if vars(value)[name] is not value:
                yield from _codes(vars(value)[name], value.__module__)
