"""A completion does not depend on the requests beside it, on any instruction set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.kernels.cpu import library
from hfax.matrix.case import draw_weights

_VOCAB = 1000
_PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)


_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def _saved(model: torch.nn.Module, folder: Path) -> Path:
    torch.manual_seed(0)
    draw_weights(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES))
    return _saved(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def folder_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS))
    return _saved(model, tmp_path_factory.mktemp("qwen3-moe"))


@pytest.fixture(scope="module")
def folder_of_layer_norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are stored as inputs by outputs, and its norms subtract means."""
    config = transformers.GPT2Config(
        vocab_size=_VOCAB, n_embd=256, n_layer=2, n_head=4, n_positions=512, bos_token_id=None, eos_token_id=None
    )
    return _saved(transformers.GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2"))


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, _VOCAB, int(length)).tolist() for length in rng.integers(3, 200, count)]


def _written(output: Any) -> tuple[list[int], list[float]]:
    (completion,) = output.outputs
    return completion.token_ids, [one.logprob for one in completion.logprobs]


_TARGETS = [library.NATIVE.name, *(found.name for found in library.available_instruction_sets())]
_OLDEST = _TARGETS[min(1, len(_TARGETS) - 1)]


def _cases(names: tuple[str, ...], chosen: set[tuple[str, str]]) -> list[Any]:
    """Every name on every instruction set; those that are not chosen are in the sweep."""
    return [
        pytest.param(name, target, marks=() if (name, target) in chosen else pytest.mark.sweep)
        for name in names
        for target in _TARGETS
    ]


def _alone_and_among(model: Any, config: EngineConfig) -> list[tuple[Any, Any]]:
    """Tokens and log-probabilities of three prompts, one after the other and among twelve others."""
    prompts = _prompts(3, seed=0)
    with Engine(model, config=config) as engine:
        alone = [_written(engine.generate([prompt], _PARAMS)[0]) for prompt in prompts]
        among = [_written(output) for output in engine.generate(prompts + _prompts(12, seed=1), _PARAMS)]
    return list(zip(alone, among, strict=False))


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("weights", "target"),
    _cases(("bfloat16", "int8", "int4"), {("bfloat16", _TARGETS[0]), ("bfloat16", _OLDEST), ("int4", _OLDEST)}),
)
def test_a_completion_alone_is_the_one_among_others(
    folder: Path, weights: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of more than 65,536 numbers were XLA's, and products of few and of many rows added in different orders.

    Without bfloat16 dot products, int8 and int4 weights are dequantized for steps of more than 128 tokens (docs/serving.md).
    """
    monkeypatch.setenv("HFAX_CPU_TARGET", target)
    quantization = None if weights == "bfloat16" else weights
    model = AutoModelForTPU.from_pretrained(folder, dtype="bfloat16", quantization=quantization)
    most = 512 if quantization is None else 128
    config = EngineConfig(enable_prefix_caching=False, max_num_batched_tokens=most)
    for (tokens, log_probs), (found, found_log_probs) in _alone_and_among(model, config):
        assert found == tokens
        # the same logits; log-probabilities are sums over the vocabulary, in XLA's order
        np.testing.assert_allclose(found_log_probs, log_probs, atol=5e-6)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("named", "target"),
    _cases(
        (
            "folder float32",
            "folder bfloat16 int8",
            "folder float32 int4",
            "folder_of_layer_norms float32",
            "folder_of_layer_norms bfloat16",
            "folder_of_experts float32",
            "folder_of_experts bfloat16",
            "folder_of_experts bfloat16 int4",
        ),
        {("folder float32", _TARGETS[0]), ("folder_of_experts bfloat16", _OLDEST)},
    ),
)
def test_with_batch_invariant_every_bit_is_the_same(
    named: str, target: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """XLA sums rows of 4 and of 64 in different orders: products, norms, the routers' softmax, log-probabilities."""
    monkeypatch.setenv("HFAX_CPU_TARGET", target)
    folder, dtype, *quantization = named.split()
    model = AutoModelForTPU.from_pretrained(
        request.getfixturevalue(folder), dtype=dtype, quantization=quantization[0] if quantization else None
    )
    config = EngineConfig(enable_prefix_caching=False, batch_invariant=True)
    for alone, among in _alone_and_among(model, config):
        assert alone == among


@pytest.mark.usefixtures("cpu_kernels")
def test_batch_invariant_is_refused_for_products_that_the_kernels_lack(folder: Path) -> None:
    model = AutoModelForTPU.from_pretrained(folder, dtype="float16")
    with pytest.raises(UnsupportedModelError, match="dot_general of float16"):
        Engine(model, config=EngineConfig(batch_invariant=True))


def test_batch_invariant_is_refused_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_CPU_KERNELS", "0")
    model = AutoModelForTPU.from_pretrained(folder)
    with pytest.raises(UnsupportedOptionError, match="requires hfax's CPU kernels"):
        Engine(model, config=EngineConfig(batch_invariant=True))
