"""Hidden states and attention weights that `generate` returns, beside transformers'."""

from typing import Any

import generation_pairs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from generation_pairs import BATCH, CONFIGS, GREEDY

import hfax
from hfax.errors import UnsupportedOptionError

pairs = generation_pairs.pairs

ASKED = {"output_hidden_states": True, "output_attentions": True}
_WINDOWS = transformers.Gemma3TextConfig(
    **tiny_models.SIZES, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
)
DECODERS = {**{name: CONFIGS[name] for name in ("llama", "gpt2")}, "gemma3": _WINDOWS}
ENCODER_DECODERS = {name: CONFIGS[name] for name in ("t5", "bart")}
SEVERAL = {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-4}


def steps_agree(mine: Any, plain: Any, read: torch.Tensor | None = None) -> None:
    """Equal over steps and layers, in the prompt where it is no padding."""
    assert len(mine) == len(plain)
    for step, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            if step == 0 and read is not None:
                rows = read if a.ndim == 3 else read[:, None].expand(a.shape[:3])
                a, b = a[rows], b[rows]
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, SEVERAL], ids=["greedy", "several sequences"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_s_layers(pairs: Any, name: str, options: dict[str, Any]) -> None:
    model, plain = pairs(name, DECODERS[name])
    plain.set_attn_implementation("eager")
    options = {**GREEDY, **options, **ASKED, "max_new_tokens": 6}
    mine, theirs = model.generate(**BATCH, **options), plain.generate(**BATCH, **options)
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    read = BATCH["attention_mask"].bool().repeat_interleave(options.get("num_return_sequences", 1), dim=0)
    steps_agree(mine.hidden_states, theirs.hidden_states, read)
    steps_agree(mine.attentions, theirs.attentions, read)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_s_layers(pairs: Any, name: str) -> None:
    model, plain = pairs(name, ENCODER_DECODERS[name])
    plain.set_attn_implementation("eager")
    mask = BATCH["attention_mask"].flip(1)  # encoders are padded on the right
    options = {**GREEDY, **ASKED, "attention_mask": mask, "max_new_tokens": 6}
    mine, theirs = model.generate(BATCH["input_ids"], **options), plain.generate(BATCH["input_ids"], **options)
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    for field in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
        steps_agree(mine[field], theirs[field])
    for field in ("encoder_hidden_states", "encoder_attentions"):
        steps_agree([mine[field]], [theirs[field]], mask.bool())


def test_without_a_dict_nothing_is_computed(pairs: Any) -> None:
    model, _ = pairs("llama", CONFIGS["llama"])
    ids = model.generate(**BATCH, max_new_tokens=3, do_sample=False, output_hidden_states=True)
    assert isinstance(ids, torch.Tensor)


@pytest.mark.parametrize("beside", ["num_beams", "inputs_embeds", "past_key_values"])
def test_what_has_no_finished_text_of_its_own_is_refused(pairs: Any, beside: str) -> None:
    model, plain = pairs("llama", CONFIGS["llama"])
    given: dict[str, Any] = {**BATCH, **GREEDY}
    if beside == "num_beams":
        more: dict[str, Any] = {"num_beams": 2}
    elif beside == "inputs_embeds":
        given["inputs_embeds"], more = plain.get_input_embeddings()(given.pop("input_ids")), {}
    else:
        first = model.generate(**given)
        given["input_ids"], more = first.sequences, {"past_key_values": first.cache}
        mask = given["attention_mask"]
        given["attention_mask"] = torch.cat([mask, torch.ones(len(mask), 7, dtype=mask.dtype)], dim=1)
    with pytest.raises(UnsupportedOptionError, match=beside):
        model.generate(**given, **more, **ASKED)


def test_bfloat16_and_jax_arrays(pairs: Any) -> None:
    model, _ = pairs("llama", CONFIGS["llama"])
    narrow = hfax.AutoModelForTPU.from_pretrained(model.folder, dtype="bfloat16")
    torch_out = narrow.generate(**BATCH, **GREEDY, **ASKED)
    jax_out = narrow.generate(**{name: array.numpy() for name, array in BATCH.items()}, **GREEDY, **ASKED)
    for field in ("hidden_states", "attentions"):
        for ours, theirs in zip(torch_out[field], jax_out[field], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert isinstance(b, jax.Array)
                assert (a.dtype, b.dtype) == (torch.bfloat16, jnp.bfloat16)
                np.testing.assert_array_equal(a.float().numpy(), np.asarray(b, np.float32))
