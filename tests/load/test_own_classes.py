"""Models whose code is the user's: registered with transformers' auto classes, or beside the checkpoint."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from registrations import registrations_taken_back

import hfax
from hfax import AutoModelForTPU
from hfax.errors import UnsupportedModelError
from hfax.tracing.custom_code import custom_code_digest

LAYERS = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return act(self.linear(x))

def act(x):
    return torch.tanh(x)
"""
MODEL = """
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from PACKAGE.layers import Layer

class StackConfig(PretrainedConfig):
    model_type = "PACKAGE"
    def __init__(self, size=8, **kwargs):
        self.size = size
        super().__init__(**kwargs)

class Stack(PreTrainedModel):
    config_class = StackConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed, self.layer = nn.Embedding(32, config.size), Layer(config.size)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return BaseModelOutput(last_hidden_state=self.layer(self.embed(input_ids)))

AutoConfig.register("PACKAGE", StackConfig)
AutoModel.register(StackConfig, Stack)
"""
IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a package of a name that no other test uses, and gives its module of models; it can be edited and imported again."""
    monkeypatch.syspath_prepend(tmp_path)
    names: set[str] = set()

    def load(name: str, layers: str = LAYERS) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "layers.py").write_text(layers)
        (tmp_path / name / "model.py").write_text(
            MODEL.replace("PACKAGE", name).replace(", Stack)", ", Stack, exist_ok=True)")
        )
        names.add(name)
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[module]
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.model")

    with registrations_taken_back():
        yield load
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[module]


def test_an_edited_layer_in_another_file_is_another_program(package: Any, tmp_path: Path) -> None:
    """The class is in a file that has not changed."""
    for layers in (LAYERS, LAYERS.replace("torch.tanh(x)", "x.sigmoid()")):
        module = package("stack_of_layers", layers)
        torch.manual_seed(0)
        plain = module.Stack(module.StackConfig()).eval()
        plain.save_pretrained(tmp_path / "saved")
        transformers.models.auto.configuration_auto.CONFIG_MAPPING.register(
            "stack_of_layers", module.StackConfig, exist_ok=True
        )
        model = AutoModelForTPU.from_pretrained(tmp_path / "saved")
        with torch.no_grad():
            expected = plain(IDS).last_hidden_state
        np.testing.assert_allclose(model(IDS).last_hidden_state, expected, atol=1e-6)


def test_the_digest_follows_files_bytecode_and_versions(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert custom_code_digest(transformers.LlamaModel(hfax.shrink_config(transformers.LlamaConfig()))) == ""
    found = [
        custom_code_digest(package("digested", layers).Stack(sys.modules["digested.model"].StackConfig()))
        for layers in (LAYERS, LAYERS, LAYERS + "\n# a comment\n")
    ]
    assert found[0] == found[1] != found[2]
    einops = ModuleType("einops_like")
    monkeypatch.setitem(sys.modules, "einops_like", einops)
    used = []
    for version in ("1.0", "1.0", "1.1"):  # an installed package, by its version
        einops.__version__ = version  # type: ignore[attr-defined]
        module = package("digested", LAYERS.replace("import torch\n", "import torch, einops_like\n"))
        used.append(custom_code_digest(module.Stack(module.StackConfig())))
    assert used[0] == used[1] != used[2]
    made: list[str] = []
    for text in ("x + 1", "x + 1", "x + 2"):  # as in a notebook: no file
        names: dict[str, Any] = {"torch": torch, "__name__": "builtins"}
        exec(f"class Own(torch.nn.Module):\n    def forward(self, x):\n        return {text}", names)
        made.append(custom_code_digest(names["Own"]()))
    assert made[0] == made[1] != made[2] != ""


def test_an_unregistered_class_says_what_to_do(package: Any, tmp_path: Path) -> None:
    module = package("unregistered")
    module.Stack(module.StackConfig()).save_pretrained(tmp_path / "saved")
    del transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content["unregistered"]
    for read in (AutoModelForTPU.from_pretrained, hfax.diagnose):
        with pytest.raises(UnsupportedModelError, match=r"AutoConfig\.register") as raised:
            read(str(tmp_path / "saved"))
        assert "does not know" in str(raised.value)


def test_code_that_is_not_trusted_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such", "auto_map": {"AutoConfig": "configuration.Own"}}')
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    (tmp_path / "configuration.py").write_text("raise SystemExit('was run')\n")
    for read in (AutoModelForTPU.from_pretrained, hfax.diagnose):
        with pytest.raises(UnsupportedModelError, match="requires its own"):
            read(str(tmp_path))
