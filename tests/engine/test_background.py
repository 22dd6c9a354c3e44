"""Programs compiled beside an engine's steps: the same tokens before, while and after, and no step that waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.programs.program_cache import ProgramCache

CONFIG = EngineConfig(max_num_seqs=6, max_model_len=128, max_num_batched_tokens=64)
PROMPTS = [[5 + i, 7, 11, 3] * (1 + 5 * i) for i in range(4)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=0.0, max_tokens=5, logprobs=2),
    SamplingParams(temperature=0.8, max_tokens=6, seed=3),
    SamplingParams(temperature=0.0, max_tokens=7, repetition_penalty=1.4),
]


def _make(name: str) -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 64, "eos_token_id": None, "pad_token_id": 0}
    if name == "mamba":
        return AutoModelForTPU.from_config(transformers.MambaConfig(**sizes, num_hidden_layers=2, state_size=8))
    return AutoModelForTPU.from_config(
        transformers.LlamaConfig(
            **sizes, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
    )


def _ask(engine: Engine) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, PARAMS)]


class Gate:
    """Lets the background thread make a number of programs, and notes which threads make any."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.fails_at = ""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, trace = Gate(), ProgramCache._trace

    def gated(self: ProgramCache, name: str, *args: Any, **options: Any) -> Any:
        thread = threading.current_thread().name
        gate.threads.add(thread)
        if thread == "hfax-background-compile":
            gate.allowed.acquire()
            if name == gate.fails_at:
                raise RuntimeError("no memory for it")
        return trace(self, name, *args, **options)

    monkeypatch.setattr(ProgramCache, "_trace", gated)
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")
    yield gate
    gate.allowed.release(1000)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_tokens_are_the_same_with_any_programs_and_no_step_compiles(name: str, gate: Gate) -> None:
    model = _make(name)
    with Engine(model, config=CONFIG) as engine:
        engine.warm_up(in_background=True)
        total = engine.num_programs_left
        assert total > 2
        gate.threads.clear()
        expected = _ask(engine)
        assert engine.num_programs_left == total
        while engine.num_programs_left:
            gate.allowed.release()
            assert _ask(engine) == expected
        assert gate.threads == {"hfax-background-compile"}
        assert engine._background is not None
        assert engine._background.wait(60)
        made = set(model.parts.programs.made)
        assert _ask(engine) == expected
        assert set(model.parts.programs.made) == made
    with Engine(model, config=CONFIG) as engine:
        engine.warm_up()
        assert engine.num_programs_left == 0
        assert set(model.parts.programs.made) == made
        assert _ask(engine) == expected


def test_programs_that_cannot_be_compiled_are_done_without(gate: Gate) -> None:
    gate.fails_at = "step[64]"
    with Engine(_make("llama"), config=CONFIG) as engine:
        engine.warm_up(in_background=True)
        expected = _ask(engine)
        gate.allowed.release(1000)
        assert engine._background is not None
        assert engine._background.wait(120)
        assert engine.num_programs_left == 0
        assert engine._runner.max_step_tokens == 16
        assert _ask(engine) == expected


def test_a_closed_engine_compiles_nothing_more(gate: Gate) -> None:
    engine = Engine(_make("llama"), config=CONFIG)
    engine.warm_up(in_background=True)
    left = engine.num_programs_left
    engine.close()
    gate.allowed.release(1000)
    assert engine._background is not None
    assert engine._background.wait(60)
    assert engine.num_programs_left >= left - 1


def test_batch_invariant_engines_compile_beside_their_steps_too(gate: Gate) -> None:
    gate.allowed.release(1000)
    config = EngineConfig(max_num_seqs=6, max_model_len=128, max_num_batched_tokens=64, batch_invariant=True)
    with Engine(_make("llama"), config=config) as engine:
        engine.warm_up(in_background=True)
        before = _ask(engine)
        assert engine._background is not None
        assert engine._background.wait(120)
        assert _ask(engine) == before
