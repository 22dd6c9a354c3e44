"""Replacements of functions inside transformers, in force only in the thread that traces and only while it does.

Each `Replacement` says what it removes. `patched_transformers()` installs them all, and undoes them at its end; while they are
installed, other threads still get the original functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_local = threading.local()
_lock = threading.Lock()
_installed = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """One function of a module, and what stands for it inside a trace.

    Args:
        module: where the function is looked up, dotted.
        name: its name there.
        why: the error or wrong result that it removes.
        make: gets the original, returns the replacement.
    """

    module: str
    name: str
    why: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


REPLACEMENTS: list[Replacement] = [
    Replacement(
        module="torch",
        name="_check_tensor_all_with",
        why="`aten::_is_all_true` has no lowering: transformers' checks read values, which a trace does not have",
        make=_skip,
    ),
    Replacement(
        module="torch",
        name="_check_tensor_all",
        why="the same check, in the form that transformers uses when it knows that it is traced",
        make=_skip,
    ),
]


@contextlib.contextmanager
def patched_transformers() -> Iterator[None]:
    """Put every replacement in force for this thread until the block ends."""
    global _installed
    with _lock:
        if _installed == 0:
            _originals.extend(_install(r) for r in REPLACEMENTS)
        _installed += 1
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1
        with _lock:
            _installed -= 1
            if _installed == 0:
                while _originals:
                    module, name, original = _originals.pop()
                    setattr(module, name, original)


_originals: list[tuple[Any, str, Any]] = []


def _install(replacement: Replacement) -> tuple[Any, str, Any]:
    module = importlib.import_module(replacement.module)
    original = getattr(module, replacement.name)
    inside = replacement.make(original)

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (inside if getattr(_local, "depth", 0) else original)(*args, **kwargs)

    setattr(module, replacement.name, dispatch)
    return module, replacement.name, original
