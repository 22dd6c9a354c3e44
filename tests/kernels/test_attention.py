"""hfax's attention against torch's own, for every form that models call it in."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hfax.kernels.attention import attention, causal_mask, causal_positions


def _inputs(heads: int, kv_heads: int, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16))
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in shapes)
    return q, k, v


def _torch_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    out = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q),
        torch.from_numpy(k),
        torch.from_numpy(v),
        attn_mask=None if mask is None else torch.from_numpy(mask),
        enable_gqa=True,
    )
    return out.transpose(1, 2).numpy()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "by head"])
def test_attention_agrees_with_torch_for_grouped_heads_and_masks(heads: int, kv_heads: int, kind: str) -> None:
    q, k, v = _inputs(heads, kv_heads, 5, 7)
    rng = np.random.default_rng(1)
    masks = {
        "none": None,
        "bool": rng.random((2, 1, 5, 7)) < 0.7,
        "float": rng.standard_normal((2, 1, 5, 7), dtype=np.float32),
        "by head": rng.standard_normal((1, heads, 5, 7), dtype=np.float32),
    }
    mask = masks[kind]
    if kind == "bool":
        mask[..., 0] = True
    out, _ = attention(*map(jnp.asarray, (q, k, v)), None if mask is None else jnp.asarray(mask), scale=16**-0.5)
    np.testing.assert_allclose(out, _torch_reference(q, k, v, mask), atol=2e-6)


@pytest.mark.parametrize("is_additive", [False, True])
def test_a_row_that_may_attend_to_nothing_is_zero_and_not_nan(is_additive: bool) -> None:
    q, k, v = _inputs(2, 2, 3, 3)
    mask = np.ones((2, 1, 3, 3), bool)
    mask[0, :, 0] = False
    if is_additive:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    out, probabilities = attention(*map(jnp.asarray, (q, k, v)), jnp.asarray(mask), scale=0.25)
    assert np.all(np.asarray(out)[0, 0] == 0)
    assert np.all(np.asarray(probabilities)[0, :, 0] == 0)
    np.testing.assert_allclose(out, _torch_reference(q, k, v, mask), atol=2e-6)


def test_softcap_bounds_the_scores() -> None:
    q, k, v = _inputs(2, 1, 4, 4)
    out, _ = attention(*map(jnp.asarray, (q, k, v)), None, scale=1.0, softcap=2.0)
    scores = 2.0 * np.tanh(np.einsum("bhqd,bksd->bhqs", q, k) / 2.0)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("bhqs,bksd->bqhd", weights, v), atol=2e-6)


def test_a_sink_takes_probability_and_gives_nothing() -> None:
    q, k, v = _inputs(2, 1, 4, 4)
    sinks = np.asarray([0.5, -1.0], np.float32)
    out, probabilities = attention(*map(jnp.asarray, (q, k, v)), None, scale=1.0, sinks=jnp.asarray(sinks))
    scores = np.exp(np.einsum("bhqd,bksd->bhqs", q, k))
    weights = scores / (scores.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None])
    np.testing.assert_allclose(probabilities, weights, atol=2e-6)
    np.testing.assert_allclose(out, np.einsum("bhqs,bksd->bqhd", weights, v), atol=2e-6)


def test_causal_positions_are_those_of_torch_for_more_keys_than_queries() -> None:
    np.testing.assert_array_equal(np.asarray(causal_positions(2, 4))[0, 0], np.tril(np.ones((2, 4), bool)))
    q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 7, 7))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    got, _ = attention(*map(jnp.asarray, (q, k, v)), causal_mask(3, 7), scale=0.3)
    np.testing.assert_allclose(got.swapaxes(1, 2), expected, atol=1e-6)
