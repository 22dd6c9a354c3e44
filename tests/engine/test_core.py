"""The engine loop's handling of failed steps, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sequences import make_sequence

from hfax.engine.core import EngineCore, Entry
from hfax.engine.pages import PageAllocator
from hfax.engine.scheduler import Limits, Scheduler
from hfax.engine.sequence import FinishReason


@pytest.mark.parametrize("has_pages", [True, False])
def test_after_a_lost_step_only_sequences_with_pages_are_recomputed(has_pages: bool) -> None:
    """A slot is prefilled with the prompt alone: a sequence that had tokens already went on as if it had none."""
    resets: list[str] = []
    fake: Any = SimpleNamespace(reset=lambda: resets.append("reset"))
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    core = EngineCore(Scheduler(limits, PageAllocator(20, 4) if has_pages else None), fake, fake, vocab_size=10)
    errors: list[Exception | None] = []
    written, fresh = (make_sequence(arrival=arrival) for arrival in range(2))
    for sequence in (written, fresh):
        core._entries[sequence] = Entry(
            sequence=sequence, listener=lambda _, error: errors.append(error), detokenizer=None, matcher=None
        )
        core.scheduler.add(sequence)
    core.scheduler.schedule()
    written.output = [7]
    core._fail([], RuntimeError("lost"))
    assert len(resets) == 2
    assert fresh in core.scheduler.waiting
    if has_pages:
        assert written in core.scheduler.waiting
    else:
        assert written.finish_reason is FinishReason.ERROR
        assert [str(error) for error in errors] == ["lost"]
