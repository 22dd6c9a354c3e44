"""Dory runs some of its layers several times for each token, and keeps keys and values of each time."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import hfax
from hfax import AutoModelForTPU, SamplingParams
from hfax.errors import UnsupportedModelError
from hfax.kv_cache.layer_kinds import layer_kinds
from hfax.matrix.case import draw_weights

IDS = torch.randint(4, 150, (2, 11), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def save(folder: Path, **changes: object) -> transformers.DoryForCausalLM:
    config = hfax.shrink_config(transformers.DoryConfig())
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.DoryForCausalLM(config).eval()
    draw_weights(model)
    model.save_pretrained(folder)
    return model


def test_each_loop_has_layers() -> None:
    config = transformers.DoryConfig(
        num_hidden_layers=8,
        n_input_layers=2,
        n_output_layers=1,
        n_recurrent_loops=3,
        layer_types=["full_attention", "sliding_attention"] * 4,
    )
    types, kwargs = layer_kinds(config)
    assert len(kwargs) == len(types) == 8 + 2 * 5
    assert types[8:] == types[2:7] * 2


def test_loops_are_cached(tmp_path: Path) -> None:
    plain = save(tmp_path, n_recurrent_loops=3)
    expected = plain.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY).numpy()
    ours = AutoModelForTPU.from_pretrained(tmp_path)
    assert np.array_equal(np.asarray(ours.generate(IDS, **GREEDY)), expected)
    with hfax.Engine(ours) as engine:
        found = engine.generate(IDS.tolist(), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert [list(r.outputs[0].token_ids) for r in found] == expected[:, IDS.shape[1] :].tolist()


def test_a_cache_of_the_last_loop_alone_is_refused(tmp_path: Path) -> None:
    save(tmp_path, recurrent_kv_cache_mode="last_loop")
    model = AutoModelForTPU.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent_kv_cache_mode='last_loop'"):
        model.generate(IDS, **GREEDY)
