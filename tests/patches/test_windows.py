"""Longformer's and LED's windows with global tokens, and decoders that give no mask to a single token."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.matrix.case import draw_weights

_SIZES = {
    "d_model": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
}
CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "longformer": (
        "LongformerModel",
        lambda: transformers.LongformerConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            vocab_size=199,
            max_position_embeddings=514,
            attention_window=[8, 12],
            pad_token_id=1,
        ),
    ),
    "led": (
        "LEDForConditionalGeneration",
        lambda: transformers.LEDConfig(
            **_SIZES,
            vocab_size=199,
            max_encoder_position_embeddings=514,
            max_decoder_position_embeddings=128,
            attention_window=[8, 12],
        ),
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        lambda: transformers.FSMTConfig(
            **_SIZES,
            src_vocab_size=199,
            tgt_vocab_size=199,
            langs=["en", "de"],
            max_position_embeddings=64,
        ),
    ),
}
IDS = torch.randint(4, 199, (3, 37), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, 30:] = MASK[1, 5:] = 0
IDS[MASK == 0] = 1


def global_tokens(*places: tuple[int, int]) -> torch.Tensor:
    found = torch.zeros_like(IDS)
    for row, column in places:
        found[row, column] = 1
    return found


FIRST = global_tokens((0, 0), (1, 0), (2, 0))
SETTINGS: dict[str, dict[str, torch.Tensor]] = {
    "no mask": {},
    "padding": {"attention_mask": MASK},
    "another number of global tokens in each row": {
        "attention_mask": MASK,
        "global_attention_mask": FIRST | global_tokens((0, 5), (0, 9), (2, 36)),
    },
    "global tokens without padding": {"global_attention_mask": FIRST},
    "a row without global tokens": {"attention_mask": MASK, "global_attention_mask": global_tokens((0, 3), (2, 0))},
    "no global token": {"attention_mask": MASK, "global_attention_mask": torch.zeros_like(IDS)},
    "a global token in the padding": {"attention_mask": MASK, "global_attention_mask": FIRST | global_tokens((1, 20))},
}
Load = Callable[[str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A random model in plain transformers and in hfax, by its name in `CONFIGS`."""

    @functools.cache
    def both(name: str) -> tuple[Any, Any]:
        class_name, make = CONFIGS[name]
        folder: Path = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(make())
        draw_weights(model)
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval(), AutoModelForTPU.from_pretrained(folder)

    return both


@pytest.mark.parametrize("setting", SETTINGS)
def test_windows_with_global_tokens(load: Load, setting: str) -> None:
    plain, ours = load("longformer")
    with torch.no_grad():
        expected = plain(input_ids=IDS, **SETTINGS[setting]).last_hidden_state.numpy()
    found = np.asarray(ours(input_ids=IDS, **SETTINGS[setting]).last_hidden_state)
    np.testing.assert_allclose(found, expected, atol=2e-5)  # padding, too: its context is zero


def test_global_tokens_are_marked_in_their_own_mask(load: Load) -> None:
    with pytest.raises(InvalidInputError, match="global_attention_mask"):
        load("longformer")[1](input_ids=IDS, attention_mask=MASK + FIRST)


def test_attention_weights_are_refused(load: Load) -> None:
    with pytest.raises(UnsupportedOptionError, match="attention weights"):
        load("longformer")[1](input_ids=IDS, output_attentions=True)


def test_a_question_has_three_separators(tmp_path: Path) -> None:
    config = CONFIGS["longformer"][1]()
    torch.manual_seed(0)
    transformers.LongformerForQuestionAnswering(config).save_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, task="question-answering")
    with pytest.raises(InvalidInputError, match="three separator tokens"):
        model(input_ids=IDS.clamp(min=4))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    ("name", "setting"), [("led", "padding"), ("led", "a row without global tokens"), ("fsmt", "padding")]
)
def test_unwritten_keys_are_not_read(load: Load, name: str, setting: str, num_beams: int) -> None:
    """Their decoders give no mask to a single token: it read the zeros behind the text in a cache of fixed size."""
    plain, ours = load(name)
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": num_beams, "eos_token_id": 2, "pad_token_id": 1}
    given = {"input_ids": IDS, **SETTINGS[setting], **options}
    expected = plain.generate(**given, return_dict_in_generate=True, output_logits=True)
    found = ours.generate(**given, return_dict_in_generate=True, output_logits=True)
    assert np.array_equal(np.asarray(found.sequences), expected.sequences.numpy())
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs.numpy(), atol=1e-4)
