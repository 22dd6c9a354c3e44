"""The host's loop by itself: a loop whose tokens are written down takes the place of a backend's programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from hfax.errors import InvalidInputError
from hfax.generation.generation_request import GenerationOptions, Prompts
from hfax.generation.host_loop import Generated, Progress, StopCheck, Streamer, run_generation

END, PAD, PADDED, MOST = 2, 0, 4, 40


@dataclasses.dataclass(kw_only=True)
class WrittenLoop:
    """A `DecodingLoop` whose state is the number of generated tokens and the end flags.

    Args:
        tokens: [rows, steps] int, what it generates.
        unwatched_chunk: see `DecodingLoop`.
        others: what process 0 says, given this process's value.
        limits: the limits that `advance` was called with.
        flags: the end flags that were written back.
    """

    tokens: np.ndarray
    unwatched_chunk: int | None = None
    others: Callable[[Any], Any] = lambda value: value
    limits: list[int] = dataclasses.field(default_factory=list)
    flags: list[list[bool]] = dataclasses.field(default_factory=list)

    def start(self, inputs: Any) -> dict[str, Any]:
        self.limits.append(1)
        return {"steps": 1, "finished": self.tokens[:, 0] == END}

    def advance(self, state: dict[str, Any], limit: int) -> dict[str, Any]:
        self.limits.append(limit)
        ends = (self.tokens[:, state["steps"] : limit] == END).any(axis=1)
        return {"steps": limit, "finished": state["finished"] | ends}

    def read(self, state: dict[str, Any]) -> Progress:
        prompt = np.full((len(self.tokens), PADDED), 7)
        return Progress(
            num_steps=state["steps"],
            tokens=np.concatenate([prompt, self.tokens], axis=1),
            finished=state["finished"],
        )

    def with_finished(self, state: dict[str, Any], finished: np.ndarray) -> dict[str, Any]:
        self.flags.append(finished.tolist())
        return state | {"finished": finished}

    def agree(self, value: Any) -> Any:
        return self.others(value)

    def record(self, state: dict[str, Any], name: str) -> np.ndarray | None:
        if name == "logits":
            return None
        steps = np.arange(MOST, dtype=np.float32)[:, None] + 100 * np.arange(len(self.tokens))
        return steps if name == "log_probs" else steps[..., None]


class Collected:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Any) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def run(
    loop: WrittenLoop,
    *,
    sequences: int,
    streamer: Streamer | None = None,
    stop_check: StopCheck | None = None,
    repeats: int = 1,
) -> Generated:
    given = np.full((sequences, 3), 7)
    prompts = Prompts(given=given, inputs={}, padded_length=PADDED, longest=3, num_padded_rows=len(loop.tokens))
    options = GenerationOptions(
        config=GenerationConfig(do_sample=True, num_return_sequences=repeats),
        max_new_tokens=MOST,
        seed=0,
        eos_token_ids=(END,),
        pad_token_id=PAD,
        keep=("scores", "log_probs"),
        extra_sampling={},
    )
    return run_generation(loop, {}, prompts, options, streamer=streamer, stop_check=stop_check)


def written(*ends: int | None) -> np.ndarray:
    """[len(ends), MOST]: 10, 11, … in each row, and the end token at the given step."""
    tokens = np.tile(np.arange(10, 10 + MOST), (len(ends), 1))
    for row, end in enumerate(ends):
        if end is not None:
            tokens[row, end] = END
    return tokens


@pytest.mark.parametrize(("unwatched", "limits"), [(None, [1, 40]), (16, [1, 17, 33, 40])])
def test_with_nothing_to_watch_the_backend_says_how_many_tokens_come_at_once(
    unwatched: int | None, limits: list[int]
) -> None:
    loop = WrittenLoop(tokens=written(None), unwatched_chunk=unwatched)
    generated = run(loop, sequences=1)
    assert loop.limits == limits
    assert generated.new_tokens.tolist() == [list(range(10, 50))]


def test_it_stops_at_the_first_look_after_every_sequence_has_ended() -> None:
    """The third row only pads the batch: nobody waits for it, and it is not in the result."""
    loop = WrittenLoop(tokens=written(20, 3, None), unwatched_chunk=16)
    generated = run(loop, sequences=2)
    assert loop.limits == [1, 17, 33]
    assert generated.lengths.tolist() == [21, 4]
    assert generated.new_tokens.tolist() == [[*range(10, 30), END], [10, 11, 12, END, *[PAD] * 17]]


def test_records_are_cut_where_the_tokens_are() -> None:
    generated = run(WrittenLoop(tokens=written(2, 1, None)), sequences=2)
    assert generated.logits is None
    assert generated.scores is not None
    assert generated.log_probs is not None
    assert generated.scores[..., 0].tolist() == [[0, 100], [1, 101], [2, 102]]
    assert generated.log_probs.tolist() == [[0, 1, 2], [100, 101, 0]]


def test_a_sequence_with_its_stop_string_is_marked_as_ended_while_others_go_on() -> None:
    loop = WrittenLoop(tokens=written(None, 30, None))
    loop.tokens[0] += 100
    generated = run(loop, sequences=2, stop_check=lambda ids: ids[-1] == 114)
    assert loop.flags == [[True, False, False]]
    assert loop.limits == [1, 9, 17, 25, 33]
    assert generated.lengths.tolist() == [5, 31]


def test_a_streamer_gets_the_prompt_each_token_up_to_the_end_and_the_end() -> None:
    streamer = Collected()
    loop = WrittenLoop(tokens=written(5, None))
    run(loop, sequences=1, streamer=streamer)
    assert streamer.got == [[[7, 7, 7]], *[[token] for token in range(10, 15)], [END], "end"]
    assert loop.limits[:2] == [1, 3], "the first chunks are short, so that text appears at once"


@pytest.mark.parametrize(("sequences", "repeats"), [(2, 1), (1, 3)])
def test_a_streamer_for_several_sequences_is_refused_before_anything_runs(sequences: int, repeats: int) -> None:
    loop, streamer = WrittenLoop(tokens=written(None, None, None)), Collected()
    with pytest.raises(InvalidInputError, match=f"streamer was passed for {sequences * repeats} sequences"):
        run(loop, sequences=sequences, repeats=repeats, streamer=streamer)
    assert (loop.limits, streamer.got) == ([], [])


def test_every_process_follows_process_0() -> None:
    """Whose clock chose other chunks, and whose streamer ended the sequence after 9 tokens."""

    def others(_: Any) -> Any:
        is_complete = len(loop.limits) == 3
        return is_complete, 4, np.asarray([9 if is_complete else -1]), np.asarray([False])

    loop = WrittenLoop(tokens=written(None), others=others)
    assert run(loop, sequences=1).lengths.tolist() == [9]
    assert loop.limits == [1, 5, 9]
