"""`verify` finds what differs from plain transformers, and where; each difference here is made on purpose."""

import json
from pathlib import Path

import jax
import processes
import pytest
import torch
import transformers
from tiny_models import save, tiny_llama

import hfax
from hfax import AutoModelForTPU, InvalidInputError, UnsupportedModelError
from hfax.evaluation.first_difference import _part_outputs
from hfax.evaluation.reference import relative_error
from hfax.evaluation.verification import verify
from hfax.matrix.architectures import architectures, small_config
from hfax.matrix.case import draw_weights
from hfax.tracing.traced_model import TracedModel

PROMPTS = ("The", "Return a new list with the elements of the first")
_TOKENIZER = Path(hfax.__file__).parent / "demo"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(_TOKENIZER)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    model = tiny_llama(vocab_size=len(tokenizer))
    draw_weights(model)
    return save(tmp_path_factory.mktemp("verified"), model, tokenizer)


def test_a_model_that_is_right_agrees_in_numbers_and_text(folder, tokenizer):
    found = verify(AutoModelForTPU.from_pretrained(folder), tokenizer, PROMPTS, max_new_tokens=12)
    assert found.agrees
    assert [(one.outcome, one.new_tokens, one.parted_at) for one in found.prompts] == [("agrees", 12, None)] * 2
    assert max(one.forward_error for one in found.prompts) < 1e-4
    assert found.padded_error is not None
    assert found.padded_error < 1e-4
    assert found.difference is None


def test_rounding_of_bfloat16_is_no_difference(folder, tokenizer):
    model = AutoModelForTPU.from_pretrained(folder, dtype="bfloat16")
    found = verify(model, tokenizer, PROMPTS, max_new_tokens=0)
    assert found.agrees
    assert all(one.forward_error > 1e-4 and one.rounding is not None for one in found.prompts)


def test_the_first_part_and_operation_that_differ_are_named(folder, tokenizer):
    model = AutoModelForTPU.from_pretrained(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    model.update({name: model.params[name] * 1.01})
    found = verify(model, tokenizer, PROMPTS, max_new_tokens=4)
    assert not found.agrees
    assert {one.outcome for one in found.prompts} == {"forward differs"}
    assert found.difference is not None
    assert (found.difference.part, found.difference.part_class) == ("model.layers.1.mlp.up_proj", "Linear")
    assert found.difference.operation == "torch.nn.functional.linear"
    assert found.difference.operation_error == pytest.approx(0.01, rel=0.1)


def test_steps_that_differ_are_told_from_forward_passes(folder, tokenizer, monkeypatch):
    plain = TracedModel.decode_step

    def shifted(self, *args, positions: jax.Array, **kwargs):
        return plain(self, *args, positions=positions + 1, **kwargs)

    monkeypatch.setattr(TracedModel, "decode_step", shifted)
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")
    found = verify(AutoModelForTPU.from_pretrained(folder), tokenizer, PROMPTS, max_new_tokens=12)
    assert not found.agrees
    assert "text differs" in {one.outcome for one in found.prompts}
    assert found.difference is None


def test_an_encoder_decoder_agrees(tokenizer, tmp_path):
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    found = verify(AutoModelForTPU.from_pretrained(tmp_path), tokenizer, PROMPTS, max_new_tokens=8)
    assert found.agrees
    assert found.padded_error is None
    assert all(one.new_tokens > 0 for one in found.prompts)


def test_what_takes_no_text_is_verified_on_random_inputs(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    model = transformers.ViTForImageClassification(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    found = verify(AutoModelForTPU.from_pretrained(tmp_path))
    assert found.agrees
    assert [(one.prompt, one.prompt_tokens) for one in found.prompts] == [("random pixel_values (2, 3, 32, 32)", 0)]
    ours = AutoModelForTPU.from_pretrained(tmp_path)
    name = next(n for n in ours.params if n.endswith("1.mlp.fc1.weight"))
    ours.update({name: ours.params[name] * 1.01})
    found = verify(ours)
    assert not found.agrees
    assert found.difference is not None
    assert found.difference.part == name.removesuffix(".weight")
    with pytest.raises(InvalidInputError, match="does not take prompts"):
        verify(ours, None, PROMPTS)


def test_speech_is_verified_with_its_text(tmp_path):
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    found = verify(AutoModelForTPU.from_pretrained(tmp_path), max_new_tokens=6)
    assert found.agrees
    assert [one.outcome for one in found.prompts] == ["agrees"]
    assert found.prompts[0].new_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_are_verified_beside_the_prompts(dtype, tokenizer, tmp_path):
    (architecture,) = (a for a in architectures("image-text-to-text") if a.model_type == "llava")
    config = small_config(architecture)
    model = transformers.LlavaForConditionalGeneration(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    ours = AutoModelForTPU.from_pretrained(tmp_path, dtype=dtype)

    def encode(prompt, return_tensors):
        ids = torch.tensor([[3 + len(word) for word in prompt.split()]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    found = verify(ours, encode, PROMPTS, max_new_tokens=4)
    assert found.agrees, found
    assert [one.prompt for one in found.prompts[:2]] == list(PROMPTS)
    assert "pixel_values" in found.prompts[2].prompt
    assert found.not_verified is None


def test_what_cannot_be_compared_is_refused(folder, tokenizer):
    with pytest.raises(UnsupportedModelError, match="without quantization"):
        verify(AutoModelForTPU.from_pretrained(folder, quantization="int8"), tokenizer, PROMPTS)
    with pytest.raises(InvalidInputError, match="nothing to verify"):
        verify(AutoModelForTPU.from_pretrained(folder), tokenizer)


def test_errors_are_over_the_scale_and_of_real_tokens_alone():
    theirs = torch.tensor([[[0.0, 4.0], [8.0, 1.0]]])
    mine = theirs.clone()
    mine[0, 0, 0] = 2.0
    assert relative_error(mine, theirs) == 0.25
    assert relative_error(mine, theirs, torch.tensor([[False, True]])) == 0
    assert relative_error(mine[0], theirs) == float("inf")
    assert relative_error(mine * float("inf"), theirs) == float("inf")


def test_the_command_line_says_it_and_ends_with_its_exit_code(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    options = ["--prompts", file, "--max-new-tokens", "4"]
    done = processes.run(["-m", "hfax", "verify", folder, *options, "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agrees"]
    assert [one["prompt"] for one in found["prompts"]] == list(PROMPTS)
    file.write_text("\n")
    done = processes.run(["-m", "hfax", "verify", folder, *options])
    assert done.returncode == 1
    assert "has no prompts" in done.stderr


def test_looking_at_parts_changes_none_of_their_outputs():
    """A part that returns no tensor once had its output replaced by what was kept of it."""

    class Silent(torch.nn.Module):
        def forward(self, x):
            return None

    module = torch.nn.ModuleDict({"silent": Silent(), "linear": torch.nn.Linear(2, 2)})
    with _part_outputs(module) as found:
        assert module["silent"](torch.ones(2)) is None
        out = module["linear"](torch.ones(2))
    assert found["silent"] == []
    assert torch.equal(found["linear"][0], out)
