"""Weights saved from one mesh are read onto another, and bundles start on the mesh that they were made for."""

import json
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
import transformers

import hfax
from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError

MESHES = [None, {"tensor": 4}, {"fsdp": 8}, {"data": 2, "expert": 2, "tensor": 2}]
IDS = np.random.default_rng(0).integers(3, 120, (4, 12))
CONFIG = transformers.MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_local_experts=4,
    initializer_range=0.2,
    eos_token_id=None,
    pad_token_id=0,
)


@pytest.mark.parametrize("saved", MESHES, ids=str)
def test_resharded_on_load(saved: dict | None, tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(CONFIG, parallelism=saved)
    model.save_pretrained(tmp_path, format="orbax")
    whole = {name: np.asarray(array) for name, array in model.params.items()}
    for mesh in MESHES:
        again = AutoModelForTPU.from_pretrained(tmp_path, parallelism=mesh)
        assert again.sharding_plan() is None if mesh is None else again.sharding_plan() is not None
        for name, array in again.params.items():
            assert array.sharding == again._layout.weight(name)
            assert (np.asarray(array) == whole[name]).all()


READER = """
import json, sys
import jax, numpy as np
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: compiled.append(name) if "/compile/" in name else None)
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
tokens = np.asarray(model.generate(json.loads(sys.argv[2]), max_new_tokens=6))
print(json.dumps({"tokens": tokens.tolist(), "compiled": compiled, "mesh": dict(model.mesh.shape)}))
"""


@pytest.mark.parametrize(
    "mesh", [{"data": 2, "tensor": 4}, pytest.param({"fsdp": 2, "expert": 4}, marks=pytest.mark.sweep)], ids=str
)
def test_bundles_over_a_mesh(mesh: dict, tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(CONFIG, parallelism=mesh)
    hfax.export(model, tmp_path / "b", batch_sizes=[4], prompt_lengths=[16], max_new_tokens=6)
    settings = {"HFAX_PROGRAM_CACHE": "0"}
    command = ["-c", READER, tmp_path / "b", json.dumps(IDS.tolist())]
    done = processes.run(command, settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] == []
    assert found["mesh"] == dict(model.mesh.shape)
    assert found["tokens"] == np.asarray(model.generate(IDS, max_new_tokens=6)).tolist()
    done = processes.run(command, settings | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert done.returncode == 1
    assert "devices: 8 there, 4 here" in done.stderr


def test_tables_on_modules_are_no_longer_than_a_trace() -> None:
    """LeViT keeps a table of its biases on its modules; the trace that plans the splits must leave nothing in it."""
    config = hfax.shrink_config(transformers.LevitConfig(architectures=["LevitForImageClassification"]))
    images = np.random.default_rng(0).random((2, 3, config.image_size, config.image_size), np.float32)
    one = AutoModelForTPU.from_config(config)
    wanted = np.asarray(one(pixel_values=images).logits)
    assert np.allclose(one(pixel_values=images[:1]).logits, wanted[:1], atol=1e-5)
    split = AutoModelForTPU.from_config(config, parallelism={"tensor": 2, "data": 2})
    np.testing.assert_allclose(split(pixel_values=images).logits, wanted, atol=1e-5)
    assert isinstance(next(iter(split.params.values())), jax.Array)


def test_export_is_refused_where_the_folder_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(InvalidInputError):
        hfax.export(AutoModelForTPU.from_config(CONFIG), tmp_path)
