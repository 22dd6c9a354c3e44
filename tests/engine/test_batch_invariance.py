"""A completion in bfloat16 does not depend on the requests beside it, on any instruction set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.kernels.cpu import library
from hfax.matrix.case import draw_weights

_VOCAB = 1000
_PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    draw_weights(model)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, _VOCAB, int(length)).tolist() for length in rng.integers(3, 200, count)]


def _written(output: Any) -> tuple[list[int], list[float]]:
    (completion,) = output.outputs
    return completion.token_ids, [one.logprob for one in completion.logprobs]


def _cases() -> list[Any]:
    """Weights and instruction sets: the processor's own and the oldest that it has; in the sweep all."""
    targets = [library.NATIVE.name, *(found.name for found in library.available_instruction_sets())]
    oldest = targets[min(1, len(targets) - 1)]
    cases = []
    for weights in ("bfloat16", "int8", "int4"):
        for target in targets:
            is_chosen = (weights, target) in (("bfloat16", targets[0]), ("bfloat16", oldest), ("int4", oldest))
            cases.append(pytest.param(weights, target, marks=() if is_chosen else pytest.mark.sweep))
    return cases


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("weights", "target"), _cases())
def test_a_completion_alone_is_the_one_among_others(
    folder: Path, weights: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of more than 65,536 numbers were XLA's, and products of few and of many rows added in different orders.

    Without bfloat16 dot products, int8 and int4 weights are dequantized for steps of more than 128 tokens (docs/serving.md).
    """
    monkeypatch.setenv("HFAX_CPU_TARGET", target)
    quantization = None if weights == "bfloat16" else weights
    model = AutoModelForTPU.from_pretrained(folder, dtype="bfloat16", quantization=quantization)
    prompts = _prompts(3, seed=0)
    most = 512 if quantization is None else 128
    config = EngineConfig(enable_prefix_caching=False, max_num_batched_tokens=most)
    with Engine(model, config=config) as engine:
        alone = [_written(engine.generate([prompt], _PARAMS)[0]) for prompt in prompts]
        among = engine.generate(prompts + _prompts(12, seed=1), _PARAMS)[: len(prompts)]
    for (tokens, log_probs), output in zip(alone, among, strict=True):
        found, found_log_probs = _written(output)
        assert found == tokens
        # the same logits; log-probabilities are sums over the vocabulary, in XLA's order
        np.testing.assert_allclose(found_log_probs, log_probs, atol=5e-6)
