"""Plans: bytes equal the arithmetic, what fits fits, the compiler's part for a small model, and what cannot be planned."""

import json
import os
import re

import pytest
import transformers
from published import config_of
from tiny_models import TPU_SIZES, tiny_llama_config

from hfax import AutoModelForTPU
from hfax.cli.app import run
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.planning.chips import CHIPS
from hfax.planning.plan import make_plans

LLAMA_8B, LLAMA_70B, QWEN3_235B, DEEPSEEK_V3 = (
    config_of(name) for name in ("llama-3-8b", "llama-3-70b", "qwen3-235b-a22b", "deepseek-v3")
)
SMALL = tiny_llama_config(**TPU_SIZES)


def one(config, machine, **options):
    (plan,) = make_plans("model", config, [machine], compiles=options.pop("compiles", False), **options)
    return plan


def test_bytes_are_those_of_the_arithmetic():
    plan = one(LLAMA_8B, "v5e:2x4", batches=[4], context=8192)
    assert plan.mesh == {"tensor": 8}
    numbers = 2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert plan.weight_bytes == pytest.approx(2 * numbers / 8, rel=0.02)
    assert plan.cache_bytes == pytest.approx(4 * 8192 * 32 * 2 * 8 * 128 * 2 / 8, rel=0.02)
    assert plan.fits
    left = plan.memory_bytes - plan.weight_bytes
    per_token = plan.cache_bytes / 4 / 8192
    assert plan.longest_context == pytest.approx(left / per_token / 4, rel=0.02)
    assert plan.largest_batch == pytest.approx(left / per_token / 8192, rel=0.02)
    # a decoding step reads weights and cache once
    step = (plan.weight_bytes - 2 * 128256 * 4096 / 8 + plan.cache_bytes) / CHIPS["v5e"].bandwidth
    assert plan.tokens_per_s < 4 / step
    assert plan.tokens_per_s > 2 / step


def test_a_context_of_two_tokens_is_planned():
    plan = one(SMALL, "v5e:1x1", context=2)
    assert (plan.prompt, plan.fits) == (1, True)


def test_keys_and_values_of_8_bits_take_half_as_much():
    plain, rounded = (one(LLAMA_8B, "v5e:2x4", context=8192, kv_cache_dtype=name) for name in ("auto", "fp8"))
    assert rounded.cache_bytes == plain.cache_bytes / 2
    assert rounded.weight_bytes == plain.weight_bytes
    assert (plain.kv_cache_dtype, rounded.kv_cache_dtype) == ("auto", "fp8")


@pytest.mark.parametrize(
    ("config", "machine", "billions", "fits"),
    [
        (LLAMA_70B, "v5e:4x4", 70.6, True),
        (LLAMA_70B, "h100:1", 70.6, False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (LLAMA_70B, "v5e:2x4", 70.6, False),
                (LLAMA_70B, "v6e:2x4", 70.6, True),
                (QWEN3_235B, "v5p:2x2x2", 235, True),
                (QWEN3_235B, "v6e:2x4", 235, False),
                (DEEPSEEK_V3, "v5p:4x4x4", 671, True),
                (DEEPSEEK_V3, "v6e:4x4", 671, False),
                (LLAMA_70B, "h100:8", 70.6, True),
            )
        ),
    ],
)
def test_large_models(config, machine, billions, fits):
    plan = one(config, machine, context=8192)
    whole = plan.weight_bytes * plan.num_devices
    # what is on every device counts as often as there are devices
    assert 2e9 * billions * 0.98 <= whole <= 2e9 * billions * 1.15
    assert plan.fits is fits


def test_cpu_devices_are_parts_of_this_host():
    plan = one(LLAMA_8B, "cpu:8", context=1024)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert plan.num_devices == 8
    assert plan.memory_bytes == pytest.approx(host / 8 * 0.94, rel=1e-3)
    assert plan.weight_bytes == one(LLAMA_8B, "v5e:2x4", context=1024).weight_bytes
    assert (plan.tokens_per_s, plan.prefill_s, plan.limited_by) == (None, None, "")


def test_quantized_weights_are_smaller():
    full, int8, int4 = (one(LLAMA_8B, "v6e:2x2", quantization=kind).weight_bytes for kind in (None, "int8", "int4"))
    table = 2 * 128256 * 4096 / 4
    assert (int8 - table) / (full - table) == pytest.approx(0.508, abs=0.01)
    assert (int4 - table) / (full - table) == pytest.approx(0.258, abs=0.01)


@pytest.mark.tpu_compile
def test_the_compiler_tells_temporaries_and_messages():
    plan = one(SMALL, "v5e:2x2", context=1024, prompt=256, compiles=True)
    assert plan.mesh == {"tensor": 4}
    assert plan.temporary_bytes > 0
    assert plan.collectives["decode"]["all-reduce"] >= 2 * 2 + 1
    assert plan.collectives_per_layer >= 2
    assert plan.collective_bytes["prefill"] > plan.collective_bytes["decode"] > 0
    assert plan.compile_s > 0
    assert plan.problem == ""


def test_the_command(capfd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B.to_dict()))
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--machines", "v5e:2x4,h100:1,cpu:8", "--batch", "1,8", "--no-compile"]
    code = run(["plan", str(tmp_path / "config.json"), *options, "--json-file", str(out), "--plot", str(picture)])
    shown, errors = capfd.readouterr()
    assert code == 0, errors
    assert re.search(r"v5e:2x4\s+tensor 8\s+1\s+yes\s+2\.01", shown)
    assert "Times of what was not compiled are limits" in " ".join(shown.split())
    plans = json.loads(out.read_text())["plans"]
    assert [(p["machine"], p["batch"]) for p in plans] == [
        (m, b) for m in ("v5e:2x4", "h100:1", "cpu:8") for b in (1, 8)
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_saved_plan_says_mesh_and_quantization(tmp_path):
    plan = {"machine": "cpu", "num_devices": 1, "mesh": {"tensor": 1}, "quantization": "int8"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plans": [plan]}))
    model = AutoModelForTPU.from_pretrained("demo", plan=path)
    assert model.mesh.size == 1
    assert any(type(p).__name__ == "QuantizedArray" for p in model.params.values())
    path.write_text(json.dumps({"plans": [plan | {"machine": "v5e:2x4", "num_devices": 8}]}))
    with pytest.raises(InvalidInputError, match=re.escape("v5e:2x4 (8)")):
        AutoModelForTPU.from_pretrained("demo", plan=path)
    path.write_text("[]")
    with pytest.raises(InvalidInputError, match="is not an hfax plan"):
        AutoModelForTPU.from_pretrained("demo", plan=path)
    with pytest.raises(InvalidInputError, match="combined with parallelism"):
        AutoModelForTPU.from_pretrained("demo", plan=path, parallelism="auto")


@pytest.mark.parametrize(
    ("machine", "options", "error", "words"),
    [
        ("v9:2x2", {}, InvalidInputError, "Unknown chip 'v9'"),
        ("v5e:9x9x9", {}, InvalidInputError, "v5e:9x9x9"),
        ("h100:many", {}, InvalidInputError, "no valid device count"),
        ("v5e:2x4", {"batches": [0]}, InvalidInputError, "cannot be planned"),
        ("v5e:2x4", {"context": 64, "prompt": 64}, InvalidInputError, "cannot be planned"),
        ("v5e:2x4", {"mesh": {"tensor": 16}}, InvalidInputError, "needs 16 devices"),
    ],
)
def test_what_cannot_be_planned(machine, options, error, words):
    with pytest.raises(error, match=words):
        one(SMALL, machine, **options)


def test_models_that_do_not_write_from_ids_alone():
    with pytest.raises(UnsupportedOptionError, match="cannot be planned"):
        one(transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "v5e:2x4")
