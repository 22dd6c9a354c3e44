"""Python code of transformers and torch that looks at values, replaced by code that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfax.patches.patch import FunctionPatch, Patch


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


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
]
