"""Trial runs of Triton kernels on the GPU at hand, before programs rely on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

logger = logging.getLogger(__name__)


def agrees(kernel: str, run: Callable[[], tuple[np.ndarray, np.ndarray]], tolerance: float, fallback: str) -> bool:
    """Whether a kernel gives the expected values on this process's GPU; otherwise logs a warning.

    Args:
        kernel: its name, for the warning.
        run: runs it on small arrays; returns the result and the expected one. May be called while tracing.
        tolerance: of the difference, relative to the largest expected value.
        fallback: what is done without the kernel, for the warning.
    """
    with ThreadPoolExecutor(1) as other:  # a trace's own thread does not execute
        problem = other.submit(_problem, run, tolerance).result()
    if problem is not None:
        logger.warning("%s: the Triton kernel %s %s", fallback, kernel, problem)
    return problem is None


def _problem(run: Callable[[], tuple[np.ndarray, np.ndarray]], tolerance: float) -> str | None:
    try:
        got, expected = run()
    except Exception as error:  # compiler errors have no common class
        return f"does not work here ({str(error).partition(chr(10))[0]})"
    is_right = bool(np.abs(got.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max())
    return None if is_right else "gives different values than XLA here"
