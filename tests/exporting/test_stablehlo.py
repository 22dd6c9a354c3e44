"""StableHLO: what `export_stablehlo` writes, a process with jax alone runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from tiny_models import tiny_llama_config

import hfax
import hfax.portable
from hfax import AutoModelForTPU
from hfax.errors import (
    BackendNotAvailableError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    InvalidInputError,
    UnsupportedOptionError,
)

READER = """
import json, sys
import numpy as np
import hfax.portable
model = hfax.portable.load(sys.argv[1])
prompts = json.loads(sys.argv[2])
tokens = model.generate(prompts, max_new_tokens=12)
outputs = model(input_ids=np.arange(3, 19).reshape(2, 8))
assert not {"torch", "transformers", "torchax", "orbax"} & set(sys.modules), "imported more than jax"
print(json.dumps({"tokens": tokens.tolist(), "logits": np.asarray(outputs["logits"]).tolist()}))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[hfax.AutoModelForTPU, Path]:
    model = AutoModelForTPU.from_pretrained("demo", dtype="float32")
    folder = tmp_path_factory.mktemp("stablehlo") / "portable"
    hfax.export_stablehlo(
        model,
        folder,
        batch_sizes=[2],
        prompt_lengths=[16],
        max_new_tokens=20,
        calls=[{"input_ids": np.zeros((2, 8), np.int32)}],
        do_sample=False,
    )
    return model, folder


def test_runs_without_torch_and_transformers(exported: tuple) -> None:
    model, folder = exported
    prompts = [[5, 6, 7, 8], [60, 61, 62, 63]]
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder), json.dumps(prompts)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = np.asarray(model.generate(prompts, max_new_tokens=12, do_sample=False))
    assert found["tokens"] == wanted.tolist()
    logits = np.asarray(model(input_ids=np.arange(3, 19).reshape(2, 8)).logits)
    np.testing.assert_allclose(found["logits"], logits, atol=1e-4)


def test_lowered_for_every_platform(exported: tuple) -> None:
    import jax.export

    for path in exported[1].glob("*.stablehlo"):
        assert jax.export.deserialize(bytearray(path.read_bytes())).platforms == ("cpu", "cuda", "tpu")


def test_prompts_of_unequal_length_and_what_does_not_fit(exported: tuple) -> None:
    model, folder = exported
    portable = hfax.portable.load(folder)
    tokens = portable.generate([[5, 6, 7], [60, 61, 62, 63, 64]], max_new_tokens=5, eos_token_id=[2])
    ids, mask = [[0, 0, 5, 6, 7], [60, 61, 62, 63, 64]], np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    wanted = model.generate(np.array(ids), attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert (tokens[:, 5:] == np.asarray(wanted)[:, 5:]).all()
    assert (portable.generate(np.array(ids), attention_mask=mask, max_new_tokens=5) == tokens).all()
    for prompts, new in (([[3] * 17], 1), ([[3]] * 3, 1), ([[3]], 200), ([[3]], 0)):
        with pytest.raises(InvalidInputError, match="Programs were exported for 2 x 16"):
            portable.generate(prompts, max_new_tokens=new)
    with pytest.raises(InvalidInputError, match="empty"):
        portable.generate([[]])
    with pytest.raises(InvalidInputError, match="eos_token_id has 9"):
        portable.generate([[3]], eos_token_id=list(range(9)))
    with pytest.raises(InvalidInputError, match="No program takes inputs"):
        portable(input_ids=np.zeros((1, 1)))


def test_bad_folders(exported: tuple, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"has no stablehlo\.json"):
        hfax.portable.load(tmp_path)
    model, _ = exported
    folder = tmp_path / "tpu"
    hfax.export_stablehlo(model, folder, platforms=["tpu"])
    with pytest.raises(BackendNotAvailableError, match="are for tpu"):
        hfax.portable.load(folder)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(CheckpointCorruptError, match="could not be read"):
        hfax.portable.load(folder)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    config = tiny_llama_config(hidden_size=128)
    with pytest.raises(UnsupportedOptionError, match="unquantized"):
        hfax.export_stablehlo(AutoModelForTPU.from_config(config, quantization="int8"), tmp_path / "a")
    bert = AutoModelForTPU.from_config(
        transformers.BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        task="feature-extraction",
    )
    with pytest.raises(InvalidInputError, match="nothing to export"):
        hfax.export_stablehlo(bert, tmp_path / "b")
    with pytest.raises(UnsupportedOptionError, match="beam search"):
        hfax.export_stablehlo(AutoModelForTPU.from_config(config), tmp_path / "c", num_beams=2)
    assert not list(tmp_path.iterdir())
