"""Classes whose `generate` wrote other text than transformers', each for a reason of its own: greedy tokens and their logits."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import silent_classes
import torch
import transformers
from silent_classes import CLASSES
from silent_classes import GREEDY as _GREEDY
from silent_classes import VOCAB as _VOCAB
from silent_classes import ids as _ids
from tiny_models import tiny_llama_config

from hfax import AutoModelForTPU
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.matrix.architectures import Architecture, small_config
from hfax.matrix.case import draw_weights
from hfax.tracing import geometry
from hfax.tracing.traits import LOOP, SAME_LOOP, unlike_general_loop


def _both(cls: Any, config: Any, folder: Path) -> tuple[Any, Any]:
    """A random model of which every layer shows in the logits, in plain transformers and in hfax."""
    torch.manual_seed(0)
    plain = cls(config).eval()
    draw_weights(plain)
    plain.save_pretrained(folder)
    return cls.from_pretrained(folder).eval(), AutoModelForTPU.from_pretrained(folder)


def _assert_same_text(plain: Any, ours: Any, inputs: dict[str, Any], new_tokens: int) -> None:
    options = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, "output_logits": True, **_GREEDY}
    with torch.no_grad():
        expected = plain.generate(**inputs, **options)
    found = ours.generate(**inputs, **options)
    silent_classes.assert_same_text(found, expected)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Gives one of the seven classes in plain transformers and in hfax."""

    @functools.cache
    def load(name: str) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp(name)
        return CLASSES[name].save(folder), AutoModelForTPU.from_pretrained(folder)

    return load


@pytest.mark.parametrize("name", CLASSES)
def test_they_write_what_transformers_writes(name: str, loaded: Callable[[str], tuple[Any, Any]]) -> None:
    """NanoChat and Blt got Llama's rotation; GPT-Neo's windows ended at the cache, not the text; CTRL's token types were read;
    RecurrentGemma's convolution took the padding of a prompt's bucket for text; RWKV's layers are rescaled in every program."""
    plain, ours = loaded(name)
    found = ours.generate(
        **CLASSES[name].inputs(), max_new_tokens=12, return_dict_in_generate=True, output_logits=True, **_GREEDY
    )
    silent_classes.assert_same_text(found, CLASSES[name].expected(plain, 12))


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_sparse_layers_look_at_the_selected_keys(name: str, loaded: Callable[[str], tuple[Any, Any]]) -> None:
    """The modelling code asks for the name of the attention function; under another the layers were dense."""
    plain, ours = loaded(name)
    ids = _ids(2, 33)
    with torch.no_grad():
        expected = plain(ids).logits
    for options in ({}, {"use_cache": False}):
        found = np.asarray(ours(ids, **options).logits)
        assert np.abs(found - expected.numpy()).max() < 1e-5 * float(expected.abs().max())


@pytest.mark.sweep
@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("name", CLASSES)
def test_three_hundred_tokens_with_and_without_kernels(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than every window and bucket of theirs."""
    monkeypatch.setenv("HFAX_CPU_KERNELS", kernels)
    plain, ours = CLASSES[name].save(tmp_path), AutoModelForTPU.from_pretrained(tmp_path)
    found = ours.generate(
        **CLASSES[name].inputs(), max_new_tokens=300, return_dict_in_generate=True, output_logits=True, **_GREEDY
    )
    silent_classes.assert_same_text(found, CLASSES[name].expected(plain, 300))


def test_rwkv_rows_of_a_batch_do_not_read_each_other(loaded: Callable[[str], tuple[Any, Any]]) -> None:
    """transformers' own cached steps mix the rows of a batch; single prompts, and steps without a cache, do not."""
    plain, ours = loaded("rwkv")
    ids = _ids(3, 7)
    with torch.no_grad():
        alone = [plain.generate(row[None], max_new_tokens=12, **_GREEDY)[0].tolist() for row in ids]
    assert ours.generate(ids, max_new_tokens=12, **_GREEDY).tolist() == alone


def test_recurrent_gemma_reads_no_padding_of_a_short_prompt(loaded: Callable[[str], tuple[Any, Any]]) -> None:
    _assert_same_text(*loaded("recurrent_gemma"), {"input_ids": _ids(1, 5)}, 12)


@pytest.mark.parametrize("rows", [1, 3])
def test_florence_writes_about_the_image(loaded: Callable[[str], tuple[Any, Any]], rows: int) -> None:
    plain, ours = loaded("florence2")
    inputs, other = silent_classes.about_an_image(1, rows), silent_classes.about_an_image(2, rows)
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


def test_a_class_that_changes_the_loop_of_generation_is_refused_by_the_method() -> None:
    """hfax's loop would leave the change out, and write other text."""

    class Biased(transformers.LlamaForCausalLM):
        def _get_logits_processor(self, *args: Any, **options: Any) -> Any:
            return super()._get_logits_processor(*args, **options)

    config = tiny_llama_config()
    assert "overrides _get_logits_processor" in str(unlike_general_loop(Biased(config)))
    assert unlike_general_loop(transformers.LlamaForCausalLM(config)) is None
    for name in SAME_LOOP:
        assert set(LOOP) & set(vars(getattr(transformers, name))), f"{name} overrides nothing of the loop any more"


def test_voxtral_realtime_reads_sound_at_every_step_and_is_refused(tmp_path: Path) -> None:
    """Every new token reads the next piece of the sound: the whole of it was added to the prompt's embeddings."""
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    size |= {"intermediate_size": 32, "head_dim": 8}
    config = transformers.VoxtralRealtimeConfig(
        text_config={**size, "vocab_size": _VOCAB, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3},
        audio_config={**size, "num_mel_bins": 8, "max_position_embeddings": 128},
    )
    plain, ours = _both(transformers.VoxtralRealtimeForConditionalGeneration, config, tmp_path)
    inputs = {"input_ids": _ids(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    sound = torch.randn(2, 8, 6 * 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = plain(**inputs, input_features=sound[:, :, : 4 * 8]).logits
    found = ours(**inputs, input_features=sound[:, :, : 4 * 8]).logits
    assert (torch.as_tensor(found) - expected).abs().max() < 1e-4 * expected.abs().max()
    with pytest.raises(UnsupportedModelError, match="does not support VoxtralRealtime") as caught:
        ours.generate(**inputs, input_features=sound, max_new_tokens=2)
    assert "part of transformers' generation loop" in caught.value.why
