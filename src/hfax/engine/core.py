"""The engine loop: schedule a step, dispatch it, read the previous step's tokens, sample new ones.

The device never waits for the host: a step's forward pass is dispatched before the previous step's tokens are read, since it uses
them on the device. Tokens sampled for a sequence that has already finished are dropped. If a step fails, only its own sequences
fail. One thread runs the loop; other threads use `add`, `abort` and callbacks.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection

import numpy as np

from hfax.engine.detokenizer import Detokenizer
from hfax.engine.grammar import Matcher
from hfax.engine.outputs import OutputDelta
from hfax.engine.runner import Drawn, Logits, Runner, TokenDrawer
from hfax.engine.sampler import MAX_HELD_BACK, Draw
from hfax.engine.sampling_params import SamplingParams
from hfax.engine.scheduler import Part, Scheduler
from hfax.engine.sequence import FinishReason, Sequence, TokenLogprob
from hfax.errors import EngineBusyError, EngineDeadError, HfaxError

logger = logging.getLogger(__name__)


Listener = Callable[[OutputDelta, Exception | None], None]
"""Takes each step's delta; with the last one, the exception if the sequence failed."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Entry:
    """A sequence with its listener, detokenizer and grammar matcher."""

    sequence: Sequence
    listener: Listener
    detokenizer: Detokenizer | None
    matcher: Matcher | None
    counts_of: tuple[int | None, int] | None = None
    """The slot that holds this sequence's token counts, and its `num_preemptions` when they were loaded."""


class EngineCore:
    """Runs sequences until it is closed.

    Args:
        scheduler: schedules steps.
        runner: runs forward passes.
        drawer: samples tokens.
        vocab_size: size of the logits' last axis.
        on_step: called after each step with its seconds and token count.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drawer: TokenDrawer,
        *,
        vocab_size: int,
        on_step: Callable[[float, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner, self._drawer = runner, drawer
        self._vocab_size = vocab_size
        self._on_step = on_step
        self._entries: dict[Sequence, Entry] = {}
        self._new: collections.deque[Entry] = collections.deque()
        self._aborted: collections.deque[Sequence] = collections.deque()
        self._wake = threading.Condition()
        self._is_closing = self._has_ended = False
        self._in_flight: list[Drawn] = []
        self.busy_since: float | None = None
        """`time.monotonic()` at the start of the current step; None while idle."""
        self.slowest_step_s = 0.0
        """Duration of the slowest step so far, without compilation during warm-up."""
        self.failure: BaseException | None = None
        """The exception that ended the loop; None if it is running or was closed."""
        self._thread = threading.Thread(target=self._run, name="hfax-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the loop is running."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of sequences waiting to run."""
        return len(self.scheduler.waiting) + len(self._new)

    def add(self, entries: Collection[Entry], *, max_waiting: int | None = None) -> None:
        """Queue sequences, all or none; their listeners are called with deltas in the loop's thread.

        Raises:
            EngineBusyError: more than `max_waiting` sequences would wait.
            EngineDeadError: the loop has ended, so nothing would tell their listeners.
        """
        with self._wake:
            if self._has_ended:
                raise dead_error(self.failure)
            waiting = self.num_waiting
            if max_waiting is not None and waiting + len(entries) > max_waiting:
                raise EngineBusyError(
                    "The waiting queue is full.",
                    f"{waiting} sequences are waiting; the limit is {max_waiting}.",
                    "Retry later, or raise max_waiting.",
                )
            self._new.extend(entries)
            self._wake.notify()

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence soon; its listener gets one last update."""
        with self._wake:
            self._aborted.append(sequence)
            self._wake.notify()

    def while_idle(self, action: Callable[[], None]) -> None:
        """Call `action` while the loop waits for work.

        Raises:
            EngineBusyError: there are unfinished sequences.
        """
        with self._wake:
            self._wake.wait_for(lambda: self.busy_since is None or bool(self._new or self._entries))
            if self._new or self._entries:
                raise EngineBusyError(
                    f"{len(self._new) + len(self._entries)} sequences are not finished.",
                    "This requires an engine that runs nothing.",
                    "Wait for all requests, or abort them.",
                )
            action()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the loop, and abort unfinished sequences."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._wait():
                self._take_new()
                self._step()
        except BaseException as error:
            logger.exception("the engine loop failed")
            self.failure = error
        finally:
            self.busy_since = None
            with self._wake:  # what was added before is ended below; what comes later is refused
                self._has_ended = True
                self._wake.notify_all()
            self._take_new()
            reason = FinishReason.ERROR if self.failure is not None else FinishReason.ABORT
            for sequence in list(self._entries):
                self._end(sequence, reason, error=self.failure)

    def _wait(self) -> bool:
        """Wait for work; False if the loop is closing."""
        with self._wake:
            while not (self._is_closing or self._new or self._aborted or self.scheduler.has_work or self._in_flight):
                self.busy_since = None
                self._wake.notify_all()  # `while_idle`
                self._wake.wait()
            if self.busy_since is None:
                self.busy_since = time.monotonic()
            return not self._is_closing

    def _take_new(self) -> None:
        with self._wake:  # atomic for `num_waiting`: an entry must always be in one of the two queues
            while self._new:
                entry = self._new.popleft()
                self._entries[entry.sequence] = entry
                self.scheduler.add(entry.sequence)
        while self._aborted:
            sequence = self._aborted.popleft()
            if sequence in self._entries:
                self._end(sequence, FinishReason.ABORT)

    def _step(self) -> None:
        start = self.busy_since = time.monotonic()
        self.scheduler.max_step_tokens = self._runner.max_step_tokens or self.scheduler.limits.max_num_batched_tokens
        parts = self.scheduler.schedule()
        logits: list[Logits] = []
        try:
            if parts:
                self._load_counts(parts)
                logits = self._runner.forward(parts, self._drawer.newest)
        except Exception as error:
            self._fail(parts, error)
            parts = []
        in_flight, self._in_flight = self._in_flight, []
        for drawn in in_flight:
            try:
                self._read(drawn)
            except Exception as error:
                owners = [owner[0] for owner in drawn.owners if owner is not None]
                self._fail([*owners, *parts], error)
                logits, parts = [], []
        for group in logits:
            try:
                self._draw(group)
            except Exception as error:
                self._fail(parts, error)
                break
        self._finish_unread(parts)
        if parts or in_flight:
            seconds = time.monotonic() - start
            self.slowest_step_s = max(self.slowest_step_s, seconds)
            if self._on_step is not None:
                self._on_step(seconds, sum(part.count for part in parts))
        if not parts and not in_flight:
            time.sleep(0.001)  # nothing can be scheduled yet

    def _load_counts(self, parts: list[Part]) -> None:
        for part in parts:
            entry = self._entries[part.sequence]
            here = part.sequence.slot, part.sequence.num_preemptions
            if part.draws and entry.counts_of != here and part.sequence.params.counts_tokens:
                self._drawer.remember(part.sequence)
                entry.counts_of = here

    def _draw(self, group: Logits) -> None:
        """Dispatch sampling from a step's logits."""
        if group.failure is not None:
            self._fail([owner[0] for owner in group.owners if owner is not None], group.failure, is_lost=False)
            return
        draws: list[Draw] = []
        owners: list[tuple[Part, int] | None] = []
        for owner in group.owners:
            draw = None if owner is None else self._draw_of(*owner)
            owners.append(owner if draw is not None else None)
            draws.append(draw or _NOBODY)
        if any(owner is not None for owner in owners):
            self._in_flight.append(self._drawer.draw(group, draws, tuple(owners)))

    def _draw_of(self, part: Part, index: int) -> Draw | None:
        """Sampling options after token `index` of a part; None if the token is not needed."""
        sequence = part.sequence
        if sequence.is_finished or sequence.slot is None:
            return None
        is_target = _is_target(part, index)
        if not is_target and not (part.draws and index == part.start + part.count - 1):
            return None
        params = sequence.params
        step = len(sequence.output)
        entry = self._entries[sequence]
        held_back = tuple(sequence.stop_ids)[:MAX_HELD_BACK] if step < params.min_tokens else ()
        mask = None
        if entry.matcher is not None and not is_target:
            try:
                mask = entry.matcher.mask(self._vocab_size)
            except HfaxError as error:
                self._end(sequence, FinishReason.ERROR, error=error)
                return None
        return Draw(
            params=params,
            seed=sequence.seed,
            stream=sequence.index,
            step=step,
            slot=sequence.slot,
            held_back=held_back,
            mask=mask,
            target=sequence.prompt[index + 1] if is_target else None,
        )

    def _read(self, drawn: Drawn) -> None:
        """Wait for sampled tokens, and notify listeners."""
        arrays = {name: np.asarray(array) for name, array in drawn.arrays.items()}
        accepted: dict[Sequence, tuple[OutputDelta, Exception | None]] = {}
        for row, owner in enumerate(drawn.owners):
            if owner is None:
                continue
            part, index = owner
            sequence = part.sequence
            if _is_target(part, index):
                if len(sequence.prompt_logprobs) == index:
                    wanted = sequence.params.prompt_logprobs or 0
                    sequence.prompt_logprobs.append(_logprob(arrays, row, sequence.prompt[index + 1], wanted))
                continue
            sequence.num_pending -= 1
            if not sequence.is_finished:
                token = int(arrays["token"][row])
                wanted = sequence.params.logprobs
                logprobs = () if wanted is None else (_logprob(arrays, row, token, wanted),)
                accepted[sequence] = self._accept(sequence, token, logprobs)
        for sequence, (delta, error) in accepted.items():
            self._tell(sequence, delta, error)

    def _accept(
        self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[OutputDelta, Exception | None]:
        """Append a token to a sequence, and check whether it finishes."""
        entry = self._entries[sequence]
        sequence.output.append(token)
        stop: str | int | None = None
        reason: FinishReason | None = None
        error: Exception | None = None
        if token in sequence.stop_ids and len(sequence.output) > sequence.params.min_tokens:
            reason, stop = FinishReason.STOP, token
        if entry.matcher is not None and reason is None:
            try:
                entry.matcher.accept(token)
                if entry.matcher.is_stopped:
                    reason = FinishReason.STOP
            except HfaxError as failure:
                reason, error = FinishReason.ERROR, failure
        if reason is None and len(sequence.output) >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        text = ""
        if (detokenizer := entry.detokenizer) is not None:
            is_end = stop is not None
            found = detokenizer.add(token, is_text=not is_end or sequence.params.include_stop_str_in_output)
            if (found is not None and len(sequence.output) > sequence.params.min_tokens) or (
                reason is not None and (found := detokenizer.finish()) is not None
            ):
                reason, stop = FinishReason.STOP, found
            text = detokenizer.take(is_finished=reason is not None)
        if reason is not None:
            self.scheduler.finish(sequence, reason)
        delta = OutputDelta(
            index=sequence.index,
            text=text,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=stop,
        )
        return delta, error

    def _finish_unread(self, parts: list[Part]) -> None:
        """Finish sequences with max_tokens=0 once their prompt log-probabilities are read."""
        for part in parts:
            sequence = part.sequence
            if sequence.max_tokens or sequence.is_finished or sequence.num_computed < len(sequence.prompt):
                continue
            while self._in_flight:
                self._read(self._in_flight.pop(0))
            self._end(sequence, FinishReason.LENGTH)

    def _fail(self, parts: list[Part], error: Exception, *, is_lost: bool = True) -> None:
        """Fail the sequences of a step. If device arrays may be lost, preempt and recompute all others."""
        logger.error("a step failed: %s", error, exc_info=not isinstance(error, HfaxError))
        for part in parts:
            part.sequence.num_pending = 0
            if not part.sequence.is_finished:
                self._end(part.sequence, FinishReason.ERROR, error=error)
        if not is_lost:
            return
        self._in_flight = []
        for sequence in list(self._entries):
            sequence.num_pending = 0
            if self.scheduler.pages is None and sequence.output:  # its slot's state cannot be recomputed
                self._end(sequence, FinishReason.ERROR, error=error)
        self.scheduler.restart(self.scheduler.running)
        for entry in self._entries.values():
            entry.counts_of = None
        if self.scheduler.pages is not None:
            self.scheduler.pages.forget()
        self._runner.reset()
        self._drawer.reset()

    def _end(self, sequence: Sequence, reason: FinishReason, *, error: BaseException | None = None) -> None:
        entry = self._entries.get(sequence)
        if entry is None:
            return
        text = ""
        if entry.detokenizer is not None:
            text = entry.detokenizer.take(is_finished=True)
        self.scheduler.finish(sequence, reason)
        shown = error if isinstance(error, Exception) or error is None else RuntimeError(str(error))
        delta = OutputDelta(index=sequence.index, text=text, token_ids=(), finish_reason=sequence.finish_reason)
        self._tell(sequence, delta, shown)

    def _tell(self, sequence: Sequence, delta: OutputDelta, error: Exception | None) -> None:
        """Call the listener; its exceptions are logged, not raised."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        if delta.finish_reason is not None:
            del self._entries[sequence]
        try:
            entry.listener(delta, error)
        except Exception:
            logger.exception("a listener failed")


def dead_error(failure: BaseException | None) -> EngineDeadError:
    """The error of a request to an engine whose loop has ended.

    Args:
        failure: what ended the loop; None: it was closed.
    """
    why = "It was closed." if failure is None else f"Its loop failed: {type(failure).__name__}."
    return EngineDeadError("The engine is not running.", why, "Create a new Engine.")


def _is_target(part: Part, index: int) -> bool:
    """Whether the logits after token `index` only score the prompt's next token."""
    return part.scores and index + 1 < len(part.sequence.prompt)


def _logprob(arrays: dict[str, np.ndarray], row: int, token: int, wanted: int) -> TokenLogprob:
    ids, values = arrays["top_ids"][row][:wanted], arrays["top_logprobs"][row][:wanted]
    return TokenLogprob(
        token_id=token,
        logprob=float(arrays["logprob"][row]),
        rank=int(arrays["rank"][row]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


_NOBODY = Draw(params=SamplingParams(temperature=0.0), seed=0, stream=0, step=0, slot=np.iinfo(np.int32).max)
"""Padding row; its slot is out of range, so nothing is stored."""
