"""Plans of fine-tuning, by arithmetic and by the TPU compiler."""

from __future__ import annotations

import json

import pytest
from published import config_of
from tiny_models import TPU_SIZES, tiny_llama_config

from hfax import InvalidInputError
from hfax.cli.app import run
from hfax.train.memory_plan import make_train_plans

LLAMA_8B = config_of("llama-3-8b", dtype=None)
SMALL = tiny_llama_config(**{**TPU_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": None})


def test_llama_3_8b_by_arithmetic():
    """8.03 thousand million numbers: 12 bytes each in training over eight chips, 2 each frozen."""
    full, lora = make_train_plans("8b", LLAMA_8B, ["v5e:2x4"], compiles=False)
    assert full.trained == 8_030_261_248
    assert full.state_bytes == pytest.approx(12 * full.trained / 8, rel=0.01)
    assert full.frozen_bytes == 0
    assert not full.fits
    assert lora.trained == 41_943_040
    assert lora.frozen_bytes == pytest.approx(2 * full.trained / 8, rel=0.01)
    assert lora.state_bytes == pytest.approx(12 * lora.trained / 8, rel=0.3)
    assert lora.fits
    assert lora.mesh == {"fsdp": 8}
    (v6e,) = make_train_plans("8b", LLAMA_8B, ["v6e:2x4"], kinds=["full"], compiles=False)
    assert v6e.fits
    (gpus,) = make_train_plans("8b", LLAMA_8B, ["h100:4"], kinds=["full"], rows=2, compiles=False)
    assert gpus.mesh == {"fsdp": 2, "tensor": 2}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_step_is_compiled_for_tpus_with_the_splash_kernel_and_its_gradient(kind, monkeypatch):
    from hfax.train.step import TrainStep

    texts = []
    compile_step = TrainStep.compile
    monkeypatch.setattr(TrainStep, "compile", lambda *args: (texts.append(found := compile_step(*args)), found)[1])
    (plan,) = make_train_plans("small", SMALL, ["v5e:2x2"], kinds=[kind], rows=4, length=256)
    assert plan.problem == ""
    assert plan.compile_s is not None
    assert plan.fits
    text = texts[0].as_text()
    assert "splash" in text
    assert text.count("tpu_custom_call") >= 3 * SMALL.num_hidden_layers  # forward, forward again, and backward
    memory = texts[0].memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(plan.state_bytes + plan.frozen_bytes, rel=0.05)
    assert memory.alias_size_in_bytes >= 0.95 * plan.state_bytes  # the state is updated in place


def test_the_command_makes_a_table(tmp_path, capsys):
    SMALL.save_pretrained(tmp_path)
    command = ["plan", str(tmp_path / "config.json"), "--train", "full,lora", "--batch", "4", "--context", "128"]
    command += ["--machines", "h100:4", "--no-compile", "--json-file", str(tmp_path / "plan.json")]
    assert run(command) == 0
    assert "state+frozen+temp." in capsys.readouterr().out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [plan["kind"] for plan in plans] == ["full", "lora"]
    assert run([*command[:3], "half", *command[4:]]) == 1


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(InvalidInputError, match="cannot be planned"):
        list(make_train_plans("small", SMALL, ["v5e:2x2"], rows=0))
    with pytest.raises(InvalidInputError, match="cannot be split"):
        list(make_train_plans("small", SMALL, ["v5e:2x4"], rows=1, compiles=False))
