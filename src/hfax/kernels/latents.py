"""Attention over latents: keys and values that are products of one cached vector for all heads, without expanding them.

In multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) a token's keys and values of all heads
are a matrix times its latent, `k = U_k c` and `v = U_v c`. Since `q · (U_k c) = (U_k^T q) · c`, a few queries are multiplied with
the matrix instead of all cached tokens: the latents are the keys, and the values, of one head that all queries share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latents:
    """What keys and values are made of; tensors of a trace.

    Args:
        compressed: latents, [batch, 1, keys, rank].
        rotated: the part of the keys with positions, which all heads share, [batch, 1, keys, rotary].
        weight: [heads * (nope + width), rank]: of each head, the rows of its keys before those of its values.
        nope: size of a key without positions.
        width: size of a value.
        expand: makes the keys [batch, heads, keys, nope + rotary] and the values [batch, heads, keys, width].
    """

    compressed: Any
    rotated: Any
    weight: Any
    nope: int
    width: int
    expand: Callable[[], tuple[Any, Any]]

    def is_expanded(self, num_queries: int) -> bool:
        """Whether to expand, for so many queries of each head: in a prompt without earlier tokens, for which there are kernels, or
        where it takes fewer operations."""
        if 1 < num_queries == self.compressed.shape[2]:
            return True
        rank, rotary = self.compressed.shape[-1], self.rotated.shape[-1]
        each = (2 * rank + rotary) - (self.nope + rotary + self.width)  # more for each pair of a query and a key
        return num_queries * each >= rank * (self.nope + self.width)


def _of_heads(weight: jax.Array, nope: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The matrices of keys, [heads, nope, rank], and of values, [heads, width, rank]."""
    both = weight.reshape(-1, nope + width, weight.shape[-1])
    return both[:, :nope], both[:, nope:]


def queries_of_latents(query: jax.Array, weight: jax.Array, *, nope: int, width: int) -> jax.Array:
    """Queries whose products with latents are those with the expanded keys.

    Args:
        query: [batch, heads, queries, nope + rotary].
        weight: as in `Latents`.
        nope: as in `Latents`.
        width: as in `Latents`.

    Returns:
        [batch, heads, queries, rank + rotary].
    """
    of_keys, _ = _of_heads(weight, nope, width)
    product = _product_by_heads(query[..., :nope].transpose(1, 0, 2, 3), of_keys).transpose(1, 0, 2, 3)
    return jnp.concatenate([product, query[..., nope:]], axis=-1)


def values_of_latents(out: jax.Array, weight: jax.Array, *, nope: int, width: int) -> jax.Array:
    """The weighted sum of expanded values, given that of latents.

    Args:
        out: [batch, queries, heads, rank].
        weight: as in `Latents`.
        nope: as in `Latents`.
        width: as in `Latents`.

    Returns:
        [batch, queries, heads, width].
    """
    _, of_values = _of_heads(weight, nope, width)
    return _product_by_heads(out.transpose(2, 0, 1, 3), of_values.transpose(0, 2, 1)).transpose(1, 2, 0, 3)


def _product_by_heads(x: jax.Array, matrices: jax.Array) -> jax.Array:
    """[heads, .., .., out] of [heads, .., .., in] and [heads, in, out], added up in float32.

    Heads come first, and rows are one dimension: XLA:CPU has other forms of this product not for bfloat16 with a float32 result.
    """
    heads, *rows, width = x.shape
    product = jax.lax.dot_general(
        x.reshape(heads, -1, width), matrices, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return product.astype(x.dtype).reshape(heads, *rows, -1)
