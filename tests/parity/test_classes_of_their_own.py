"""Classes whose `generate` wrote other text than transformers', each for a reason of its own: greedy tokens and their logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.matrix.architectures import Architecture, small_config
from hfax.matrix.case import draw_weights
from hfax.tracing import geometry

_VOCAB = 97
_GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _both(cls: Any, config: Any, folder: Path) -> tuple[Any, Any]:
    """A random model of which every layer shows in the logits, in plain transformers and in hfax."""
    torch.manual_seed(0)
    plain = cls(config).eval()
    draw_weights(plain)
    plain.save_pretrained(folder)
    return cls.from_pretrained(folder).eval(), AutoModelForTPU.from_pretrained(folder)


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(length).integers(3, _VOCAB, (rows, length)))


def _padded(length: int, *padding: int) -> dict[str, torch.Tensor]:
    ids = _ids(len(padding), length)
    mask = torch.stack([(torch.arange(length) >= n).long() for n in padding])
    return {"input_ids": ids * mask, "attention_mask": mask}


def _assert_same_text(plain: Any, ours: Any, inputs: dict[str, Any], new_tokens: int) -> None:
    options = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, "output_logits": True, **_GREEDY}
    with torch.no_grad():
        expected = plain.generate(**inputs, **options)
    found = ours.generate(**inputs, **options)
    for step, (mine, theirs) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert (torch.as_tensor(mine) - theirs).abs().max() < 1e-4 * theirs.abs().max(), f"new token {step}"
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_gpt_neo_windows_end_at_the_text_and_not_at_the_cache(tmp_path: Path) -> None:
    config = transformers.GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        vocab_size=_VOCAB,
        max_position_embeddings=512,
    )
    _assert_same_text(*_both(transformers.GPTNeoForCausalLM, config, tmp_path), _padded(13, 4, 0), 12)


@pytest.fixture(scope="module")
def rwkv(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Its layers are rescaled, which modelling code does to the weights the first time that it runs."""
    config = transformers.RwkvConfig(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=_VOCAB,
        context_length=64,
        rescale_every=1,
        tie_word_embeddings=False,
    )
    return _both(transformers.RwkvForCausalLM, config, tmp_path_factory.mktemp("rwkv"))


def test_rwkv_writes_what_transformers_writes_and_rescales_its_layers_in_every_program(rwkv: tuple[Any, Any]) -> None:
    _assert_same_text(*rwkv, {"input_ids": _ids(1, 5)}, 12)


def test_rwkv_rows_of_a_batch_do_not_read_each_other(rwkv: tuple[Any, Any]) -> None:
    """transformers' own cached steps mix the rows of a batch; single prompts, and steps without a cache, do not."""
    plain, ours = rwkv
    ids = _ids(3, 7)
    with torch.no_grad():
        alone = [plain.generate(row[None], max_new_tokens=12, **_GREEDY)[0].tolist() for row in ids]
    assert ours.generate(ids, max_new_tokens=12, **_GREEDY).tolist() == alone


@pytest.fixture(scope="module")
def recurrent_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    config = transformers.RecurrentGemmaConfig(
        hidden_size=32,
        lru_width=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
        vocab_size=_VOCAB,
        attention_window_size=8,
    )
    return _both(transformers.RecurrentGemmaForCausalLM, config, tmp_path_factory.mktemp("recurrent_gemma"))


@pytest.mark.parametrize("inputs", [{"input_ids": _ids(1, 5)}, _padded(7, 3, 0)], ids=["short", "left-padded"])
def test_recurrent_gemma_reads_no_padding_but_the_given(
    recurrent_gemma: tuple[Any, Any], inputs: dict[str, Any]
) -> None:
    """Its convolution took the padding of a prompt's bucket for text."""
    _assert_same_text(*recurrent_gemma, inputs, 12)


def test_ctrl_leaves_token_types_out_as_its_own_generate_does(tmp_path: Path) -> None:
    config = transformers.CTRLConfig(n_embd=32, dff=64, n_layer=2, n_head=2, vocab_size=_VOCAB, n_positions=128)
    plain, ours = _both(transformers.CTRLLMHeadModel, config, tmp_path)
    inputs = _padded(13, 0, 4)
    _assert_same_text(plain, ours, {**inputs, "token_type_ids": inputs["input_ids"] % 5}, 8)


@pytest.fixture(scope="module")
def florence(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    text = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=_VOCAB,
        max_position_embeddings=64,
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
    config = transformers.Florence2Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_id=_VOCAB - 1, tie_word_embeddings=False
    )
    folder = tmp_path_factory.mktemp("florence")
    return _both(transformers.Florence2ForConditionalGeneration, config, folder)


def _about_an_image(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """32 by 32 pixels are 16 places after two halvings and a fourth, and one for their mean."""
    ids = _ids(rows, 24) % (_VOCAB - 2)
    ids[:, :17] = _VOCAB - 1
    pixels = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


@pytest.mark.parametrize("rows", [1, 3])
def test_florence_writes_about_the_image(florence: tuple[Any, Any], rows: int) -> None:
    plain, ours = florence
    inputs, other = _about_an_image(1, rows), _about_an_image(2, rows)
    _assert_same_text(plain, ours, inputs, 8)
    with torch.no_grad():
        first, second = (plain(**i, decoder_input_ids=torch.full((rows, 1), 2)).logits for i in (inputs, other))
    assert (first - second).abs().max() > 1e-2 * first.abs().max(), (
        "the image does not matter: other weights are needed"
    )


def test_xlstm_carries_its_states_from_step_to_step(tmp_path: Path) -> None:
    config = transformers.xLSTMConfig(
        hidden_size=64, num_heads=4, num_blocks=2, num_hidden_layers=2, vocab_size=_VOCAB, qk_dim_factor=1.0
    )
    plain, ours = _both(transformers.xLSTMForCausalLM, config, tmp_path)
    _assert_same_text(plain, ours, {"input_ids": _ids(2, 5)}, 8)
    mask = torch.ones(2, 5, dtype=torch.long)
    assert ours.generate(_ids(2, 5), attention_mask=mask, max_new_tokens=1, **_GREEDY).shape == (2, 6)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=_VOCAB, decoder_start_token_id=0
    )
    return _both(transformers.T5ForConditionalGeneration, config, tmp_path_factory.mktemp("t5"))


@pytest.mark.parametrize("first", [5, 0], ids=["put in front", "there already"])
def test_ids_of_a_decoder_begin_with_its_start_token(t5: tuple[Any, Any], first: int) -> None:
    inputs = {"input_ids": _ids(2, 7), "decoder_input_ids": torch.tensor([[first, 6], [7, 8]])}
    _assert_same_text(*t5, inputs, 4)


def test_inputs_that_steps_would_not_read_are_refused_by_name(t5: tuple[Any, Any]) -> None:
    _, ours = t5
    ids, mask = _ids(2, 7), torch.tensor([[0, 1], [1, 1]])
    with pytest.raises(UnsupportedOptionError, match="inputs_embeds"):
        ours.generate(inputs_embeds=torch.zeros(2, 7, 32), max_new_tokens=2)
    with pytest.raises(UnsupportedOptionError, match="decoder_attention_mask"):
        ours.generate(ids, decoder_input_ids=ids[:, :2] * mask, decoder_attention_mask=mask, max_new_tokens=2)


def test_labels_are_left_out_as_in_transformers(t5: tuple[Any, Any]) -> None:
    _assert_same_text(*t5, {"input_ids": _ids(2, 7), "labels": _ids(2, 3)}, 2)


def test_mllama_without_a_mask_for_its_images_masks_them_as_torch_does(tmp_path: Path) -> None:
    """torch's causal attention puts the first query at the first key, where there are more keys as well."""
    text = {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "intermediate_size": 37, "cross_attention_layers": [1], "pad_token_id": 0}
    vision = {"image_size": 6, "patch_size": 2, "hidden_size": 16, "intermediate_layers_indices": [0]}
    vision |= {"vision_output_dim": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=4)
    plain, ours = _both(transformers.MllamaForConditionalGeneration, config, tmp_path)
    inputs = {
        "input_ids": _ids(2, 7),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": torch.randn(2, 1, 4, 3, 6, 6, generator=torch.Generator().manual_seed(0)),
        "aspect_ratio_ids": torch.full((2, 1), 6),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
    }
    with torch.no_grad():
        expected = plain(**inputs).logits
    assert (ours(**inputs).logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_boxes_of_udops_tokens_are_padded_as_the_tokens_are(tmp_path: Path) -> None:
    size = {"d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = transformers.UdopConfig(vocab_size=_VOCAB, **size, pad_token_id=0, decoder_start_token_id=0)
    plain, ours = _both(transformers.UdopForConditionalGeneration, config, tmp_path)
    corners = torch.rand(2, 7, 2, 2, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": _ids(2, 7), "bbox": torch.sort(corners, dim=2).values.flatten(2)}
    inputs["attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    _assert_same_text(plain, ours, inputs, 6)


def test_blip_2_over_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    size = {"d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    text = transformers.T5Config(vocab_size=_VOCAB, **size, pad_token_id=0, decoder_start_token_id=0)
    part = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
    config = transformers.Blip2Config(
        vision_config={**part, "image_size": 6, "patch_size": 2},
        qformer_config={**part, "encoder_hidden_size": 32},
        text_config=text.to_dict(),
        num_query_tokens=3,
        image_token_index=4,
    )
    _, ours = _both(transformers.Blip2ForConditionalGeneration, config, tmp_path)
    ids = torch.cat([torch.full((1, 3), 4), _ids(1, 4)], dim=1)
    with pytest.raises(UnsupportedModelError, match=r"overrides generate"):
        ours.generate(pixel_values=torch.zeros(1, 3, 6, 6), input_ids=ids, max_new_tokens=2)


def test_positions_of_a_prompt_with_sound_and_an_image_are_those_of_the_thinkers_forward() -> None:
    architecture = Architecture(
        mapping="base", model_type="qwen2_5_omni_thinker", class_name="Qwen2_5OmniThinkerForConditionalGeneration"
    )
    config = small_config(architecture)
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    start, image, sound = config.vision_start_token_id, config.image_token_id, config.audio_token_id
    merged = config.vision_config.spatial_merge_size**2
    ids = torch.tensor(
        [[5, config.audio_start_token_id, *[sound] * 4, config.audio_end_token_id, 6, start, *[image] * 4, 7]]
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 4, merged]]),
        "feature_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }
    expected = model.model.compute_3d_position_ids(
        ids, inputs["image_grid_thw"], None, None, inputs["attention_mask"], None, None, torch.tensor([16]), None
    )
    model.model.rope_deltas = None
    found = geometry.forward_positions(model, geometry.keep_on_host({n: v.numpy() for n, v in inputs.items()}))
    np.testing.assert_array_equal(found, expected)
    assert model.model.rope_deltas is None
