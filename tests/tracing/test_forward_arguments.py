"""An argument that a model's forward makes no use of is an error; what transformers hands on through `**kwargs` is none."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hfax import shrink_config
from hfax.errors import InvalidInputError
from hfax.tracing.forward_arguments import known_arguments, reject_unknown

_IDS = np.array([[3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("atention_mask", "attention_mask"),
        ("input_id", "input_ids"),
        ("labls", "labels"),
        ("position_id", "position_ids"),
    ],
)
def test_a_misspelt_argument_is_an_error_that_names_the_near_one(hfax_llama: Any, name: str, near: str) -> None:
    """It disappeared in forward's `**kwargs`: the padding that it should have masked was read."""
    for call in (hfax_llama, lambda **inputs: hfax_llama.apply(hfax_llama.params, **inputs)):
        with pytest.raises(InvalidInputError, match=rf"(?s)LlamaForCausalLM.*'{name}'.*Did you mean '{near}'\?"):
            call(input_ids=_IDS, **{name: _IDS})


def test_an_argument_like_no_other_lists_those_that_are_known(hfax_llama: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"(?s)'zzz'.*forward takes .*attention_mask.*use_cache"):
        hfax_llama(input_ids=_IDS, zzz=1)


def test_what_transformers_takes_passes(hfax_llama: Any) -> None:
    given = {
        "labels": _IDS,
        "attention_mask": np.ones_like(_IDS),
        "token_type_ids": np.zeros_like(_IDS),
        "use_cache": False,
        "output_hidden_states": True,
        "logits_to_keep": 2,
        "return_dict": True,
        "num_items_in_batch": 3,
    }
    out = hfax_llama(input_ids=_IDS, **{name: value for name, value in given.items() if name != "logits_to_keep"})
    assert out.loss.shape == ()
    assert len(out.hidden_states) == hfax_llama.config.num_hidden_layers + 1
    assert hfax_llama(input_ids=_IDS, logits_to_keep=2).logits.shape[1] == 2
    reject_unknown(
        "",
        [*given, "output_attentions", "cu_seq_lens_q", "max_length_k", "shift_labels"],
        known_arguments(hfax_llama._skeleton.module),
    )


@pytest.mark.parametrize(
    ("model_class", "config", "taken", "unknown"),
    [
        (
            "CLIPModel",
            transformers.CLIPConfig,
            ("pixel_values", "return_loss", "interpolate_pos_encoding"),
            "pixel_value",
        ),
        ("BertForMaskedLM", transformers.BertConfig, ("token_type_ids", "encoder_hidden_states"), "encoder_states"),
        ("T5ForConditionalGeneration", transformers.T5Config, ("decoder_input_ids", "encoder_outputs"), "decoder_ids"),
        (
            "LlavaForConditionalGeneration",
            transformers.LlavaConfig,
            ("vision_feature_layer", "image_sizes"),
            "image_size",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            transformers.GraniteMoeHybridConfig,
            ("seq_idx", "output_router_logits"),
            "seq_id",
        ),
    ],
)
def test_names_come_from_signatures_typed_dicts_and_the_source(
    model_class: str, config: Any, taken: tuple[str, ...], unknown: str
) -> None:
    with torch.device("meta"):
        module = getattr(transformers, model_class)._from_config(shrink_config(config()))
    known = known_arguments(module)
    reject_unknown(model_class, taken, known)
    with pytest.raises(InvalidInputError, match=f"(?s){model_class}.*{unknown}.*Did you mean"):
        reject_unknown(model_class, [unknown], known)


def test_a_forward_without_kwargs_takes_what_it_names_and_a_part_may_be_named_by_its_beginning() -> None:
    class Plain(torch.nn.Module):
        def forward(self, input_ids: Any, scale: float = 1.0) -> Any:
            return input_ids

    assert known_arguments(Plain()) == (frozenset({"input_ids", "scale"}), ())
    with torch.device("meta"):
        small = shrink_config(transformers.BertConfig())
        both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small, small)
        module = transformers.EncoderDecoderModel(config=both)
    reject_unknown("EncoderDecoderModel", ["decoder_token_type_ids"], known_arguments(module))
    with pytest.raises(InvalidInputError):
        reject_unknown("EncoderDecoderModel", ["decoder_token_typ"], known_arguments(module))
