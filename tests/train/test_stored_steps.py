"""Programs of training steps on disk: what one process compiles, the next one reads, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hfax import AutoModelForTPU, make_train_step
from hfax.phases import listen

from .small_models import batch, make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, with an empty cache."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    make("llama", tmp_path / "llama")
    return tmp_path / "llama"


def _train(folder: Path, rate: float = 0.01, loss: Any = None) -> tuple[list[Any], list[str]]:
    """Losses, weights and optimizer state after three steps and an evaluation, and what was compiled."""
    model = AutoModelForTPU.from_pretrained(folder)
    step = make_train_step(model, optax.adamw(rate), loss)
    compiled: list[str] = []

    def note(event: Any) -> None:
        if event.name == "compile" and event.seconds is not None:
            compiled.append(event.detail)

    with listen(note):
        state, losses, inputs = step.init(seed=1), [], batch("llama", 4)
        for _ in range(3):
            state, metrics = step(state, inputs)
            losses.append(metrics["loss"])
        losses.append(step.evaluate(state.params, inputs)["loss"])
    return jax.tree.map(np.asarray, [losses, state.params, state.opt_state]), compiled


def _same(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_a_second_run_compiles_nothing(folder: Path) -> None:
    """Another learning rate is another program."""
    first, made = _train(folder)
    second, again = _train(folder)
    assert (made, again) == (["step", "evaluate"], [])
    assert _same(first, second)
    other, made = _train(folder, rate=0.02)
    assert made == ["step"]
    assert not _same(first, other)


def test_a_loss_that_calls_python_is_compiled_in_every_process(folder: Path) -> None:
    seen: list[float] = []

    def loss(apply: Any, inputs: Any) -> Any:
        value = apply(**inputs).loss
        jax.debug.callback(lambda x: seen.append(float(x)), value)
        return value

    first, made = _train(folder, loss=loss)
    second, again = _train(folder, loss=loss)
    jax.effects_barrier()
    assert made == again == ["step", "evaluate"]
    assert _same(first, second)
    assert len(seen) == 8
