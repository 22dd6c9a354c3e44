"""Every error that hfax raises on purpose: what happened, why, and what to do next.

This module knows nothing of models or devices; it only fixes the shape of a message. Errors of a user's own code, and defects
of hfax, are left to surface as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class HfaxError(Exception):
    """An error a user can act on.

    Args:
        what: what happened, with the names, shapes and values at hand.
        why: the cause, as far as it is known.
        fix: what to do next.

    The three parts are kept as attributes of the same names; `str(error)` shows them one a line.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  Why: {self.why}\n  Fix: {self.fix}"


class CheckpointNotFoundError(HfaxError):
    """No such folder or Hub repository, or it is not cached and the network may not be used."""


class CheckpointAccessError(HfaxError):
    """The repository exists but needs a token, or a licence that has not been accepted."""


class CheckpointCorruptError(HfaxError):
    """A file of the checkpoint is truncated, is not what its name says, or its tensors do not fit the model."""


class UnsupportedModelError(HfaxError):
    """The model type is unknown, needs code that was not trusted, or cannot be traced."""


class InvalidInputError(HfaxError):
    """An argument of a call is out of range, misshapen, or does not fit the model."""


class UnsupportedOptionError(HfaxError):
    """A valid option of transformers that hfax, or this backend, does not implement."""


class UnsupportedAttributeError(UnsupportedOptionError, AttributeError):
    """An attribute or method of transformers' models that hfax's do not have; `hasattr` is False for it."""


class OutOfMemoryError(HfaxError):
    """The weights, the cache or a program do not fit the device's memory."""


class EngineBusyError(HfaxError):
    """The waiting queue is full."""


class EngineDeadError(HfaxError):
    """The engine was closed, or its loop failed."""


class BackendNotAvailableError(HfaxError):
    """The backend's packages are missing, of the wrong version, or its device does not come up."""


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
