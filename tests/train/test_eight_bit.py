"""Optimizers with moments in 8 bits: their numbers, their memory, and what they learn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfax import Trainer, TrainingArguments, UnsupportedOptionError
from hfax.kernels.target import compiling_for
from hfax.train import eight_bit
from hfax.train.eight_bit import EightBitMoment, block_of, decode, encode, with_eight_bit_moments
from hfax.train.memory_plan import make_train_plans
from hfax.train.optimizers import Weights, make_optimizer

from .small_models import make, rows
from .test_plan import LLAMA_8B

SHAPES = {"tall.weight": (512, 16), "odd.weight": (96, 64), "embed.weight": (256, 64), "few.weight": (256, 8)}
"""Blocks of 256 and of 32 elements, and weights whose moments are float32: an embedding's, and a small one's."""
CODED = ("tall.weight", "odd.weight")
WEIGHTS = Weights(decays=lambda _: True, is_hidden=lambda _: True, is_embedding=lambda name: name.startswith("embed"))
RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8


def table(*, has_sign):
    """The dynamic data type as the paper and bitsandbytes' `create_dynamic_map` define it, in increasing order."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (decade + (not has_sign)) + 1)
        middles = 10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2
        numbers += [*middles, *(-middles if has_sign else [])]
    return np.sort(numbers)


def in_blocks(array):
    return array.reshape(-1, block_of(array.shape), array.shape[-1])


def rounded(array, *, has_sign):
    """The nearest numbers, of blocks in the last axis but one."""
    blocks = in_blocks(np.asarray(array, np.float64))
    scales = np.abs(blocks).max(1, keepdims=True)
    numbers = table(has_sign=has_sign)
    relative = blocks / np.where(scales > 0, scales, 1)
    places = np.abs(relative[..., None] - numbers).argmin(-1)
    if not has_sign:  # what the update is divided by does not become zero
        places = np.where((blocks > 0) & (places == 0), 1, places)
    return (numbers[places] * scales).reshape(array.shape).astype(np.float32)


def values(shape, *, has_sign, seed=0):
    """Magnitudes over ten decades, a block of zeros, and both ends of the data type."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=shape) * 10.0 ** rng.uniform(-10, 0, size=shape)
    blocks = in_blocks(found)
    blocks[0, :, 0] = 0
    blocks[0, :4, 1] = [5.0, -5.0, 4.99, 0]
    return (found if has_sign else np.abs(found)).astype(np.float32)


@pytest.mark.parametrize("has_sign", [True, False])
def test_the_codes_are_256_numbers_of_the_data_type(has_sign):
    codes = jnp.arange(256, dtype=jnp.uint8)[:, None]
    numbers = decode(EightBitMoment(codes, jnp.ones((1,), jnp.float32)), has_sign=has_sign)[:, 0]
    np.testing.assert_allclose(np.sort(numbers), table(has_sign=has_sign), rtol=1e-6)


@pytest.mark.parametrize("has_sign", [True, False])
@pytest.mark.parametrize("shape", [(512, 16), (96, 6), (2, 64, 5)])
def test_each_number_becomes_the_nearest_of_its_block(has_sign, shape):
    array = values(shape, has_sign=has_sign)
    moment = jax.jit(lambda a: encode(a, has_sign=has_sign))(in_blocks(array))
    assert moment.codes.shape == in_blocks(array).shape
    assert moment.codes.dtype == jnp.uint8
    assert moment.scales.shape == (array.size // block_of(shape) // shape[-1], shape[-1])
    found = np.asarray(decode(moment, has_sign=has_sign)).reshape(shape)
    expected = rounded(array, has_sign=has_sign)
    # float32 and float64 may take different ones of two that are equally near
    is_equal = np.isclose(found, expected, rtol=1e-5, atol=0)
    assert is_equal.mean() > 0.999
    np.testing.assert_allclose(np.abs(found - array)[~is_equal], np.abs(expected - array)[~is_equal], rtol=1e-3)
    assert np.isfinite(found).all()
    if not has_sign:
        assert ((found > 0) == (array > 0)).all()


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit"])
def test_updates_are_those_of_moments_that_are_rounded_after_each(optim):
    arguments = TrainingArguments(
        "run", optim=optim, learning_rate=RATE, weight_decay=DECAY, max_grad_norm=None, lr_scheduler_type="constant"
    )
    optimizer = make_optimizer(arguments, arguments.schedule(10), WEIGHTS)
    rng = np.random.default_rng(0)
    start, *gradients = ({n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(4))
    params = {n: jnp.asarray(a) for n, a in start.items()}
    state = optimizer.init(params)
    expected = dict(start)
    first = {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
    second = dict(first)
    b1, b2 = arguments.adam_beta1, arguments.adam_beta2
    update = jax.jit(optimizer.update)
    for step, grads in enumerate(gradients, start=1):
        updates, state = update({n: jnp.asarray(a) for n, a in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
        for name, grad in grads.items():
            if optim == "lion_8bit":
                moved = np.sign(b1 * first[name] + (1 - b1) * grad)
                first[name] = b2 * first[name] + (1 - b2) * grad
            else:
                first[name] = b1 * first[name] + (1 - b1) * grad
                second[name] = b2 * second[name] + (1 - b2) * grad**2
                moved = first[name] / (1 - b1**step) / (np.sqrt(second[name] / (1 - b2**step)) + EPSILON)
            expected[name] = expected[name] - RATE * (moved + DECAY * expected[name])
            if name in CODED:
                first[name] = rounded(first[name], has_sign=True)
                second[name] = rounded(second[name], has_sign=False)
    for name in SHAPES:
        is_equal = np.isclose(params[name], expected[name], atol=2e-5)
        assert is_equal.mean() > (0.998 if name in CODED else 0.9999), name
    coded = [a for a in jax.tree.leaves(state) if a.dtype == jnp.uint8]
    assert sorted(a.shape for a in coded) == sorted([SHAPES[n] for n in CODED] * (1 if optim == "lion_8bit" else 2))


def test_large_weights_on_one_tpu_are_updated_block_by_block_with_the_same_numbers(monkeypatch):
    optimizer = with_eight_bit_moments(optax.scale_by_adam(), keeps_float32=lambda _: False)
    gradients = {
        "stack": jnp.asarray(values((3, 512, 8), has_sign=True)),
        "odd": jnp.asarray(values((96, 64), has_sign=True)),
    }

    def two_steps(name):
        with compiling_for(name):
            state, found = optimizer.init(gradients), gradients
            for _ in range(2):
                found, state = jax.jit(lambda g, s: optimizer.update(g, s))(found, state)
        return jax.tree.leaves((found, state))

    expected = two_steps("cpu")
    monkeypatch.setattr(eight_bit, "_LARGE", 0)
    for ours, theirs in zip(two_steps("tpu"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_run_learns_as_with_float32_moments_and_goes_on_bit_for_bit(tmp_path):
    data = rows("llama", 8)
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "save_steps": 10,
    }

    def run(name, optim, steps, *, resumes=False):
        _, model = make("llama", tmp_path / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=128)
        arguments = TrainingArguments(tmp_path / name, optim=optim, max_steps=steps, **options)
        trainer = Trainer(model, arguments, data)
        metrics = trainer.resume() if resumes else trainer.train()
        return metrics["loss"], {n: np.asarray(a) for n, a in model.params.items()}, trainer

    whole, weights, trainer = run("whole", "adamw_8bit", 20)
    expected, _, _ = run("float32", "adamw_torch", 20)
    first, _, _ = run("first", "adamw_torch", 1)
    assert abs(whole - expected) < 0.02 * (first - expected)
    assert any(a.dtype == jnp.uint8 for a in jax.tree.leaves(trainer.state.opt_state))
    run("parts", "adamw_8bit", 10)
    again, resumed, _ = run("parts", "adamw_8bit", 20, resumes=True)
    assert again == whole
    assert all((resumed[n] == weights[n]).all() for n in weights)


def test_the_plan_counts_what_moments_take():
    """Two bytes of codes and 8 of scales for each 256 elements, beside 4 of weights; embeddings have 12."""
    (plan,) = make_train_plans("8b", LLAMA_8B, ["h200:1"], kinds=["full"], optim="adamw_8bit", compiles=False)
    tables = 128_256 * 4096
    assert plan.state_bytes == pytest.approx(12 * tables + (6 + 8 / 256) * (plan.trained - tables), rel=0.001)
    assert plan.optim == "adamw_8bit"


def test_several_devices_are_refused():
    with pytest.raises(UnsupportedOptionError, match="run on one device, and the model is on 8"):
        list(make_train_plans("8b", LLAMA_8B, ["h200:8"], kinds=["full"], optim="lion_8bit", compiles=False))
