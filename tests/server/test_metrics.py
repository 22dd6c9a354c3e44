"""What a server's metrics count, and that they end with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hfax.server.metrics import Metrics


def _compiled(metrics: Metrics) -> float:
    lines = metrics.text().decode().splitlines()
    return float(next(line for line in lines if line.startswith("hfax:xla_compilations_total")).split()[-1])


def test_compilations_are_counted_from_a_server_s_start_to_its_end() -> None:
    """They were counted from the import of the server's package on, by a listener that stayed in JAX."""
    array = jnp.ones(3)
    jax.jit(lambda x: x + 1)(array)
    metrics = Metrics("hfax:", "model")
    assert _compiled(metrics) == 0
    jax.jit(lambda x: x + 2)(array)
    assert _compiled(metrics) == 1
    metrics.close()
    jax.jit(lambda x: x + 3)(array)
    assert _compiled(metrics) == 1
