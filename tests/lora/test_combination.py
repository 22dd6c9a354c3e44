"""Weighted combinations of adapters beside peft's `add_weighted_adapter`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapted_models import WITHOUT_PEFTS_WARNINGS, base, logits, with_peft
from transformers import GPT2Config

from hfax import AutoModelForTPU, InvalidInputError, LoraConfig, UnsupportedOptionError

pytestmark = WITHOUT_PEFTS_WARNINGS

LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "cat": {},
    "linear": {},
    "svd": {},
    "svd of rank 3": {"svd_rank": 3},
    "ties": {"density": 0.6},
    "ties by frequency": {"density": 0.6, "majority_sign_method": "frequency"},
    "magnitude_prune": {"density": 0.4},
    "ties_svd": {"density": 0.6},
    "magnitude_prune_svd": {"density": 0.4},
}


def pair(tmp_path, first, second, config=None):
    """Two adapters of one checkpoint, in one model of peft's and one of hfax's."""
    plain, model = base(tmp_path / "base", config)
    for name, options, seed in (("one", first, 1), ("two", second, 2)):
        adapted = with_peft(base(tmp_path / f"base-{name}", config)[0], {"lora_alpha": 8, **options}, seed=seed)
        adapted.save_pretrained(tmp_path / name)
        model.load_adapter(tmp_path / name, name)
    import peft

    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "one", adapter_name="one")
    theirs.load_adapter(tmp_path / "two", "two")
    return theirs.eval(), model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [(0.7, 0.5), (1.0, -0.4)])
def test_outputs_are_those_of_peft(kind, weights, tmp_path):
    theirs, model = pair(tmp_path, {"r": 4, "target_modules": LAYERS}, {"r": 4, "target_modules": LAYERS})
    options = {"combination_type": kind.split()[0], **KINDS[kind]}
    theirs.add_weighted_adapter(["one", "two"], weights, "both", **options)
    theirs.set_adapter("both")
    model.add_weighted_adapter(["one", "two"], weights, "both", **options)
    assert model.active_adapters() == ["two"]
    before = logits(model)
    model.set_adapter("both")
    np.testing.assert_allclose(logits(model), logits(theirs), atol=2e-4)
    assert np.abs(logits(model) - before).max() > 1e-3


@pytest.mark.parametrize("kind", ["cat", "svd"])
def test_adapters_of_other_layers_and_ranks(kind, tmp_path):
    theirs, model = pair(
        tmp_path,
        {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "rank_pattern": {"q_proj": 2}},
        {"r": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    )
    theirs.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type=kind)
    theirs.set_adapter("both")
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type=kind)
    model.set_adapter("both")
    np.testing.assert_allclose(logits(model), logits(theirs), atol=2e-4)
    model.save_adapter(tmp_path / "both")
    again = AutoModelForTPU.from_pretrained(tmp_path / "base")
    again.load_adapter(tmp_path / "both")
    np.testing.assert_allclose(logits(again), logits(model), atol=1e-6)
    plain = base(tmp_path / "plain")[0]
    import peft

    np.testing.assert_allclose(
        logits(peft.PeftModel.from_pretrained(plain, tmp_path / "both").eval()), logits(model), atol=2e-4
    )


def test_layers_that_are_stored_turned(tmp_path):
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    options = {"r": 3, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    theirs, model = pair(tmp_path, options, options, config)
    theirs.add_weighted_adapter(["one", "two"], [1.0, 0.5], "both", combination_type="svd")
    theirs.set_adapter("both")
    model.add_weighted_adapter(["one", "two"], [1.0, 0.5], "both", combination_type="svd")
    model.set_adapter("both")
    np.testing.assert_allclose(logits(model), logits(theirs), atol=2e-4)


def test_cat_adds_up_what_both_do_and_trains_further(tmp_path):
    """The sum of the updates, merged into the weights: those of one adapter on top of the other's."""
    _, model = pair(tmp_path, {"r": 2, "target_modules": LAYERS}, {"r": 3, "target_modules": LAYERS})
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    both = logits(model)
    model.set_adapter("one")
    merged = model.merge_and_unload()
    merged.load_adapter(tmp_path / "two")
    np.testing.assert_allclose(logits(merged), both, atol=2e-4)


def test_the_active_adapter_goes_on(tmp_path):
    """A larger rank pads the arrays of the active one."""
    _, model = pair(tmp_path, {"r": 2, "target_modules": LAYERS}, {"r": 3, "target_modules": LAYERS})
    before = logits(model)
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type="cat")
    np.testing.assert_allclose(logits(model), before, atol=1e-6)
    model.add_weighted_adapter(["both"], [2.0], "twice")
    model.set_adapter("twice")
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"combination_type": "sum"}, InvalidInputError, "combination_type='sum' is unknown"),
        ({"combination_type": "dare_ties", "density": 0.5}, UnsupportedOptionError, "Use 'ties'"),
        ({"combination_type": "dare_linear", "density": 0.5}, UnsupportedOptionError, "Use 'magnitude_prune'"),
        ({"combination_type": "ties"}, InvalidInputError, "density=None does not go with"),
        ({"combination_type": "ties", "density": 0.0}, InvalidInputError, "density=0.0 does not go with"),
        ({"combination_type": "ties", "density": 2.0}, InvalidInputError, "density=2.0 does not go with"),
        ({"combination_type": "cat", "density": 0.5}, InvalidInputError, "density=0.5 does not go with"),
        ({"combination_type": "cat", "svd_rank": 2}, InvalidInputError, "svd_rank=2 does not go with"),
        (
            {"combination_type": "ties", "density": 0.5, "majority_sign_method": "most"},
            InvalidInputError,
            "'most' is unknown",
        ),
        ({"combination_type": "linear"}, InvalidInputError, "have the ranks 2, 3"),
        ({"weights": [1.0]}, InvalidInputError, "1 weights are given"),
        ({"adapters": ["one", "three"]}, InvalidInputError, "no adapter 'three'"),
        ({"adapter_name": "one"}, InvalidInputError, "already exists"),
    ],
)
def test_what_does_not_fit_is_said(options, error, words, tmp_path):
    _, model = base(tmp_path / "base")
    for name, rank in (("one", 2), ("two", 3)):
        model.add_adapter(LoraConfig(r=rank, target_modules=LAYERS), name)
    given = {"adapters": ["one", "two"], "weights": [1.0, 1.0], "adapter_name": "both", **options}
    with pytest.raises(error, match=words):
        model.add_weighted_adapter(**given)
    assert set(model.adapters.configs) == {"one", "two"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules_to_save": ["lm_head"]}, "stores weights in full"),
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
    ],
)
def test_adapters_that_change_more_are_refused(options, words, tmp_path):
    _, model = base(tmp_path / "base")
    model.add_adapter(LoraConfig(r=2, target_modules=LAYERS), "one")
    model.add_adapter(LoraConfig(r=2, target_modules=LAYERS, **options), "two")
    with pytest.raises(UnsupportedOptionError, match=words):
        model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both")


def test_a_random_small_matrix_is_pruned_as_in_peft():
    from peft.utils.merge_utils import prune

    from hfax.lora.combination import Combination

    array = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    ups = np.ones((4, 5), np.float32)
    combination = Combination(combination_type="magnitude_prune", weights=(1.0,), density=0.37)
    down, _ = combination.combined([(array, ups)], [1.0], 5)
    np.testing.assert_array_equal(down, prune(torch.tensor(array), 0.37, "magnitude").numpy())
