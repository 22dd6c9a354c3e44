"""Compiles an engine's programs beside its steps, which use the fewest programs at first, and others once they are made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import jax

from hfax.engine.runner import Runner, TokenDrawer

logger = logging.getLogger(__name__)


class BackgroundCompilation:
    """A thread that compiles the programs which a runner and a sampler do not use yet, those with most traffic first.

    A step never waits for it: programs are used once they are there. If some cannot be compiled, the others serve their steps.

    Args:
        runner: the runner, which uses the fewest sizes.
        drawer: the sampler, which uses the fewest programs.
        logits: [rows, vocab], one for each number of rows that the runner returns.
    """

    def __init__(self, runner: Runner, drawer: TokenDrawer, logits: Sequence[jax.Array]) -> None:
        self._runner, self._drawer = runner, drawer
        self._num_rows = {array.shape[0] for array in logits}
        abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in logits]
        self._tasks: list[tuple[str, Callable[[], None]]] = [("sampling", lambda: self._make_sampling(abstract))]
        for size in runner.unused():
            self._tasks.append((f"steps of {size} tokens", lambda size=size: self._make_step(size)))
        self._num_done = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="hfax-background-compile")
        self._thread.start()

    @property
    def num_left(self) -> int:
        """Number of sets of programs that are to be compiled."""
        return len(self._tasks) - self._num_done

    def stop(self) -> None:
        """Compile no further program; the one that is being compiled is finished."""
        self._is_stopping = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is compiled any more; False after the timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for number, (name, make) in enumerate(self._tasks, 1):
            if self._is_stopping or not threading.main_thread().is_alive():
                return
            try:
                make()
                logger.info("programs for %s are ready (%d of %d)", name, number, len(self._tasks))
            except Exception as error:
                logger.warning("programs for %s are not available, others take their place: %s", name, error)
            self._num_done = number

    def _make_sampling(self, logits: Sequence[jax.ShapeDtypeStruct]) -> None:
        for array in logits:
            self._drawer.compile(array)
        self._drawer.use_all()

    def _make_step(self, size: int) -> None:
        logits = self._runner.compile(size)
        if logits.shape[0] not in self._num_rows:
            self._drawer.compile(logits)
            self._num_rows.add(logits.shape[0])
        self._runner.use(size)
