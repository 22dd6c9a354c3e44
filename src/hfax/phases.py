"""Timed phases of a model's life (download, load, trace, compile), for whoever wants to show them.

`phase` brackets the work and logs one INFO line at its end; `listen` lets a caller, such as the command line, follow along.
Listeners belong to the current context (thread or task); this module does not know what a phase does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal

logger = logging.getLogger(__name__)

PhaseName = Literal["download", "load", "trace", "compile"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    """The beginning (`seconds is None`) or the end of one phase.

    `detail` names what is worked on, for instance `prefill[1, 64]`; `seconds` is wall-clock time.
    """

    name: PhaseName
    detail: str
    seconds: float | None


Listener = Callable[[PhaseEvent], None]
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("hfax_phase_listeners", default=())


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with every `PhaseEvent` of this context until the block ends."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def phase(name: PhaseName, detail: str) -> Iterator[None]:
    """Time a block of work. An error inside ends the phase without an end event, and passes through."""
    for listener in _listeners.get():
        listener(PhaseEvent(name=name, detail=detail, seconds=None))
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    logger.info("%s %s: %.2f s", name, detail, seconds)
    for listener in _listeners.get():
        listener(PhaseEvent(name=name, detail=detail, seconds=seconds))
