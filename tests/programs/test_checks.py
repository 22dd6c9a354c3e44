"""What the host makes of what a program says of its inputs."""

from typing import Any

import numpy as np
import pytest
import transformers

from hfax.errors import InvalidInputError
from hfax.programs.checks import raise_unread
from hfax.tracing.traits import read_traits

_PIXELS, _IDS = np.zeros((1, 3, 2, 2), np.float32), np.zeros((1, 4), np.int32)


def _traits(is_encoder_decoder: bool) -> Any:
    if is_encoder_decoder:
        config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
        return read_traits(transformers.T5ForConditionalGeneration(config))
    return read_traits(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    )


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
def test_pixels_that_nobody_reads_are_an_error_that_names_them(is_encoder_decoder: bool) -> None:
    with pytest.raises(InvalidInputError, match="pixel_values"):
        raise_unread(["pixel_values"], {"pixel_values": _PIXELS}, _traits(is_encoder_decoder))


def test_masks_positions_and_what_a_decoder_ignores_by_itself_may_go_unread() -> None:
    names = ["attention_mask", "position_ids", "mm_token_type_ids", "token_type_ids"]
    raise_unread(names, dict.fromkeys(names, _IDS), _traits(False))
    raise_unread(names[:2], dict.fromkeys(names[:2], _IDS), _traits(True))
    with pytest.raises(InvalidInputError, match="token_type_ids"):
        raise_unread(names, dict.fromkeys(names, _IDS), _traits(True))
