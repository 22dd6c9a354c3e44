"""Programs compiled for CPU, and numbers to give them."""

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.target import compiling_for
from hfax.load.quantize import quantize

KERNELS = "C++ kernel"


def on_cpu(function, *args, is_batch_invariant=False, **kwargs):
    """What a program compiled for CPU gives, and the ways that were chosen for it."""
    with compiling_for("cpu", is_batch_invariant=is_batch_invariant) as where:
        out = jax.jit(lambda *a: function(*a, **kwargs))(*args)
    return np.asarray(out, np.float32), where.chosen


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def pack(values, bits):
    """A torch tensor as a weight of 8 or 4 bits."""
    return quantize(values, f"int{bits}", jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
