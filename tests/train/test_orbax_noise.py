"""Which records of a failed write are held back: those of writes that nobody waits for, whatever asyncio calls them."""

import logging
import sys

import pytest

from hfax.train.orbax_noise import OrbaxNoise

LOST = 'OUT_OF_RANGE: Error writing "opt_state" in OCDBT database: File too large'


def error() -> tuple[type, ValueError, None]:
    return ValueError, ValueError(LOST), None


@pytest.mark.parametrize(
    ("message", "has_error", "is_news"),
    [
        (
            f"Future exception was never retrieved\nfuture: <Future finished exception=ValueError({LOST!r})>",
            False,
            False,
        ),
        ("Future exception was never retrieved\nfuture: <Future finished>", True, False),
        (
            "Task exception was never retrieved\nfuture: <Task coro=<write_fragment() at orbax/serialization.py>>",
            True,
            False,
        ),
        ("Task exception was never retrieved\nfuture: <Task coro=<my_task() at script.py>>", False, True),
        ("Executing took 0.3 seconds", False, True),
    ],
)
def test_errors_of_lost_writes_are_no_news(message: str, has_error: bool, is_news: bool) -> None:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.addHandler(handler)
    noise, hook = OrbaxNoise(), sys.unraisablehook
    noise.start()
    try:
        asyncio_log.error(message, exc_info=error() if has_error else None)
    finally:
        noise.stop()
        asyncio_log.removeHandler(handler)
    assert bool(found) == is_news
    assert sys.unraisablehook is hook
