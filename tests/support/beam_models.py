"""Small random models and options of beam search, and the claim that hfax's `generate` searches as transformers' does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hfax.matrix.architectures import Architecture, small_config
from hfax.matrix.case import draw_weights

NEW_TOKENS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"num_beams": 4},
    "ends when full": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3},
    "never ends early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 2},
    "prefers short texts": {"num_beams": 4, "length_penalty": -0.7, "num_return_sequences": 4},
    "does not repeat": {"num_beams": 4, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "num_return_sequences": 2,
                        "bad_words_ids": [[0]]},  # which, as padding, is text to transformers
    "writes more": {"num_beams": 2, "min_new_tokens": 9, "length_penalty": 0.0, "early_stopping": "never"},
    "bans words": {"num_beams": 4, "bad_words_ids": [[9], [11, 12], [5]], "suppress_tokens": [21, 22], "early_stopping": True},
    "forces tokens": {"num_beams": 4, "forced_bos_token_id": 17, "forced_eos_token_id": 19, "num_return_sequences": 3},
    "renormalizes": {"num_beams": 5, "renormalize_logits": True, "sequence_bias": [[[8], -4.0], [[13], 2.0]]},
}  # fmt: skip
"""Of each, three tokens end a text."""

ENCODER_DECODERS = {
    "marian": "MarianMTModel",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "mvp": "MvpForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}
DECODERS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi": "PhiForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}
MODELS = ENCODER_DECODERS | DECODERS
_WITHOUT_CACHE = ("recurrent_gemma", "minimax")
"""transformers' search with their caches is not its search without: their states do not follow the beams."""


@dataclasses.dataclass(frozen=True)
class BeamModel:
    """A model in plain transformers and in hfax, prompts of several lengths, and tokens that end a text.

    Args:
        plain: transformers' model.
        ours: hfax's.
        rows: prompts without padding.
        eos: three tokens that the best beams contain.
    """

    plain: Any
    ours: Any
    rows: list[list[int]]
    eos: list[int]

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """All prompts, padded on the left for a decoder, on the right for an encoder."""
        longest = max(map(len, self.rows))
        is_right = self.plain.config.is_encoder_decoder
        ids, mask = np.zeros((2, len(self.rows), longest), np.int64)
        for row, given in enumerate(self.rows):
            place = np.s_[: len(given)] if is_right else np.s_[longest - len(given) :]
            ids[row, place], mask[row, place] = given, 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}

    def one(self, row: int) -> dict[str, torch.Tensor]:
        """A prompt alone."""
        ids = torch.tensor([self.rows[row]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_plain(model_type: str, folder: Path) -> Any:
    """A random model of a type, of which every layer shows in the logits, also saved to a folder."""
    cls = getattr(transformers, MODELS[model_type])
    mapping = "seq2seq-lm" if model_type in ENCODER_DECODERS else "causal-lm"
    config: Any = small_config(Architecture(mapping=mapping, model_type=model_type, class_name=MODELS[model_type]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = cls(config).eval()
    draw_weights(plain)
    if model_type in ENCODER_DECODERS:
        plain.generation_config.decoder_start_token_id = 2
    plain.generation_config.pad_token_id = 0
    plain.generation_config.encoder_no_repeat_ngram_size = 0  # Blenderbot's default
    plain.save_pretrained(folder)
    return cls.from_pretrained(folder).eval()


def load(model_type: str, folder: Path) -> BeamModel:
    """A model with prompts and ends."""
    from hfax import AutoModelForTPU

    plain = make_plain(model_type, folder)
    task = "text2text-generation" if model_type in ENCODER_DECODERS else "text-generation"
    ours = AutoModelForTPU.from_pretrained(folder, task=task)
    numbers = np.random.default_rng(0)
    rows = [numbers.integers(3, 90, length).tolist() for length in (7, 4, 6)]
    without = BeamModel(plain=plain, ours=ours, rows=rows, eos=[])
    uses_cache = model_type not in _WITHOUT_CACHE
    texts = generate(plain, without.batch, num_beams=4, eos_token_id=None, use_cache=uses_cache).sequences
    new = texts[:, -NEW_TOKENS:]
    eos = sorted({int(new[0, 4]), int(new[1, 6]), int(new[2, 9])})
    return dataclasses.replace(without, eos=eos)


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Of either model, with scores."""
    fixed: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    fixed |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with torch.no_grad():
        return model.generate(**inputs, **fixed | options)


def assert_same_search(model: BeamModel, inputs: dict[str, Any], **options: Any) -> Any:
    """Compare ids, beams and scores of both searches; returns transformers' result."""
    options = {"eos_token_id": model.eos} | options
    uses_cache = model.plain.config.model_type not in _WITHOUT_CACHE
    theirs = generate(model.plain, inputs, **options, use_cache=uses_cache)
    ours = generate(model.ours, inputs, **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
    assert type(ours) is type(theirs)
    assert len(ours.scores) == len(theirs.scores)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-5)
    for name in ("scores", "logits"):
        found, expected = (torch.stack(getattr(result, name)) for result in (ours, theirs))
        is_equal = torch.isfinite(expected)
        assert (torch.isfinite(found) == is_equal).all()
        torch.testing.assert_close(found[is_equal], expected[is_equal], rtol=1e-4, atol=1e-4)
    return theirs
