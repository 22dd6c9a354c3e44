"""The engine over meshes writes what it writes on one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams

_spec = importlib.util.spec_from_file_location("sharding_parity", Path(__file__).parent / "test_parity.py")
_parity = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_parity)
CONFIGS = _parity.CONFIGS


ON_EVERY_CHANGE = {("windows", 4), ("experts", 2), ("state_space", 4)}
"""Every kind of state, and both meshes, named by the size of the axis "tensor"; the sweep runs all pairs."""


def cases():
    for mesh in ({"tensor": 4}, {"data": 2, "tensor": 2}):
        for name in ("dense", "two_kv_heads", "windows", "experts", "state_space"):
            marks = () if (name, mesh["tensor"]) in ON_EVERY_CHANGE else pytest.mark.sweep
            yield pytest.param(name, mesh, marks=marks, id=f"{mesh}-{name}")


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_the_engine_writes_what_one_device_writes(name, mesh):
    config = CONFIGS[name]
    one = AutoModelForTPU.from_config(config)
    spread = AutoModelForTPU.from_config(config, parallelism=mesh)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 120, n).tolist() for n in (5, 30, 17)]
    expected = [
        np.asarray(one.generate(np.asarray([p]), max_new_tokens=8, do_sample=False))[0, len(p) :].tolist()
        for p in prompts
    ]
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=16)
    with Engine(spread, config=settings) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert engine.is_paged == (name != "state_space")
