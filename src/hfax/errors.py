"""hfax's exceptions: what happened, why, and how to fix it.

This module defines only the message format. Errors in user code and hfax bugs propagate unchanged.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class HfaxError(Exception):
    """An error that the user can fix.

    Args:
        what: what happened, with the relevant names, shapes and values.
        why: the cause, if known.
        fix: what to do next.

    The three parts are attributes of the same names; `str(error)` shows one per line.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  Why: {self.why}\n  Fix: {self.fix}"


class CheckpointNotFoundError(HfaxError):
    """No such folder or Hub repository, or it is not cached and the network is unavailable or disabled."""


class CheckpointAccessError(HfaxError):
    """The repository exists but requires a token or an accepted licence."""


class CheckpointCorruptError(HfaxError):
    """A checkpoint file is truncated, is in the wrong format, or its tensors do not fit the model."""


class UnsupportedModelError(HfaxError):
    """The model type is unknown, needs untrusted code, or cannot be traced."""


class InvalidInputError(HfaxError):
    """An argument is out of range, has the wrong shape, or does not fit the model."""


class UnsupportedOptionError(HfaxError):
    """A valid transformers option that hfax, or this backend, does not support."""


class UnsupportedAttributeError(UnsupportedOptionError, AttributeError):
    """An attribute or method of transformers models that hfax models lack; `hasattr` returns False."""


class OutOfMemoryError(HfaxError):
    """The weights, the cache or a program do not fit in device memory."""


class EngineBusyError(HfaxError):
    """The waiting queue is full, or requests are running where none may."""


class EngineDeadError(HfaxError):
    """The engine was closed, or its loop failed."""


class BackendNotAvailableError(HfaxError):
    """The backend's packages are missing or have the wrong version, or its device fails to initialise."""


_OTHERS = ("/torch/", "/torchax/", "/jax/", "/hfax/", "/transformers/utils/", "contextlib", "/functools")


def line_of_error(error: BaseException) -> str:
    """The innermost modelling code line in an error's traceback: "/…/modeling_llama.py:123 in forward"; "" if none."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def running_line() -> str:
    """The innermost modelling code line in the current stack."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: Iterable[traceback.FrameSummary]) -> str:
    theirs = [f for f in frames if not any(part in f.filename for part in _OTHERS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else ""
