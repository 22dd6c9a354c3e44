"""What bad input gets, through the calls that a user makes: an error in three parts, and nothing harmed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hfax import AutoModelForTPU
from hfax.backends.jax.model import JaxModel
from hfax.errors import (
    BackendNotAvailableError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    HfaxError,
    InvalidInputError,
    OutOfMemoryError,
    UnsupportedModelError,
    UnsupportedOptionError,
)

_IDS = [[5, 17, 40, 8]]


@pytest.fixture(scope="module")
def expected(hfax_llama: JaxModel) -> list[list[int]]:
    return hfax_llama.generate(_IDS, max_new_tokens=4, do_sample=False).tolist()


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def _complains(error: type[HfaxError], *says: str) -> Any:
    """The error has all three parts, and names what is at hand."""

    class Check:
        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: Any, raised: Any, trace: Any) -> bool:
            assert isinstance(raised, error), f"{raised!r}"
            assert raised.what
            assert raised.why
            assert raised.fix
            for text in says:
                assert text in str(raised), f"{text!r} is not in: {raised}"
            return True

    return Check()


# Loading


def test_no_such_folder(tmp_path: Path) -> None:
    with _complains(CheckpointNotFoundError, "nowhere"):
        AutoModelForTPU.from_pretrained(tmp_path / "nowhere")


def test_offline_and_not_cached(tmp_path: Path) -> None:
    with _complains(CheckpointNotFoundError, "nobody/nothing"):
        AutoModelForTPU.from_pretrained("nobody/nothing", cache_dir=tmp_path, local_files_only=True)


def test_folder_without_a_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with _complains(HfaxError, "config.json"):
        AutoModelForTPU.from_pretrained(copy)


def test_unknown_model_type(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "imagined"}))
    with _complains(HfaxError, "imagined"):
        AutoModelForTPU.from_pretrained(copy)


def test_unknown_architecture(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["ImaginedForCausalLM"]}))
    with _complains(UnsupportedModelError, "ImaginedForCausalLM"):
        AutoModelForTPU.from_pretrained(copy)


@pytest.mark.parametrize("keep", [0.5, 0.01])
def test_truncated_weights(copy: Path, keep: float) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with _complains(CheckpointCorruptError, "model.safetensors"):
        AutoModelForTPU.from_pretrained(copy)


def test_weights_that_are_something_else(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"<html>rate limited</html>" * 100)
    with _complains(CheckpointCorruptError, "model.safetensors"):
        AutoModelForTPU.from_pretrained(copy)


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_misshapen_tensor(copy: Path) -> None:
    _edit(copy, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with _complains(CheckpointCorruptError, "model.norm.weight", "(63,)", "(64,)"):
        AutoModelForTPU.from_pretrained(copy)


def test_missing_and_unexpected_tensors(copy: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.7.surplus"] = tensors.pop("model.norm.weight")

    _edit(copy, change)
    with _complains(CheckpointCorruptError, "model.norm.weight", "model.layers.7.surplus"):
        AutoModelForTPU.from_pretrained(copy)


@pytest.mark.parametrize("options", [{"backend": "tensorflow"}, {"dtype": "int7"}, {"task": "poetry"}])
def test_options_that_are_none(llama_folder: Path, options: dict[str, Any]) -> None:
    with _complains(HfaxError, str(next(iter(options.values())))):
        AutoModelForTPU.from_pretrained(llama_folder, **options)


_CUSTOM_CODE = '''
import torch
from transformers import GenerationMixin, PreTrainedModel, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width=32, vocab_size=64, num_hidden_layers=2, **kwargs):
        self.width, self.vocab_size, self.num_hidden_layers = width, vocab_size, num_hidden_layers
        super().__init__(**kwargs)


class OwnAttention(torch.nn.Module):
    """Two heads, distances instead of positions, written without transformers' attention interface."""

    def __init__(self, config, index):
        super().__init__()
        self.index, self.qkv = index, torch.nn.Linear(config.width, 3 * config.width)
        self.slope = torch.nn.Parameter(torch.tensor([0.1, 0.5]))

    def forward(self, x, mask, positions, cache):
        q, k, v = (t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        start = cache.get_seq_length(self.index)
        k, v = cache.update(k, v, self.index)
        keys = torch.arange(k.shape[2], device=x.device)
        queries = torch.arange(x.shape[1], device=x.device) + start
        distance = (queries[:, None] - keys[None]).to(x.dtype)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - self.slope[:, None, None] * distance
        seen = (keys[None] <= queries[:, None])[None, None]
        if mask is not None:
            seen = seen & (mask[:, None, None, :] != 0)
        out = scores.masked_fill(~seen, -1e30).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.width)
        self.layers = torch.nn.ModuleList(OwnAttention(config, i) for i in range(config.num_hidden_layers))
        self.head = torch.nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=True, **kwargs):
        from transformers import DynamicCache

        cache = cache if cache is not None else DynamicCache()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x, attention_mask, position_ids, cache))
        return CausalLMOutputWithPast(logits=self.head(x), cache=cache)
'''


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model type that nobody has seen, with its code in the folder."""
    path = tmp_path_factory.mktemp("custom")
    (path / "modeling_own.py").write_text(_CUSTOM_CODE)
    config = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path, trust_remote_code=True), trust_remote_code=True
    )
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    save_file(plain.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_numbers_that_need_64_bits(hfax_llama: JaxModel, value: int) -> None:
    positions = torch.tensor([[0, 1, 2, value]])
    with _complains(InvalidInputError, str(value), "32 bits"):
        hfax_llama(torch.tensor(_IDS), position_ids=positions)
    with _complains(InvalidInputError, str(value), "32 bits"):
        hfax_llama(torch.tensor(_IDS).numpy(), position_ids=positions.numpy())


def test_custom_code_is_not_run_unless_trusted(custom: Path) -> None:
    with _complains(HfaxError, "trust_remote_code=True"):
        AutoModelForTPU.from_pretrained(custom)


def test_trusted_custom_code_runs_forward_and_generate(custom: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(custom, trust_remote_code=True).eval()
    ours = AutoModelForTPU.from_pretrained(custom, trust_remote_code=True)
    ids = torch.tensor([[0, 0, 9, 30, 12], [5, 17, 40, 8, 33]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask).logits
    assert (ours(ids, attention_mask=mask).logits - expected)[mask == 1].abs().max() < 1e-4 * expected.abs().max()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == plain.generate(ids, **options).tolist()


# Generation: each complaint, and the same model object goes on as before


@pytest.mark.parametrize(
    ("error", "says", "ids", "options"),
    [
        (InvalidInputError, ["300", "256"], [[3] * 300], {}),
        (InvalidInputError, ["256", "300"], _IDS, {"max_new_tokens": 300}),
        (InvalidInputError, ["at least one token"], [[]], {}),
        (InvalidInputError, ["all 0"], _IDS, {"attention_mask": [[0, 0, 0, 0]]}),
        (InvalidInputError, ["97", "0 to 96", "row 0, column 1"], [[5, 97]], {}),
        (InvalidInputError, ["-1"], [[5, -1]], {}),
        (InvalidInputError, ["float"], [[0.5, 1.5]], {}),
        (InvalidInputError, ["rectangular"], [[1, 2], [3]], {}),
        (InvalidInputError, ["(1, 3)", "(1, 4)"], _IDS, {"attention_mask": [[1, 1, 1]]}),
        (InvalidInputError, ["max_new_tokens", "0"], _IDS, {"max_new_tokens": 0}),
        (InvalidInputError, ["temperature"], _IDS, {"do_sample": True, "temperature": -1.0}),
        (InvalidInputError, ["top_p"], _IDS, {"do_sample": True, "top_p": 1.5}),
        (InvalidInputError, ["num_beams"], _IDS, {"num_beams": -4}),
        (UnsupportedOptionError, ["max_tokens", "max_new_tokens"], _IDS, {"max_tokens": 4}),
    ],
)
def test_bad_request(
    hfax_llama: JaxModel, expected: Any, error: type[HfaxError], says: list[str], ids: Any, options: dict[str, Any]
) -> None:
    with _complains(error, *says):
        hfax_llama.generate(ids, **({"max_new_tokens": 4} | options))
    assert hfax_llama.generate(_IDS, max_new_tokens=4, do_sample=False).tolist() == expected


def test_ids_outside_of_the_vocabulary_in_a_forward_pass(hfax_llama: JaxModel) -> None:
    with _complains(InvalidInputError, "97"):
        hfax_llama([[1, 97]])


def test_out_of_memory_says_how_much_was_needed_and_what_would_fit(hfax_llama: JaxModel, expected: Any) -> None:
    with _complains(OutOfMemoryError, "GB", "would fit"):
        hfax_llama(torch.ones(1 << 20, 48, dtype=torch.long), output_attentions=True)
    assert hfax_llama.generate(_IDS, max_new_tokens=4, do_sample=False).tolist() == expected


# Ctrl-C

_INTERRUPTED = """
import sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
model.generate([[1, 2]], max_new_tokens=2)
print("ready", flush=True)
while True:
    model.generate([[1, 2]], max_new_tokens=40)
"""


@pytest.mark.multiprocess
def test_ctrl_c_in_generation_ends_it_and_leaves_the_cache_usable(llama_folder: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HFAX_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _INTERRUPTED, str(llama_folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors or process.returncode == -signal.SIGINT
    assert not list(tmp_path.rglob(".writing-*"))
    again = _INTERRUPTED.partition("while True")[0]
    done = processes.run(["-c", again, llama_folder], {"HFAX_HOME": str(tmp_path)})
    assert done.stdout == "ready\n", done.stderr


def test_backends_that_are_not_here(llama_folder: Path) -> None:
    with pytest.raises(BackendNotAvailableError, match=r"pip install 'hfax\[torch-xla\]'"):
        AutoModelForTPU.from_pretrained(llama_folder, backend="torch_xla")
    with pytest.raises(InvalidInputError, match="There is no backend 'cuda'"):
        AutoModelForTPU.from_pretrained(llama_folder, backend="cuda")
    assert AutoModelForTPU.from_pretrained(llama_folder, backend="auto").backend == "jax"
