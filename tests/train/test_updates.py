"""An optimizer's update whose new state takes the memory of the old one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfax import make_train_step
from hfax.kernels.target import compiling_for
from hfax.train.updates import apply_optimizer

from .small_models import batch, make

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(optax.linear_schedule(1e-2, 0.0, 10), momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-2),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "injected": optax.inject_hyperparams(optax.lion)(learning_rate=1e-2),
}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in (("a", (130, 140)), ("b", (8,)))}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_those_of_optax(optimizer):
    params = expected = arrays(0)
    state = expected_state = optimizer.init(params)
    with compiling_for("cpu", is_differentiated=True):
        run = jax.jit(lambda *args: apply_optimizer(optimizer, *args))
        for seed in range(1, 5):
            params, state = run(arrays(seed), state, params, jnp.asarray(True))
            updates, expected_state = optimizer.update(arrays(seed), expected_state, expected)
            expected = optax.apply_updates(expected, updates)
            skipped = run(jax.tree.map(lambda a: a * jnp.nan, arrays(seed)), state, params, jnp.asarray(False))
            for own, other in zip(jax.tree.leaves(skipped), jax.tree.leaves((params, state)), strict=True):
                np.testing.assert_array_equal(own, other)
    for own, other in zip(jax.tree.leaves((params, state)), jax.tree.leaves((expected, expected_state)), strict=True):
        np.testing.assert_allclose(np.asarray(own, np.float32), np.asarray(other, np.float32), rtol=1e-5, atol=1e-6)


def test_no_array_of_the_state_is_copied(tmp_path):
    _, model = make("llama", tmp_path)
    step = make_train_step(model, optax.adamw(1e-3))
    compiled = step.compile(step.described_state(), batch("llama", 4))
    shapes = {f"f32[{','.join(map(str, a.shape))}]" for a in step.described_state().params.values() if a.ndim == 2}
    copied = re.findall(r"= (f32\[[\d,]+\])\S* copy\(", compiled.as_text())
    assert not shapes & set(copied)
