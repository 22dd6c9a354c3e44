"""What is told of a quantized checkpoint without reading its weights; that the bytes are right, each format's tests check."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_files import write_demo_gguf
from packers import fp8, plain_tensors, quantized, write
from tiny_models import SIZES, random_model

from hfax import AutoModelForTPU, diagnose
from hfax.cli.app import run
from hfax.errors import InvalidInputError
from hfax.load.config import read_any_config
from hfax.load.stored_weights import stored_weights

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import Repository, serve_hub

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 20_000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain checkpoint, and the same in FP8."""
    plain = tmp_path_factory.mktemp("plain")
    tensors, config = plain_tensors(plain, random_model(transformers.Qwen3Config(**WIDE, head_dim=64)))

    def pack(module, weight):
        values, scale, numbers = fp8(weight, (128, 128))
        return {"weight": values, "weight_scale_inv": scale}, numbers

    return plain, write(tmp_path_factory.mktemp("fp8"), quantized(tensors, pack)[0], config, FP8)


def planned(capfd, model, *options):
    assert run(["plan", str(model), "--no-compile", "--context", "64", "--json", *options]) == 0
    return json.loads(capfd.readouterr().out)["plans"]


def test_a_plan_counts_packed_weights(capfd, folders):
    """They were counted in the config's dtype: a model that fits a machine was said not to."""
    plain, packed = folders
    machines = ["--machines", "h100:1,v6e:1x1,cpu:1"]
    before, after, rounded = (
        planned(capfd, folder, *machines, *more)
        for folder, *more in ((plain,), (packed,), (packed, "--quantization", "int8"))
    )
    for whole, found, again in zip(before, after, rounded, strict=True):
        assert found["weight_bytes"] < whole["weight_bytes"]
        assert (whole["stored"], found["stored"], again["stored"]) == (None, "fp8", None)
        assert again["quantization"] == "int8"
    assert after[0]["tokens_per_s"] > before[0]["tokens_per_s"]
    assert (
        "in fp8, 64 tokens"
        in (run(["plan", str(packed), "--no-compile", "--context", "64"]), capfd.readouterr().out)[1]
    )


def test_a_plan_of_training_counts_packed_weights(capfd, folders):
    plain, packed = folders
    options = ["--machines", "h100:1", "--train", "lora"]
    (before,), (after,), (rounded,) = (
        planned(capfd, folder, *options, *more)
        for folder, *more in ((plain,), (packed,), (plain, "--quantization", "int4"))
    )
    assert rounded["frozen_bytes"] < after["frozen_bytes"] < before["frozen_bytes"]
    assert run(["plan", str(packed), "--no-compile", "--machines", "h100:1", "--train", "full"]) != 0
    assert "no gradients" in capfd.readouterr().err


def test_a_config_alone_does_not_tell_the_bytes(folders, capfd):
    config = folders[1] / "config.json"
    with pytest.raises(InvalidInputError, match="quantized with 'fp8'"):
        stored_weights(str(config), read_any_config(str(config), trust_remote_code=False))
    assert run(["plan", str(config), "--no-compile", "--machines", "h100:1"]) != 0
    assert run(["plan", str(config), "--no-compile", "--machines", "h100:1", "--quantization", "int8"]) == 0


def test_the_doctor_tells_packed_bytes(folders, capfd):
    plain, packed = (diagnose(str(folder)) for folder in folders)
    config = diagnose(str(folders[1] / "config.json"))
    assert (plain.quantization, packed.quantization, config.quantization) == (None, "fp8", "fp8")
    assert (packed.has_packed_size, config.has_packed_size) == (True, False)
    assert packed.weight_bytes < config.weight_bytes
    for model, words in (
        (folders[1], "in fp8 and "),
        (folders[1] / "config.json", "fewer as the checkpoint has them, in fp8"),
    ):
        assert run(["doctor", str(model)]) == 0
        assert words in capfd.readouterr().out


def test_a_gguf_file_is_planned_by_its_blocks(capfd, tmp_path):
    files = {
        kind: write_demo_gguf(tmp_path / f"demo-{kind.name}.gguf", kind) for kind in (Type.BF16, Type.Q8_0, Type.Q4_0)
    }
    plain, eight, four = (planned(capfd, file, "--machines", "cpu:1")[0] for file in files.values())
    assert (plain["stored"], eight["stored"], four["stored"]) == (None, "gguf", "gguf")
    assert four["weight_bytes"] < eight["weight_bytes"] < plain["weight_bytes"]
    assert diagnose(str(files[Type.Q8_0])).quantization == "gguf"
    assert diagnose(str(files[Type.BF16])).quantization is None
    assert run(["plan", str(files[Type.BF16]), "--no-compile", "--machines", "h100:1", "--train", "full"]) == 0
    loaded = AutoModelForTPU.from_pretrained(files[Type.Q8_0])
    assert eight["weight_bytes"] == sum(array.nbytes for array in loaded.params.values())


def test_of_a_repository_only_headers_are_read(folders, tmp_path):
    files = {path.name: path.read_bytes() for path in folders[1].iterdir()}
    weights = len(files["model.safetensors"])
    with serve_hub(someone__packed=Repository(files=files)) as hub:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "hfax", "plan", "someone/packed", "--no-compile", "--context", "64", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        asked = [wanted for _, path, wanted in hub.requests if path.endswith("/model.safetensors")]
    assert done.returncode == 0, done.stderr
    assert {plan["stored"] for plan in json.loads(done.stdout)["plans"]} == {"fp8"}
    ranges = [wanted.removeprefix("bytes=").split("-") for wanted in asked if wanted is not None]
    assert ranges
    assert sum(int(last) - int(first) for first, last in ranges) < weights // 2
