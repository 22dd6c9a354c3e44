"""Timed phases (download, load, trace, compile), for progress reporting.

`phase` wraps the work and logs one INFO line at the end; `listen` lets a caller, such as the CLI, receive events. Listeners belong
to the current context (thread or task). Without any, a terminal shows the phase (`hfax.progress`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal

from hfax.progress import Meter, shown

logger = logging.getLogger(__name__)

PhaseName = Literal["download", "load", "trace", "compile"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    """The start (`seconds is None`) or end of a phase.

    `detail` names the object, such as `prefill[1, 64]`; `seconds` is wall-clock time; `meter` counts the bytes of loaded weights.
    """

    name: PhaseName
    detail: str
    seconds: float | None
    meter: Meter = dataclasses.field(default_factory=Meter, compare=False)


Listener = Callable[[PhaseEvent], None]
_telling = threading.RLock()
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("hfax_phase_listeners", default=())


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with every `PhaseEvent` of this context until the block ends.

    Programs are compiled side by side in threads of this context: calls come from any of them, one at a time.
    """
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


_meter: ContextVar[Meter | None] = ContextVar("hfax_meter", default=None)


def meter() -> Meter:
    """Counts the bytes of the innermost phase of this context."""
    return _meter.get() or Meter()


@contextlib.contextmanager
def phase(name: PhaseName, detail: str) -> Iterator[None]:
    """Time a block of work. An exception propagates, without an end event."""
    listeners = _listeners.get()
    own = Meter()
    _tell(listeners, PhaseEvent(name=name, detail=detail, seconds=None, meter=own))
    start = time.perf_counter()
    token = _meter.set(own)
    try:
        with contextlib.nullcontext() if listeners else shown(name, detail, own):
            yield
    finally:
        _meter.reset(token)
    seconds = time.perf_counter() - start
    logger.info("%s %s: %.2f s", name, detail, seconds)
    _tell(listeners, PhaseEvent(name=name, detail=detail, seconds=seconds, meter=own))


def _tell(listeners: tuple[Listener, ...], event: PhaseEvent) -> None:
    with _telling:
        for listener in listeners:
            listener(event)
