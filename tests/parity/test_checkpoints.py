"""Random checkpoints that plain transformers wrote, loaded from disk by hfax: logits and greedy tokens against transformers."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import SIZES, tiny_llama

from hfax import AutoModelForTPU

_VOCAB = SIZES["vocab_size"]
_GQA = {**SIZES, "tie_word_embeddings": False, "eos_token_id": 2}
_BASE = {name: value for name, value in _GQA.items() if name != "num_key_value_heads"}
_SMALL_HEADS = {**_GQA, "head_dim": 16}
_TOKENS = {"vocab_size": _VOCAB, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA),
    "llama, tied": ("LlamaConfig", {**_GQA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", _GQA),
    "qwen3": ("Qwen3Config", _SMALL_HEADS),
    "gemma2": ("Gemma2Config", {**_SMALL_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_SMALL_HEADS,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral with a window shorter than the prompt": ("MistralConfig", {**_GQA, "sliding_window": 8}),
    "phi3": ("Phi3Config", _GQA),
    "gpt2": ("GPT2Config", {**_TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", _BASE),
    "opt": (
        "OPTConfig",
        {
            **_TOKENS,
            "init_std": 0.2,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "falcon": ("FalconConfig", {**_BASE, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with alibi": ("FalconConfig", {**_BASE, "alibi": True, "new_decoder_architecture": False}),
    "mixtral": ("MixtralConfig", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SMALL_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mamba": ("MambaConfig", {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
}


def _left_padded(length: int = 20, num_padding: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, _VOCAB, (2, length)))
    mask = torch.ones_like(ids)
    mask[0, :num_padding] = 0
    ids[0, :num_padding] = 0
    return ids, mask


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 of the logits' scale."""
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


_ALIKE = {"llama, tied", "qwen2", "phi3", "gpt_neox", "opt", "falcon"}
"""Of which every part is in another one."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] if n in _ALIKE else []) for n in CAUSAL])
def test_logits_and_greedy_tokens_of_a_left_padded_batch_equal_transformers(name: str, tmp_path: Path) -> None:
    config_class, fields = CAUSAL[name]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**fields)).eval()
    reference.save_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path)

    ids, mask = _left_padded()
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(reference.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = reference(**inputs).logits
        tokens = reference.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
    _close(model(**inputs).logits[mask == 1], expected[mask == 1])

    model.generation_config.eos_token_id = None
    ours = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert ours.tolist() == tokens.tolist()
    if not reference.config.tie_word_embeddings:  # random tied embeddings make a model repeat its last token
        assert len(set(tokens[1, 20:].tolist())) > 2, "the text says nothing: another seed is needed"
    alone = model.generate(ids[:1, 7:], max_new_tokens=24, do_sample=False)
    assert alone[0, 13:].tolist() == ours[0, 20:].tolist()


def test_bert_forward_equals_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = transformers.BertForMaskedLM(transformers.BertConfig(**_BASE)).eval()
    reference.save_pretrained(tmp_path)
    ids, mask = _left_padded()
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask).logits
    _close(AutoModelForTPU.from_pretrained(tmp_path)(input_ids=ids, attention_mask=mask).logits, expected)


def test_t5_forward_and_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    config = transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=_VOCAB,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    config.initializer_factor = 8.0
    torch.manual_seed(3)
    reference = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        reference.lm_head.weight.normal_()
    reference.save_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path)
    ids, mask = _left_padded()
    ids, mask = ids.flip(1), mask.flip(1)
    decoder = ids[:, :5]
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits
        tokens = reference.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    _close(model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits, expected)
    model.generation_config.eos_token_id = None
    ours = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert ours.tolist() == tokens.tolist()
    assert len(set(tokens[1].tolist())) > 2, "the text says nothing: another seed is needed"


def test_bfloat16_logits_are_as_close_to_float32_as_torchs_own(tmp_path: Path) -> None:
    exact = tiny_llama(eos_token_id=2)
    rounded = exact.to(torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    exact = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, _ = _left_padded(num_padding=0)
    with torch.no_grad():
        reference = exact(ids).logits
        theirs = (rounded(ids).logits.float() - reference).abs()
    model = AutoModelForTPU.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    ours = (model(ids).logits.float() - reference).abs()
    assert ours.mean() <= 2 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()
