"""Keeps orbax's and tensorstore's stack traces of a failed write off the terminal; the error itself is raised where it belongs."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

logger = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is logged as usual: the error of a write that nobody waits for any more is not."""
    text = record.getMessage()  # of a future, or of a task of orbax's
    error = str(record.exc_info[1]) if record.exc_info else ""
    return not ("exception was never retrieved" in text and ("OCDBT" in text + error or "orbax" in text))


class OrbaxNoise(logging.Filter):
    """While it is started, errors that orbax logs in its threads go to this module's debug log.

    Orbax raises the same errors again from `save` and `wait_until_finished`.
    """

    def start(self) -> None:
        """Begin."""
        self._hook, self._has_failed = sys.unraisablehook, False
        logging.getLogger("absl").addFilter(self)
        logging.getLogger("asyncio").addFilter(_is_news)
        sys.unraisablehook = self._on_unraisable

    def stop(self) -> None:
        """End. After `note_failure`, tensorstore's threads are still held off, which end later."""
        logging.getLogger("absl").removeFilter(self)
        if self._has_failed:
            return
        logging.getLogger("asyncio").removeFilter(_is_news)
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._hook

    def note_failure(self) -> None:
        """A write failed: the arrays that were not written any more are no news."""
        self._has_failed = True
        warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged as usual."""
        if record.levelno < logging.ERROR or "orbax" not in record.pathname:
            return True
        logger.debug("orbax: %s", record.getMessage(), exc_info=record.exc_info)
        return False

    def _on_unraisable(self, unraisable: Any) -> None:
        """tensorstore's writes that end after a failed one find orbax's event loop closed: one stack trace for each."""
        if isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed":
            logger.debug("orbax: %s", unraisable.exc_value)
            return
        self._hook(unraisable)
