"""hfax's lowerings of single operations against torch's."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hfax.patches.ops import linear


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 3), (7,)])
@pytest.mark.parametrize("width", [8, 2048, 4095, 4096, 5000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_agrees_with_float64_as_closely_as_torch(rows: tuple[int, ...], width: int, has_bias: bool) -> None:
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.standard_normal((*rows, width))).to(torch.bfloat16)
    weight = torch.from_numpy(rng.standard_normal((24, width))).to(torch.bfloat16)
    bias = torch.from_numpy(rng.standard_normal(24)).to(torch.bfloat16) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).numpy()
    theirs = torch.nn.functional.linear(x, weight, bias).double().numpy()
    ours = linear(*(None if t is None else jnp.asarray(t.float().numpy(), jnp.bfloat16) for t in (x, weight, bias)))
    assert ours.dtype == jnp.bfloat16
    # A single row is rounded once before its bias is added (see `linear`): one more rounding of bfloat16, at most 2**-8 of it.
    one_rounding = 2.0**-8 * np.abs(exact).max()
    allowed = 1.2 * np.abs(theirs - exact).max() + (one_rounding if has_bias and np.prod(rows) == 1 else 1e-6)
    assert np.abs(np.asarray(ours, np.float64) - exact).max() <= allowed


def test_linear_in_float32_agrees_with_torch() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((3, 33), (5, 33), (5,)))
    expected = torch.nn.functional.linear(*map(torch.from_numpy, (x, weight, bias))).numpy()
    np.testing.assert_allclose(linear(*map(jnp.asarray, (x, weight, bias))), expected, atol=1e-5)
