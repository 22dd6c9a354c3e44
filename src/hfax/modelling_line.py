"""Which line of modelling code is running, or raised: the part of a stack that a user can act on."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

_OTHERS = ("/torch/", "/torchax/", "/jax/", "/hfax/", "/transformers/utils/", "contextlib", "/functools")


def line_of_error(error: BaseException) -> str:
    """The innermost line of modelling code in an error's traceback: "/…/modeling_llama.py:123 in forward"; "" if there is none."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def running_line() -> str:
    """The innermost line of modelling code that is running now."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: Iterable[traceback.FrameSummary]) -> str:
    theirs = [f for f in frames if not any(part in f.filename for part in _OTHERS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else ""
