"""A model as a module of flax.nnx."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import tiny_llama_config
from transformers import GPT2Config, T5Config

from hfax import AutoModelForTPU, InvalidInputError, LoraConfig, UnsupportedOptionError, to_nnx

IDS = np.random.default_rng(0).integers(1, 64, (2, 7)).astype(np.int32)
LLAMA = tiny_llama_config(attention_dropout=0.2)


@pytest.fixture
def model():
    """A small Llama."""
    return AutoModelForTPU.from_config(LLAMA)


def test_parameters_have_the_torch_modules_names_and_are_the_models_own_arrays(model):
    module = to_nnx(model)
    paths = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert set(paths) == set(model.params)
    for name, leaf in paths.items():
        assert leaf.get_value() is model.params[name]
    assert module.model.layers[1].mlp.up_proj.weight.get_value() is model.params["model.layers.1.mlp.up_proj.weight"]
    graph, state = nnx.split(module)
    again = nnx.merge(graph, state)
    np.testing.assert_array_equal(again(input_ids=IDS).logits, module(input_ids=IDS).logits)
    nnx.display(module)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, architectures=["GPT2LMHeadModel"]),
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            architectures=["T5ForConditionalGeneration"],
        ),
    ],
)
def test_modules_with_tied_weights_and_buffers_compute_what_the_model_does(config):
    model = AutoModelForTPU.from_config(config)
    module = to_nnx(model)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if config.is_encoder_decoder else {})
    found = nnx.jit(lambda module: module(**inputs).logits)(module)
    np.testing.assert_allclose(np.asarray(found), np.asarray(model(**inputs).logits), atol=1e-4)


def test_training_it_and_taking_the_values_back(model):
    module = to_nnx(model)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(module, optimizer, key):
        traces.append(1)
        loss, gradients = nnx.value_and_grad(
            lambda m: m(input_ids=IDS, labels=IDS, use_cache=False, dropout_rng=key).loss
        )(module)
        optimizer.update(module, gradients)
        return loss

    rngs = nnx.Rngs(0)
    before = {name: np.asarray(array) for name, array in model.params.items()}
    losses = [float(step(module, optimizer, rngs.dropout())) for _ in range(6)]
    assert len(traces) == 1
    assert losses[-1] < losses[0]
    for name, array in model.params.items():
        np.testing.assert_array_equal(np.asarray(array), before[name])  # nothing happened to the model yet
    model.update(module)
    np.testing.assert_allclose(
        np.asarray(model(input_ids=IDS).logits), np.asarray(module(input_ids=IDS).logits), atol=1e-5
    )
    model.update(nnx.state(module, nnx.Param))
    model.update({"lm_head.weight": before["lm_head.weight"]})
    np.testing.assert_array_equal(np.asarray(model.params["lm_head.weight"]), before["lm_head.weight"])


def test_what_does_not_fit_is_refused(model):
    with pytest.raises(InvalidInputError, match="is not a weight of"):
        model.update({"lm_head.weight": np.zeros((3, 3), np.float32)})
    with pytest.raises(InvalidInputError, match="is not a weight of"):
        model.update({"no.such.weight": np.zeros((3, 3), np.float32)})
    with pytest.raises(InvalidInputError, match="holds no weights"):
        model.update(7)
    model.add_adapter(LoraConfig(r=2))
    with pytest.raises(UnsupportedOptionError, match="active adapter"):
        to_nnx(model)
    packed = AutoModelForTPU.from_config(LLAMA, quantization="int8")
    with pytest.raises(UnsupportedOptionError, match="quantized"):
        to_nnx(packed)


def test_plain_jax_transformations_work_on_it(model):
    graph, params, rest = nnx.split(to_nnx(model), nnx.Param, ...)

    def loss(params):
        return nnx.merge(graph, params, rest)(input_ids=IDS, labels=IDS).loss

    found = dict(nnx.to_flat_state(jax.jit(jax.grad(loss))(params)))
    expected = jax.jit(jax.grad(lambda p: model.apply(p, input_ids=IDS, labels=IDS).loss))(model.params)
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf.get_value(), expected[".".join(map(str, path))], atol=1e-6)
