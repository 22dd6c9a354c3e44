"""The package as a whole: what importing it costs and changes, what it exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import hfax
from hfax.programs.versions import version_of

SOURCE = Path(hfax.__file__).parent

STATE_OF_OTHERS = """
import json, os, sys
import torch, transformers, jax
import torch.nn.functional as F
from transformers.models.llama import modeling_llama as llama

def state():
    classes = [c for c in vars(llama).values() if isinstance(c, type) and issubclass(c, torch.nn.Module)]
    return {
        "functions": [F.linear, F.scaled_dot_product_attention, torch._check_tensor_all, torch._check_tensor_all_with,
                      torch.arange, torch.Tensor.copy_, torch.Tensor.to, llama.create_causal_mask],
        "forwards": {c.__name__: c.forward for c in classes},
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "x64": jax.config.jax_enable_x64,
        "matmul precision": jax.config.jax_default_matmul_precision,
        "attention": dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping),
        "dispatch": len(torch.overrides._get_current_function_mode_stack()),
    }

before = state()
"""


def run_python(code: str, tmp_path: Path) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HFAX_HOME": str(tmp_path), "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_hfax_imports_no_framework(tmp_path: Path) -> None:
    loaded = run_python("import hfax, sys, json; print(json.dumps(sorted(sys.modules)))", tmp_path)
    names = {name.split(".")[0] for name in json.loads(loaded)}
    assert not names & {"jax", "jaxlib", "torch", "torchax", "torch_xla", "transformers", "numpy"}


def test_importing_the_command_imports_no_framework(tmp_path: Path) -> None:
    loaded = run_python("import hfax.cli.app, sys, json; print(json.dumps(sorted(sys.modules)))", tmp_path)
    names = {name.split(".")[0] for name in json.loads(loaded)}
    assert not names & {"jax", "jaxlib", "torch", "torchax", "torch_xla", "transformers"}


COMPILED_BESIDE = """
import os, jax, torch
from torch.utils import _pytree
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.modeling_outputs, transformers.generation.utils

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, architectures=["LlamaForCausalLM"], dtype="float32")

def state():
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "accelerator": torch.accelerator.current_accelerator(),
        "random": torch.random.get_rng_state().tolist(),
        "environment": sorted(os.environ.items()),
        "pytrees": [kind for kind in _pytree.SUPPORTED_NODES if kind.__module__.split(".")[0] not in ("hfax", "torch")],
        "autocast": torch.is_autocast_enabled("cpu"),
    }

before = state()
import hfax
ids = torch.arange(1, 6)[None]
hfax.AutoModelForTPU.from_config(config).generate(ids, max_new_tokens=3, do_sample=False)
after = state()
assert after == before, [name for name in before if after[name] != before[name]]

plain, x = LlamaForCausalLM(config).eval(), torch.randn(4, 4, requires_grad=True)
work = lambda x: torch.nn.functional.gelu(x @ x.T).sum()
torch.testing.assert_close(torch.compile(work, backend="aot_eager")(x), work(x))
torch.compile(work, backend="aot_eager")(x).backward()
found = torch.compile(plain, backend="aot_eager")(ids, use_cache=False).logits
torch.testing.assert_close(found, plain(ids).logits)
layer = torch.nn.Linear(4, 4)
torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))
"""


def test_torch_compiles_and_exports_beside_hfax(tmp_path: Path) -> None:
    """torchax named a device for the whole process, and dynamo asked for streams that it does not have."""
    run_python(COMPILED_BESIDE, tmp_path)


def test_the_version_is_written_in_one_place() -> None:
    """A second one would be forgotten at a release; programs and bundles are keyed by this one, installed or not."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert "version" in project["project"]["dynamic"]
    assert SOURCE.parents[1] / project["tool"]["hatch"]["version"]["path"] == SOURCE / "__init__.py"
    assert version_of("hfax") == hfax.__version__


def test_extras_have_the_names_that_installers_compare() -> None:
    """pip before 23.3 passes over an extra with an underscore, and installs the rest with no more than a warning."""
    extras = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras if canonicalize_name(name) != name] == []


def test_public_surface() -> None:
    assert hfax.__all__ == [
        "AutoModelForTPU",
        "BackendNotAvailableError",
        "Bundle",
        "CheckpointAccessError",
        "CheckpointCorruptError",
        "CheckpointNotFoundError",
        "CompletionOutput",
        "Diagnosis",
        "Engine",
        "EngineBusyError",
        "EngineConfig",
        "EngineDeadError",
        "FinishReason",
        "ForwardPatch",
        "FunctionPatch",
        "GRPOLoss",
        "GRPOTrainer",
        "HfaxError",
        "InputPatch",
        "InvalidInputError",
        "JaxModel",
        "LoraConfig",
        "OpPatch",
        "OutOfMemoryError",
        "OutputDelta",
        "PreparedPrompt",
        "QuantizationReport",
        "RequestOutput",
        "RolloutConfig",
        "SamplingParams",
        "ShardingPlan",
        "StreamingDataset",
        "StructuredOutputsParams",
        "TokenLogprob",
        "TorchXlaModel",
        "TrainState",
        "TrainStep",
        "Trainer",
        "TrainingArguments",
        "UnsupportedAttributeError",
        "UnsupportedModelError",
        "UnsupportedOptionError",
        "Verification",
        "__version__",
        "device_processor",
        "diagnose",
        "export",
        "export_stablehlo",
        "make_train_step",
        "pipeline",
        "quantize",
        "register_patch",
        "register_pytrees",
        "shrink_config",
        "to_nnx",
        "verify",
    ]
    assert dir(hfax) == hfax.__all__
    assert (SOURCE / "py.typed").exists()


@pytest.mark.parametrize("name", hfax.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(hfax, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AutoModelForGPU'"):
        _ = hfax.AutoModelForGPU


def test_importing_and_generating_change_nothing_for_other_code(tmp_path: Path) -> None:
    """Everything hfax replaces while it traces is put back; its attention is added beside those of transformers."""
    code = (
        STATE_OF_OTHERS
        + """
import hfax
model = hfax.AutoModelForTPU.from_pretrained("demo")
model.generate([[1, 5, 6]], max_new_tokens=3, seed=0)
model(input_ids=[[1, 5, 6]])
after = state()
attention = after.pop("attention")
assert before.pop("attention").items() <= attention.items()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
"""
    )
    run_python(code, tmp_path)
