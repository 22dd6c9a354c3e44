"""Sequences of the engine, for tests without a model."""

from __future__ import annotations

from typing import Any

from hfax.engine.sampling_params import SamplingParams
from hfax.engine.sequence import Sequence


def make_sequence(
    arrival: int = 0, client: str = "", *, prompt: Any = (1, 2, 3), priority: int = 0, **options: Any
) -> Sequence:
    """A sequence with these sampling options, at most 8 tokens by default."""
    params = SamplingParams(**{"max_tokens": 8, **options})
    return Sequence(
        request_id=f"{client}-{arrival}" if client else str(arrival),
        index=0,
        prompt=tuple(prompt),
        params=params,
        seed=0,
        max_tokens=params.max_tokens or 0,
        stop_ids=frozenset(),
        priority=priority,
        arrival=arrival,
        client=client,
    )
