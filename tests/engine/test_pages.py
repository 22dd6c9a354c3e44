"""Pages, their sharing, and the scheduler, which know no device."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from sequences import make_sequence

from hfax.engine.pages import PageAllocator
from hfax.engine.scheduler import Limits, Scheduler
from hfax.engine.sequence import FinishReason, Sequence


def test_neither_jax_nor_torch_is_imported():
    modules = "hfax.engine.scheduler, hfax.engine.pages, hfax.engine.sequence"
    code = f"import sys, {modules}; assert not {{'jax', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_equal_beginnings_share_pages_that_live_on_without_an_owner():
    pages = PageAllocator(5, 4)
    first = pages.allocate(2)
    key = pages.remember(first[0], [1, 2, 3, 4], None, "")
    pages.remember(first[1], [5, 6, 7, 8], key, "")
    assert pages.find([1, 2, 3, 4, 5, 6, 7, 8, 9], "")[0] == first
    pages.free(first)
    pages.free(first)
    assert (pages.num_held, pages.num_free) == (0, 4)
    assert pages.find([1, 2, 3, 4, 0, 0, 0, 0, 9], "")[0] == first[:1]
    assert pages.find([1, 2, 3, 4, 5], "other")[0] == []


def test_a_whole_prompt_is_never_found_whole():
    pages = PageAllocator(5, 4)
    held = pages.allocate(1)
    pages.remember(held[0], [1, 2, 3, 4], None, "")
    assert pages.find([1, 2, 3, 4], "")[0] == []


def test_the_page_unused_for_longest_goes_first_and_ends_before_beginnings():
    pages = PageAllocator(4, 2)
    old, new = pages.allocate(2), pages.allocate(1)
    key = pages.remember(old[0], [1, 2], None, "")
    pages.remember(old[1], [3, 4], key, "")
    pages.remember(new[0], [9, 9], None, "")
    pages.free(old)
    pages.free(new)
    assert pages.allocate(1) == [old[1]]
    assert pages.find([1, 2, 3, 4, 5], "")[0] == [old[0]]


def test_more_than_there_is_cannot_be_allocated():
    pages = PageAllocator(3, 4)
    assert pages.allocate(3) is None
    assert len(pages.allocate(2)) == 2
    assert pages.allocate(1) is None


def run(scheduler: Scheduler, parts) -> None:
    """Pretend that a step was computed, and that every drawn token was 7."""
    for part in parts:
        if part.draws and not part.sequence.is_finished:
            part.sequence.num_pending -= 1
            part.sequence.output.append(7)
            if len(part.sequence.output) >= part.sequence.max_tokens:
                scheduler.finish(part.sequence, FinishReason.LENGTH)


def test_a_step_has_single_tokens_first_and_parts_of_prompts_after_them():
    scheduler = Scheduler(Limits(max_num_seqs=4, max_num_batched_tokens=10, max_model_len=64), PageAllocator(40, 4))
    scheduler.add(make_sequence(0, prompt=[1] * 6))
    run(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(1, prompt=[2] * 25))
    parts = scheduler.schedule()
    assert [(p.sequence.request_id, p.count, p.draws) for p in parts] == [("0", 1, True), ("1", 9, False)]
    run(scheduler, parts)
    assert [(p.count, p.draws) for p in scheduler.schedule()] == [(1, True), (9, False)]


def test_prompts_that_are_scored_take_no_more_rows_than_there_are():
    scheduler = Scheduler(Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64), PageAllocator(40, 4))
    scheduler.add(make_sequence(0, prompt=[1] * 10, prompt_logprobs=0))
    scheduler.add(make_sequence(1, prompt=[1] * 5))
    parts = scheduler.schedule()
    assert [(p.count, p.num_logits) for p in parts] == [(4, 4)]


@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_ends_and_leaks_nothing(seed):
    numbers = random.Random(seed)
    pages = PageAllocator(17, 4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=60)
    scheduler = Scheduler(limits, pages)
    everything: list[Sequence] = []
    for step in range(3000):
        if step < 200 and numbers.random() < 0.3:
            prompt = [numbers.choice([1, 2])] * numbers.randint(1, 40)
            everything.append(
                make_sequence(
                    step,
                    prompt=prompt,
                    max_tokens=numbers.randint(1, 20),
                    **numbers.choice([{}, {"prompt_logprobs": 0}]),
                )
            )
            everything[-1].priority = numbers.randint(0, 1)
            scheduler.add(everything[-1])
        if everything and numbers.random() < 0.05:
            scheduler.finish(numbers.choice(everything), FinishReason.ABORT)
        parts = scheduler.schedule()
        assert sum(p.count for p in parts) <= 12
        assert sum(p.num_logits for p in parts) <= 4
        assert len({p.sequence.slot for p in parts}) == len(parts)
        held = [page for s in scheduler.running for page in s.pages]
        assert 0 not in held
        for part in parts:
            assert len(part.sequence.pages) * 4 >= part.start + part.count
        run(scheduler, parts)
        if step > 200 and not scheduler.has_work:
            break
    assert all(sequence.is_finished for sequence in everything)
    assert pages.num_held == 0
    assert scheduler.num_preemptions > 0
