"""Blt, which reads bytes: 64-bit hashes of their neighbours, patches, and a rotary embedding of pairs that lie side by side.

transformers 5.23 cannot make its cache, so the cache is off.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from silent_classes import blt_config

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.kernels.target import compiling_for
from hfax.matrix.case import draw_weights

_IDS = torch.tensor([[250, 3, 77, 254, 9, 1, 100, 101], [1, 2, 251, 4, 5, 255, 30, 31]]) % 199


def _plain(**fields: Any) -> Any:
    """Plain transformers' model with drawn weights; its patcher's, too, which transformers freezes.

    The threshold lies in a gap of the entropies (4.746 and 4.765), so that rounding moves no border of a patch.
    """
    config = blt_config(**fields)
    config.patching_threshold = 4.755
    model = transformers.BltForCausalLM(config).eval()
    if model.model.patcher is not None:
        model.model.patcher.requires_grad_()
    draw_weights(model)
    return model


@pytest.fixture(scope="module", params=["a-byte", "entropy"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Plain transformers' model and hfax's, with the same weights of unit gain; patches of one byte, or by entropy."""
    fields = {} if request.param == "entropy" else {"patching_mode": "space", "patch_in_forward": False}
    plain = _plain(**fields)
    folder: Path = tmp_path_factory.mktemp("blt")
    plain.save_pretrained(folder)
    return plain, AutoModelForTPU.from_pretrained(folder)


def _error(found: Any, expected: torch.Tensor) -> float:
    return float(np.abs(np.asarray(found) - expected.numpy()).max() / expected.abs().max())


def test_logits_are_those_of_transformers(models: tuple[Any, Any]) -> None:
    """With 32 bits the hashes named other rows of the table: logits were off by more than their scale."""
    plain, model = models
    with torch.no_grad():
        expected = plain(_IDS, use_cache=False).logits
    assert _error(model(_IDS, use_cache=False).logits, expected) < 1e-5
    apply = jax.jit(lambda params, ids: model.apply(params, input_ids=ids, use_cache=False).logits)
    assert _error(apply(model.params, _IDS.numpy()), expected) < 1e-5
    assert "llama-rotation" not in model.patches_used


def test_text_is_that_of_transformers(models: tuple[Any, Any]) -> None:
    plain, model = models
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(
        torch.as_tensor(model.generate(_IDS, **options)), plain.generate(_IDS, use_cache=False, **options)
    )


def test_gradients_are_those_of_torch(models: tuple[Any, Any]) -> None:
    plain, model = models
    plain.zero_grad()
    plain(_IDS, labels=_IDS, use_cache=False).loss.backward()
    ids = jnp.asarray(_IDS.numpy(), jnp.int32)
    with compiling_for(jax.devices()[0], is_differentiated=True):
        loss = jax.grad(lambda p: model.apply(p, input_ids=ids, labels=ids, use_cache=False).loss)
        found = jax.jit(loss)(model.params)
    compared = {n: p.grad for n, p in plain.named_parameters() if n in found and p.grad is not None}
    assert len(compared) > 20
    for name, gradient in compared.items():
        atol = 2e-5 * max(float(gradient.abs().max()), 1e-3)
        np.testing.assert_allclose(np.asarray(found[name]), gradient.numpy(), atol=atol, err_msg=name)


def test_patches_by_entropy_have_other_lengths_in_each_row() -> None:
    """Else the tests above would say nothing of rows with fewer patches than others."""
    plain = _plain()
    lengths = plain.model.patcher(_IDS, patch_size=4, threshold=plain.config.patching_threshold)[1]
    counts = (lengths > 0).sum(dim=1).tolist()
    assert 2 < min(counts) < max(counts) < _IDS.shape[1]


def test_patches_of_bounded_length_are_refused_and_not_guessed() -> None:
    model: Any = AutoModelForTPU.from_config(blt_config(max_patch_length=2))
    with pytest.raises(UnsupportedModelError, match="max_patch_length=2"):
        model(_IDS, use_cache=False)
    with pytest.raises(UnsupportedModelError, match="max_patch_length=2"):
        model.generate(_IDS, max_new_tokens=2, do_sample=False)


def test_invalid_parameters_of_distributions_raise_as_in_torch() -> None:
    """torch asks whether the logits of a distribution are numbers; a trace cannot look, so the host does afterwards."""
    model: Any = AutoModelForTPU.from_config(blt_config())
    name = "model.patcher.lm_head.weight"
    model.update({name: model.params[name] * jnp.nan})
    with pytest.raises(InvalidInputError, match=r"a check of the model fails .*modeling_blt.py:\d+"):
        model(_IDS, use_cache=False)
