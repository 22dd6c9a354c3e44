"""Products with each row's own matrix, without kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from hfax.kernels.experts import grouped_linear

from .cpu_programs import normal


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_grouped_products_without_kernels(rows, is_transposed):
    x, weight = normal(rows, 24), normal(6, 24, 10, seed=1) if is_transposed else normal(6, 10, 24, seed=1)
    experts = jnp.asarray(np.random.default_rng(2).integers(0, 6, rows), jnp.int32)
    form = "ri,rio->ro" if is_transposed else "ri,roi->ro"
    expected = np.einsum(form, x, np.asarray(weight)[np.asarray(experts)])
    np.testing.assert_allclose(grouped_linear(x, weight, experts, is_transposed=is_transposed), expected, atol=1e-4)
