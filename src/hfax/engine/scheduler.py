"""The scheduler: decides which sequences run in the next step, and how many tokens of each.

Decoding sequences get one token each; the rest of the token budget goes to prompts, with chunked prefill. If pages run out, the
newest sequence of the lowest priority is preempted and recomputed later. Clients share slots and pages: if a sequence cannot start
while another client has more running than its share, the newest of those is preempted. Imports neither jax nor torch, and is
independent of devices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from hfax.engine.pages import PageAllocator
from hfax.engine.sequence import FinishReason, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A sequence's share of a step.

    Args:
        sequence: the sequence.
        start: index of the first token to compute.
        count: number of tokens to compute.
        draws: sample a token after the last one.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool

    @property
    def scores(self) -> bool:
        """Whether prompt log-probabilities are needed for the tokens that follow these."""
        return self.sequence.params.prompt_logprobs is not None and self.start < len(self.sequence.prompt) - 1

    @property
    def num_logits(self) -> int:
        """Number of logits rows needed."""
        return self.count if self.scores else int(self.draws)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a step and of the KV cache.

    Args:
        max_num_seqs: maximum concurrent sequences.
        max_num_batched_tokens: maximum tokens per step.
        max_model_len: maximum sequence length, in tokens.
        max_waiting: maximum waiting sequences; None: unlimited.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int | None = None


_PATIENCE = 16
"""Steps that a sequence waits for another to end before one gives way."""


class Scheduler:
    """Waiting and running sequences.

    Args:
        limits: limits of a step.
        pages: the page allocator; None: each sequence has its own slot, without chunked prefill.
    """

    def __init__(self, limits: Limits, pages: PageAllocator | None) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.max_step_tokens = limits.max_num_batched_tokens
        """Maximum tokens of a step, at most `limits.max_num_batched_tokens`."""
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence; frees its pages and its slot for the next step."""
        if sequence.is_finished:
            return
        sequence.finish_reason = reason
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Part]:
        """Schedule the next step; empty if there is nothing to do."""
        parts: list[Part] = []
        budget = self.max_step_tokens
        logits = self.limits.max_num_seqs
        self.running.sort(key=lambda s: (s.is_in_prompt, s.order))
        for sequence in list(self.running):
            if sequence.slot is None or budget <= 0:
                continue  # preempted by an earlier sequence
            part = self._part(sequence, budget, logits)
            if part is None or not self._make_room(sequence, part.start + part.count, parts):
                continue
            parts.append(part)
            budget -= part.count
            logits -= part.num_logits
        parts = [p for p in parts if p.sequence.slot is not None]
        self._admit(parts)
        for part in parts:
            part.sequence.num_computed += part.count
            part.sequence.num_pending += part.draws
            self._remember(part.sequence)
        return parts

    def _admit(self, parts: list[Part]) -> None:
        """Start waiting sequences while there is room."""
        self.waiting.sort(key=lambda s: s.order)
        queue = [s for s in self.waiting if not s.num_pending]  # else its newest token has not been read yet
        num_running = Counter(s.client for s in self.running)
        while queue:
            # clients take turns, so that one cannot keep the others out
            sequence = min(queue, key=lambda s: (s.priority, num_running[s.client], s.order))
            queue.remove(sequence)
            if not self._slots and not self._give_way(sequence, num_running, parts):
                return
            while not self._start(sequence, parts):
                if self._is_full(parts) or not self._give_way(sequence, num_running, parts):
                    return
            num_running[sequence.client] += 1

    def _is_full(self, parts: list[Part]) -> bool:
        """Whether a step has as many tokens or logits as it may."""
        return min(self._room(parts)) <= 0

    def _room(self, parts: list[Part]) -> tuple[int, int]:
        """The tokens and the rows of logits that a step has left."""
        tokens = self.max_step_tokens - sum(p.count for p in parts)
        return tokens, self.limits.max_num_seqs - sum(p.num_logits for p in parts)

    def _start(self, sequence: Sequence, parts: list[Part]) -> bool:
        """Start a waiting sequence in a free slot; False if the step is full, or there are too few pages."""
        if self._is_full(parts):
            return False
        self._find_prefix(sequence)
        part = self._part(sequence, *self._room(parts))
        if part is not None and self.pages is not None:
            # require pages for all its tokens, so it is not preempted right after it starts
            needed = self._pages_for(sequence.num_tokens) - len(sequence.pages)
            if needed > self.pages.num_free or not self._take(sequence, part.start + part.count):
                part = None
        if part is None:
            self._release(sequence)
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot = self._slots.pop()
        sequence.num_waited = 0
        parts.append(part)
        return True

    def _give_way(self, sequence: Sequence, num_running: Counter[str], parts: list[Part]) -> bool:
        """Preempt the newest sequence of the client with most, if `sequence` has waited and its client has fewer than its share.

        The other client must have two sequences more, so that no two take turns at preempting each other.
        """
        sequence.num_waited += 1
        if self.pages is None or sequence.num_waited <= _PATIENCE:
            return False
        most = num_running[sequence.client] + 1
        others = [s for s in self.running if num_running[s.client] > most and s.priority >= sequence.priority]
        if not others:
            return False
        last = max(others, key=lambda s: (s.priority, num_running[s.client], s.order))
        self._preempt(last)
        num_running[last.client] -= 1
        parts[:] = [p for p in parts if p.sequence is not last]
        return True

    def _part(self, sequence: Sequence, budget: int, logits: int) -> Part | None:
        missing = sequence.num_tokens - sequence.num_computed
        num_drawn = len(sequence.output) + sequence.num_pending
        if missing <= 0 or (num_drawn >= sequence.max_tokens and sequence.max_tokens):
            return None
        if self.pages is None:  # no chunked prefill: the budget does not apply
            return Part(sequence=sequence, start=sequence.num_computed, count=missing, draws=True)
        is_drawing = sequence.max_tokens > 0
        count = min(missing, budget)
        part = Part(sequence=sequence, start=sequence.num_computed, count=count, draws=is_drawing and count == missing)
        if part.num_logits > logits:
            if logits <= 0 or not part.scores:
                return None
            part = dataclasses.replace(part, count=logits, draws=is_drawing and logits == missing)
        return part

    def _make_room(self, sequence: Sequence, length: int, parts: list[Part]) -> bool:
        """Allocate pages for `length` tokens, preempting others if needed; False if the sequence itself was preempted."""
        while not self._take(sequence, length):
            num_running = Counter(s.client for s in self.running)
            last = max(self.running, key=lambda s: (s.priority, num_running[s.client], s.order))
            self._preempt(last)
            parts[:] = [p for p in parts if p.sequence is not last]
            if last is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, length: int) -> bool:
        if self.pages is None:
            return True
        missing = self._pages_for(length) - len(sequence.pages)
        if missing <= 0:
            return True
        found = self.pages.allocate(missing)
        if found is None:
            return False
        sequence.pages += found
        return True

    def _pages_for(self, length: int) -> int:
        assert self.pages is not None
        return -(-length // self.pages.page_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.append(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Preempt sequences for recomputation after the cache was lost."""
        for sequence in list(sequences):
            self._preempt(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self.pages is not None and sequence.pages:
            self.pages.free(sequence.pages)
        sequence.pages = []
        sequence.page_hashes = []
        sequence.num_computed = 0
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
            sequence.slot = None

    def _find_prefix(self, sequence: Sequence) -> None:
        if self.pages is None or sequence.params.prompt_logprobs is not None:
            return
        places, hashes = self.pages.find(sequence.tokens(0, sequence.num_known), sequence.cache_salt)
        sequence.pages, sequence.page_hashes = places, hashes
        sequence.num_computed = len(places) * self.pages.page_size
        if not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed

    def _remember(self, sequence: Sequence) -> None:
        """Register the pages that this step fills in the prefix cache."""
        if self.pages is None:
            return
        size = self.pages.page_size
        full = min(sequence.num_computed, sequence.num_known) // size
        for index in range(len(sequence.page_hashes), full):
            before = sequence.page_hashes[-1] if sequence.page_hashes else None
            tokens = sequence.tokens(index * size, (index + 1) * size)
            sequence.page_hashes.append(self.pages.remember(sequence.pages[index], tokens, before, sequence.cache_salt))
