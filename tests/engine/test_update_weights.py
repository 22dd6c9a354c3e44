"""An engine goes on with the weights that its model has now: what a training step hands over, without another engine."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest
import transformers
from tiny_models import SIZES, tiny_llama_config

from hfax import AutoModelForTPU, Engine, EngineBusyError, EngineConfig, InvalidInputError, LoraConfig, SamplingParams

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=96, block_size=16)
PROMPTS = [np.random.default_rng(0).integers(3, 97, length).tolist() for length in (40, 7, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CONFIGS = {
    "pages": tiny_llama_config(),
    "slots": transformers.MambaConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        architectures=["MambaForCausalLM"],
    ),
}


def tokens(engine):
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def change(model, seed):
    """Other weights in place of the model's, far enough from them for other tokens."""
    keys = jax.random.split(jax.random.key(seed), len(model.params))
    model.params = {
        name: array + 0.3 * jax.random.normal(key, array.shape, array.dtype)
        for key, (name, array) in zip(keys, model.params.items(), strict=True)
    }


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_a_new_engine(kind):
    model = AutoModelForTPU.from_config(CONFIGS[kind], dtype="float32")
    change(model, 1)
    with Engine(model, config=CONFIG) as engine:
        assert engine.is_paged == (kind == "pages")
        before = tokens(engine)
        change(model, 2)
        assert tokens(engine) == before  # until it is told
        engine.update_weights()
        after = tokens(engine)
    with Engine(model, config=CONFIG) as fresh:
        assert tokens(fresh) == after != before


def test_weights_before_are_freed():
    """Training may replace them hundreds of times."""
    model = AutoModelForTPU.from_config(CONFIGS["pages"], dtype="float32")
    with Engine(model, config=CONFIG) as engine:
        tokens(engine)
        before = [weakref.ref(array) for array in model.params.values()]
        change(model, 1)
        engine.update_weights()
        tokens(engine)
        gc.collect()
        assert not any(array() is not None for array in before)


def test_cached_prefixes_are_dropped():
    model = AutoModelForTPU.from_config(CONFIGS["pages"], dtype="float32")
    with Engine(model, config=CONFIG) as engine:
        engine.generate(PROMPTS, GREEDY)
        assert [output.num_cached_tokens for output in engine.generate(PROMPTS, GREEDY)] == [32, 0, 32]
        engine.update_weights()
        assert [output.num_cached_tokens for output in engine.generate(PROMPTS, GREEDY)] == [0, 0, 0]


def test_running_requests_are_not_mixed_with_other_weights():
    model = AutoModelForTPU.from_config(CONFIGS["pages"], dtype="float32")
    with Engine(model, config=CONFIG) as engine:
        running = engine.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
        next(running)
        with pytest.raises(EngineBusyError, match="1 sequences are not finished"):
            engine.update_weights()
        running.close()
        engine.generate(PROMPTS, GREEDY)
        engine.update_weights()


def test_arrays_of_other_shapes_are_refused():
    model = AutoModelForTPU.from_config(CONFIGS["pages"], dtype="float32")
    with Engine(model, config=CONFIG) as engine:
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
        with pytest.raises(InvalidInputError, match="lora"):
            engine.update_weights()
        model.params = {name: array.astype("bfloat16") for name, array in model.params.items() if "lora" not in name}
        with pytest.raises(InvalidInputError, match="Create another engine"):
            engine.update_weights()


def test_seeded_completions_are_the_same_in_every_run():
    model = AutoModelForTPU.from_config(CONFIGS["pages"])
    sampled = [SamplingParams(n=3, max_tokens=20, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
    found = []
    for _ in range(2):
        with Engine(model, config=CONFIG) as engine:
            for _ in range(2):
                engine.update_weights()
                outputs = engine.generate(PROMPTS, sampled)
                found.append([each.token_ids for output in outputs for each in output.outputs])
    assert found[0] == found[1] == found[2] == found[3]
    assert len({tuple(ids) for ids in found[0]}) == 9
