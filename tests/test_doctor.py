"""A look at a model without its weights: the figures against arithmetic, the verdicts against what the model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import config_of

import hfax
from hfax.cli.app import run
from hfax.errors import InvalidInputError
from hfax.kernels.cpu import library


def test_figures_of_a_full_size_model_are_the_arithmetic() -> None:
    found = hfax.diagnose(config_of("llama-3-8b"))
    assert found.verdict == "works with patches"
    assert found.num_parameters == 8_030_261_248
    assert found.weight_bytes == 2 * found.num_parameters
    assert found.cache_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert found.state_bytes == 0
    matrices = found.num_parameters - 128256 * 4096  # all but the embedding table
    assert found.operations_per_token is not None
    attention = 32 * 32 * 128 * 256 * 2  # layers, heads, width, capacity; scores and values
    norms = 4096 * 65
    assert found.operations_per_token == 2 * (matrices - norms + attention)
    assert "linear" in found.patches
    assert found.patches["linear"]
    assert "use_cache" in found.static_arguments


def test_windows_and_states_do_not_grow() -> None:
    mamba = hfax.diagnose(transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=99))
    assert mamba.cache_bytes_per_token == 0
    assert mamba.state_bytes is not None
    assert mamba.state_bytes >= 2 * 128 * 8 * 4


def test_values_that_end_a_program_are_named_by_their_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = hfax.shrink_config(transformers.VitsConfig(architectures=["VitsModel"]))
    found = hfax.diagnose(config)
    assert found.verdict == "works with patches"
    ((line, how),) = found.value_reads.items()
    assert "modeling_vits.py" in line
    assert how == "arange()"
    config.save_pretrained(tmp_path)
    assert run(["doctor", str(tmp_path)]) == 0
    assert f"    {line}: {how}\n" in capfd.readouterr().out


_ODD = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class OddConfig(PretrainedConfig):
    model_type = "odd"
    hidden_size = 4
    vocab_size = 9


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids):
        x = self.table(input_ids)
        if x.sum() > 0:
            x = -x
        x = torch.geqrf(x)[0]
        x = x.to(torch.float64) + torch.geqrf(x)[0]
        return BaseModelOutput(last_hidden_state=x * int(x.max()))
"""


def test_everything_in_the_way_is_listed_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "modeling_odd.py").write_text(_ODD)
    auto_map = {"AutoConfig": "modeling_odd.OddConfig", "AutoModel": "modeling_odd.OddModel"}
    config = {"model_type": "odd", "architectures": ["OddModel"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = hfax.diagnose(tmp_path, trust_remote_code=True)
    line = _ODD.splitlines().index("        if x.sum() > 0:") + 1
    assert found.verdict == "fails"
    assert list(found.unsupported_operations.values()) == ["geqrf", "geqrf"]
    assert [place.split(":")[-1] for place in found.unsupported_operations] == [
        f"{line + n} in forward" for n in (2, 3)
    ]
    assert [place.split(":")[-1] for place in found.value_reads] == [f"{line + n} in forward" for n in (0, 4)]
    assert list(found.wide_dtypes.values()) == ["float64"]
    assert len(found.problems) == 2  # values are read between programs
    assert all("modeling_odd.py" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (transformers.ViTConfig(), "image-classification"),
        (transformers.Wav2Vec2Config(), "audio-classification"),
        (transformers.WhisperConfig(), "automatic-speech-recognition"),
        (transformers.CLIPConfig(), "zero-shot-image-classification"),
    ],
)
def test_models_of_images_and_sound_are_traced_too(config: Any, task: str) -> None:
    found = hfax.diagnose(config, task=task)
    assert found.verdict == "works with patches", found.problems
    assert not found.unsupported_operations
    assert not found.value_reads


def test_check_compares_a_small_copy_with_transformers() -> None:
    config = hfax.shrink_config(config_of("llama-3-8b"))
    assert hfax.diagnose(config, check=True).checked == "agrees"


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="config"):
        hfax.diagnose(tmp_path)


def test_command_prints_json_and_its_exit_code_is_the_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hfax.shrink_config(config_of("llama-3-8b")).save_pretrained(tmp_path / "good")
    hfax.shrink_config(transformers.XLNetConfig(architectures=["XLNetLMHeadModel"])).save_pretrained(tmp_path / "bad")
    capfd.readouterr()
    assert run(["doctor", "--json", str(tmp_path / "good")]) == 0
    good = json.loads(capfd.readouterr().out)
    assert good["class_name"] == "LlamaForCausalLM"
    assert good["cpu_kernels"] == str(library.kernels())
    assert run(["doctor", str(tmp_path / "good")]) == 0
    assert f"  cpu kernels      {library.kernels()}\n" in capfd.readouterr().out
    assert run(["doctor", "--json", str(tmp_path / "bad")]) == 1
    assert json.loads(capfd.readouterr().out)["problems"]
