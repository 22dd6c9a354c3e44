"""The classes that once gave wrong numbers without an error, beside plain transformers."""

from pathlib import Path

import pytest
import torch
from silent_classes import CLASSES, GREEDY, assert_same_text

from hfax import AutoModelForTPU
from hfax.errors import UnsupportedModelError

WITHOUT_CACHE = ("blt", "minimax_m3", "rwkv")
"""The backend refuses models whose cache it cannot use."""


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - set(WITHOUT_CACHE)))
def test_they_write_what_transformers_writes(name: str, tmp_path: Path) -> None:
    plain = CLASSES[name].save(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")
    found = model.generate(
        **CLASSES[name].inputs(), max_new_tokens=40, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    assert_same_text(found, CLASSES[name].expected(plain, 40))


@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_they_are_refused_and_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    plain = CLASSES[name].save(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")
    inputs = CLASSES[name].inputs()
    with pytest.raises(UnsupportedModelError, match="backend torch_xla does not support"):
        model.generate(**inputs, max_new_tokens=4, **GREEDY)
    with torch.no_grad():
        expected = plain(**inputs, use_cache=False).logits
    found = torch.as_tensor(model(**inputs, use_cache=False).logits)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
