"""Programs of training steps over a mesh on disk: read by the next model, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiny_models

from hfax import AutoModelForTPU, make_train_step
from hfax.phases import listen


def test_a_second_run_over_a_mesh_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    folder = tiny_models.save(tmp_path / "llama", tiny_models.tiny_llama())
    ids = np.random.default_rng(0).integers(1, 97, (4, 16))
    found, compiled = [], []

    def note(event: Any) -> None:
        if event.name == "compile" and event.seconds is not None:
            compiled.append(event.detail)

    with listen(note):
        for mesh in ({"fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}, {"fsdp": 4}):
            model = AutoModelForTPU.from_pretrained(folder, parallelism=mesh)
            step = make_train_step(model, optax.adamw(0.01))
            state = step.init()
            for _ in range(2):
                state, metrics = step(state, {"input_ids": ids, "labels": ids})
            found.append(jax.tree.map(np.asarray, [metrics["loss"], state.params, state.opt_state]))
    assert compiled == ["step", "step"]  # of each mesh
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found[0], found[1])))
