"""Which sequences start when there is room, without a model."""

from __future__ import annotations

import dataclasses
from collections import Counter

from sequences import make_sequence

from hfax.engine.pages import PageAllocator
from hfax.engine.scheduler import Limits, Scheduler
from hfax.engine.sequence import FinishReason, Sequence


def started(scheduler: Scheduler) -> list[str]:
    """Schedule a step; what runs for the first time in it."""
    before = set(scheduler.running)
    scheduler.schedule()
    return [s.request_id for s in scheduler.running if s not in before]


def make_scheduler(*sequences: Sequence, slots: int = 2, pages: PageAllocator | None = None) -> Scheduler:
    limits = Limits(max_num_seqs=slots, max_num_batched_tokens=64, max_model_len=64, max_waiting=None)
    scheduler = Scheduler(limits, pages)
    for one in sequences:
        scheduler.add(one)
    return scheduler


def test_clients_start_in_turns():
    """Many waiting requests of one client kept another's out until all of them had run."""
    scheduler = make_scheduler(*(make_sequence(i, "greedy") for i in range(6)), make_sequence(6, "other"))
    assert started(scheduler) == ["greedy-0", "other-6"]
    scheduler.finish(scheduler.running[1], FinishReason.STOP)
    scheduler.add(make_sequence(7, "other"))
    assert started(scheduler) == ["other-7"]


def test_one_client_s_requests_start_in_order_and_all_slots_are_used():
    scheduler = make_scheduler(*(make_sequence(i, "one") for i in (2, 0, 1)))
    assert started(scheduler) == ["one-0", "one-1"]


def test_priority_comes_before_turns():
    scheduler = make_scheduler(
        make_sequence(0, "a", priority=-1),
        make_sequence(1, "a", priority=-1),
        make_sequence(2, "b"),
    )
    assert started(scheduler) == ["a-0", "a-1"]


def read(scheduler: Scheduler) -> None:
    """The host has read the tokens of the last step."""
    for one in scheduler.running + scheduler.waiting:
        one.output += [9] * one.num_pending
        one.num_pending = 0


def clients_after(scheduler: Scheduler, steps: int) -> Counter[str]:
    for _ in range(steps):
        scheduler.schedule()
        read(scheduler)
    return Counter(one.client for one in scheduler.running)


def long(arrival: int, client: str, priority: int = 0) -> Sequence:
    return dataclasses.replace(make_sequence(arrival, client, priority=priority), max_tokens=1000)


def test_a_client_with_all_slots_gives_way_to_another():
    """Long completions in every slot kept all other clients out until one ended."""
    scheduler = make_scheduler(*(long(i, "greedy") for i in range(6)), slots=4, pages=PageAllocator(200, 4))
    assert clients_after(scheduler, 3) == {"greedy": 4}
    for arrival in (6, 7, 8):
        scheduler.add(long(arrival, "other"))
    assert clients_after(scheduler, 3) == {"greedy": 4}, "one may end soon"
    assert clients_after(scheduler, 40) == {"greedy": 2, "other": 2}
    preempted = scheduler.num_preemptions
    assert preempted == 2
    assert clients_after(scheduler, 100) == {"greedy": 2, "other": 2}
    assert scheduler.num_preemptions == preempted, "nobody has more than his share"


def test_a_client_with_all_pages_gives_way_to_another():
    scheduler = make_scheduler(*(long(i, "greedy") for i in range(3)), slots=8, pages=PageAllocator(7, 8))
    clients_after(scheduler, 8)
    scheduler.add(long(6, "other"))
    found = clients_after(scheduler, 30)
    assert found["other"] == 1
    assert found["greedy"] >= 1


def test_nobody_gives_way_to_a_lower_priority():
    scheduler = make_scheduler(*(long(i, "greedy") for i in range(2)), pages=PageAllocator(200, 4))
    scheduler.schedule()
    scheduler.add(long(6, "other", priority=1))
    assert clients_after(scheduler, 40) == {"greedy": 2}
