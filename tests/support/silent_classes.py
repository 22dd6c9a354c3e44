"""Small models of the classes that once gave wrong numbers without an error, with prompts that show it.

Weights have unit gain, so that every layer affects the logits. Nothing here needs JAX: the tests of both backends use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hfax.matrix.case import draw_weights
from hfax.synthetic.shrink import shrink_config

VOCAB = 97
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def ids(rows: int, length: int) -> torch.Tensor:
    """[rows, length] int64 ordinary tokens."""
    return torch.from_numpy(np.random.default_rng(length).integers(3, VOCAB, (rows, length)))


def padded(length: int, *padding: int) -> dict[str, torch.Tensor]:
    """Prompts of [rows, length], each with so many tokens of padding on the left."""
    tokens = ids(len(padding), length)
    mask = torch.stack([(torch.arange(length) >= n).long() for n in padding])
    return {"input_ids": tokens * mask, "attention_mask": mask}


def blt_config(**fields: Any) -> Any:
    """Two hashes of 3 and 8 bytes."""
    return shrink_config(
        transformers.BltConfig(encoder_hash_byte_group_nb_functions=2, encoder_hash_byte_group_size=[3, 8], **fields)
    )


def _nanochat() -> Any:
    return shrink_config(transformers.NanoChatConfig(max_position_embeddings=512))


def _blt() -> Any:
    return blt_config()


def _deepseek() -> Any:
    """Sparse layers, of 8 keys."""
    return shrink_config(transformers.DeepseekV32Config())


def _minimax_m3() -> Any:
    """Sparse layers, of two blocks of 4 keys."""
    config = shrink_config(transformers.MiniMaxM3VLTextConfig())
    config.layer_types = ["minimax_m3_sparse"] * config.num_hidden_layers
    config.index_block_size, config.index_topk_blocks = 4, 2
    return config


def _gpt_neo() -> Any:
    return transformers.GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )


def _rwkv() -> Any:
    """Its layers are rescaled, which modelling code does to the weights the first time that it runs."""
    return transformers.RwkvConfig(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        context_length=512,
        rescale_every=1,
        tie_word_embeddings=False,
    )


def _recurrent_gemma() -> Any:
    return transformers.RecurrentGemmaConfig(
        hidden_size=32,
        lru_width=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
        vocab_size=VOCAB,
        attention_window_size=8,
    )


def _ctrl() -> Any:
    return transformers.CTRLConfig(n_embd=32, dff=64, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=512)


def _florence() -> Any:
    text = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    vision = transformers.Florence2VisionConfig(
        depths=[1, 1],
        patch_size=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[3, 1],
        patch_prenorm=[False, True],
        embed_dim=[16, 32],
        num_heads=[2, 2],
        num_groups=[2, 2],
        window_size=4,
        projection_dim=32,
        max_position_embeddings=8,
        drop_path_rate=0.0,
    )
    return transformers.Florence2Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_id=VOCAB - 1, tie_word_embeddings=False
    )


def _led() -> Any:
    """Its decoder gives no mask to a single token, which saw the unwritten end of the cache."""
    return shrink_config(transformers.LEDConfig(attention_window=[8, 8]))


def _led_prompts() -> dict[str, torch.Tensor]:
    inputs = padded(13, 4, 0)
    return {**inputs, "global_attention_mask": (inputs["attention_mask"].cumsum(1) == 1).long()}


def _fsmt() -> Any:
    """As LED."""
    return shrink_config(
        transformers.FSMTConfig(langs=["en", "de"], src_vocab_size=VOCAB, tgt_vocab_size=VOCAB, num_beams=1)
    )


def _prophetnet() -> Any:
    """As LED."""
    return shrink_config(transformers.ProphetNetConfig(add_cross_attention=True))


def about_an_image(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """For Florence-2: 32 by 32 pixels are 16 places after two halvings and a fourth, and one for their mean."""
    tokens = ids(rows, 24) % (VOCAB - 2)
    tokens[:, :17] = VOCAB - 1
    pixels = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels}


def _with_token_types() -> dict[str, torch.Tensor]:
    inputs = padded(13, 0, 4)
    return {**inputs, "token_type_ids": inputs["input_ids"] % 5}


@dataclasses.dataclass(frozen=True)
class SilentClass:
    """One of them.

    Args:
        model_class: its class in transformers.
        config: makes a small config.
        inputs: makes arguments of `generate`.
        reference_options: options of transformers' own `generate` besides greedy decoding.
    """

    model_class: Any
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    reference_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, folder: Path) -> Any:
        """The model with random weights in plain transformers, written to a folder."""
        torch.manual_seed(0)
        plain = self.model_class(self.config()).eval()
        draw_weights(plain)
        plain.save_pretrained(folder)
        return (
            plain
            if self.model_class is transformers.BltForCausalLM
            else self.model_class.from_pretrained(folder).eval()
        )

    def expected(self, plain: Any, new_tokens: int) -> Any:
        """What transformers generates: sequences and logits."""
        options = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            return plain.generate(**self.inputs(), **options, **GREEDY, **self.reference_options)


CLASSES = {
    "nanochat": SilentClass(transformers.NanoChatForCausalLM, _nanochat, lambda: padded(13, 4, 0)),
    # transformers 5.23 does not read small models of Blt back from a folder in all shapes, nor make their cache
    "blt": SilentClass(transformers.BltForCausalLM, _blt, lambda: {"input_ids": ids(2, 8)}, {"use_cache": False}),
    "florence2": SilentClass(transformers.Florence2ForConditionalGeneration, _florence, lambda: about_an_image(1)),
    "gpt_neo": SilentClass(transformers.GPTNeoForCausalLM, _gpt_neo, lambda: padded(13, 4, 0)),
    "led": SilentClass(transformers.LEDForConditionalGeneration, _led, _led_prompts),
    "fsmt": SilentClass(transformers.FSMTForConditionalGeneration, _fsmt, lambda: padded(13, 4, 0)),
    "prophetnet": SilentClass(transformers.ProphetNetForConditionalGeneration, _prophetnet, lambda: padded(13, 4, 0)),
    "ctrl": SilentClass(transformers.CTRLLMHeadModel, _ctrl, _with_token_types),
    "recurrent_gemma": SilentClass(transformers.RecurrentGemmaForCausalLM, _recurrent_gemma, lambda: padded(7, 3, 0)),
    # their modelling code asks for the name of the attention function, and passes it the selected keys by that
    "deepseek_v32": SilentClass(transformers.DeepseekV32ForCausalLM, _deepseek, lambda: padded(13, 4, 0)),
    "minimax_m3": SilentClass(transformers.MiniMaxM3VLForCausalLM, _minimax_m3, lambda: {"input_ids": ids(2, 13)}),
    # its own cached steps mix the rows of a batch
    "rwkv": SilentClass(transformers.RwkvForCausalLM, _rwkv, lambda: {"input_ids": ids(1, 5)}),
}


def assert_same_text(found: Any, expected: Any) -> None:
    """The same tokens, and logits of each step within 1e-4 of their scale."""
    for step, (mine, theirs) in enumerate(zip(found.logits, expected.logits, strict=True)):
        error = np.abs(np.asarray(mine) - theirs.numpy()).max()
        assert error < 1e-4 * float(theirs.abs().max()), f"new token {step}: {error:.1e}"
    assert np.asarray(found.sequences).tolist() == expected.sequences.tolist()
