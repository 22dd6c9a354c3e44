"""Which sequences start when there is room, without a model."""

from __future__ import annotations

from hfax.engine.sampling_params import SamplingParams
from hfax.engine.scheduler import Limits, Scheduler
from hfax.engine.sequence import FinishReason, Sequence


def sequence(arrival: int, client: str, priority: int = 0) -> Sequence:
    return Sequence(
        request_id=f"{client}-{arrival}",
        index=0,
        prompt=(1, 2, 3),
        params=SamplingParams(),
        seed=0,
        max_tokens=8,
        stop_ids=frozenset(),
        priority=priority,
        arrival=arrival,
        client=client,
    )


def started(scheduler: Scheduler) -> list[str]:
    """Schedule a step; what runs for the first time in it."""
    before = set(scheduler.running)
    scheduler.schedule()
    return [s.request_id for s in scheduler.running if s not in before]


def make_scheduler(*sequences: Sequence) -> Scheduler:
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, max_waiting=None)
    scheduler = Scheduler(limits, None)
    for one in sequences:
        scheduler.add(one)
    return scheduler


def test_clients_start_in_turns():
    """Many waiting requests of one client kept another's out until all of them had run."""
    scheduler = make_scheduler(*(sequence(i, "greedy") for i in range(6)), sequence(6, "other"))
    assert started(scheduler) == ["greedy-0", "other-6"]
    scheduler.finish(scheduler.running[1], FinishReason.STOP)
    scheduler.add(sequence(7, "other"))
    assert started(scheduler) == ["other-7"]


def test_one_client_s_requests_start_in_order_and_all_slots_are_used():
    scheduler = make_scheduler(*(sequence(i, "one") for i in (2, 0, 1)))
    assert started(scheduler) == ["one-0", "one-1"]


def test_priority_comes_before_turns():
    scheduler = make_scheduler(sequence(0, "a", -1), sequence(1, "a", -1), sequence(2, "b"))
    assert started(scheduler) == ["a-0", "a-1"]
