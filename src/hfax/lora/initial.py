"""First values of an adapter, by `init_lora_weights`, as in PEFT.

PiSSA (https://arxiv.org/abs/2404.02948) and OLoRA (https://arxiv.org/abs/2406.01775) take the adapter out of the base weight, which
keeps the rest: an adapter that was trained so computes on that rest, each time it is loaded.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.lora.config import LoraConfig
from hfax.lora.targets import Target

FROM_BASE = ("pissa", "olora")
"""Values that change the base weights."""
_DRAWN = (True, False, "gaussian", "orthogonal")
_CONVERT = (
    "Where it was trained, save it with save_pretrained(path_initial_model_for_weight_conversion=…), which makes a plain LoRA "
    "adapter; or merge it there, and load the merged model."
)
_NOT_REPRODUCIBLE = {
    "pissa_niter": "Its randomised SVD gives other base weights on each load",
    "corda": "Its base weights depend on activations that the adapter does not contain",
    "loftq": "Its base weights are quantized with LoftQ",
    "lora_ga": "Its base weights depend on gradients that the adapter does not contain",
}


def kind_of(config: LoraConfig) -> bool | str:
    """`init_lora_weights`, spelled as in this file."""
    value = config.init_lora_weights
    if isinstance(value, str) and value.lower() in ("gaussian", "olora", "mica"):
        return value.lower()
    return value


def check(config: LoraConfig, source: str, *, is_new: bool) -> None:
    """Raise unless hfax can initialise such an adapter, or load one.

    Raises:
        InvalidInputError: no such initialisation.
        UnsupportedOptionError: it is random, needs data, or does not go with another option.
    """
    kind = kind_of(config)
    for name, why in _NOT_REPRODUCIBLE.items():
        if isinstance(kind, str) and kind.startswith(name):
            fix = "Use 'pissa', 'olora', 'gaussian' or True." if is_new else _CONVERT
            raise UnsupportedOptionError(f"{source} sets init_lora_weights={kind!r}.", f"{why}.", fix)
    if kind == "eva" and is_new:
        raise UnsupportedOptionError(
            f"{source} sets init_lora_weights='eva'.",
            "Its first values are computed from activations.",
            "Initialise it with peft (initialize_lora_eva_weights), save it, and load it here.",
        )
    if kind not in (*_DRAWN, *FROM_BASE, "mica", "eva"):
        raise InvalidInputError(
            f"{source} sets init_lora_weights={kind!r}.",
            "PEFT has no such initialisation.",
            "Use True, False, 'gaussian', 'orthogonal', 'pissa', 'olora' or 'mica'.",
        )
    if config.target_parameters and kind not in (True, False, "gaussian", "eva"):
        raise UnsupportedOptionError(
            f"{source} sets init_lora_weights={kind!r} with target_parameters.",
            "PEFT initialises parameters' adapters without their values.",
            "Use init_lora_weights=True.",
        )
    if kind == "mica" and config.use_dora:
        raise UnsupportedOptionError(
            f"{source} sets init_lora_weights='mica' with use_dora.", "PEFT has no such variant.", "Use one of them."
        )
    if kind == "orthogonal" and any(r % 2 for r in (config.r, *config.rank_pattern.values())):
        raise InvalidInputError(
            f"{source} sets init_lora_weights='orthogonal' with an odd rank.",
            "Its vectors are divided into two halves.",
            "Use an even r.",
        )


def drawn(target: Target, config: LoraConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Random first values of an adapter, by part, float32.

    Args:
        target: what is adapted.
        config: the adapter's config.
        key: PRNG key.
    """
    kind, rank = kind_of(config), config.rank(target.path)
    (down, low), (up, high) = target.shapes(rank).items()
    one, two = jax.random.split(key)
    if target.is_embedding:
        first = jax.random.normal(two, low) if kind is False else jnp.zeros(low)
        return {down: first, up: jax.random.normal(one, high)}
    if kind == "orthogonal":
        return dict(zip((down, up), _orthogonal(target, rank, one), strict=True))
    stacked = rank * (target.experts or 1)  # PEFT's lora_B is one layer for all experts
    first = jax.random.normal(one, low) / rank if kind == "gaussian" else _uniform(one, low, target.into)
    return {down: first, up: _uniform(two, high, stacked) if kind is False else jnp.zeros(high)}


def _uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def _orthogonal(target: Target, rank: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both random, with product zero (https://datta0.github.io/posts/rethink-lora-init)."""
    basis, left, right = jax.random.split(key, 3)
    rows, _ = jnp.linalg.qr(jax.random.normal(basis, (rank, rank)))
    a = jax.random.normal(left, (target.into, rank // 2)) @ rows[0::2] / 10
    b = jax.random.normal(right, (target.out, rank // 2)) @ rows[1::2] / 10
    return a.T, b


def factors(target: Target, config: LoraConfig, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First values that come from the base weight, and what is left of it.

    Args:
        target: a linear layer or embedding.
        config: the adapter's config; "pissa", "olora" or "mica".
        weight: the base weight as stored.

    Returns:
        `lora_A` and `lora_B`, float32, and the base weight without their product, in its shape and float32.

    Raises:
        InvalidInputError: the rank is larger than the weight's.
        UnsupportedOptionError: OLoRA on a `Conv1D`.
    """
    kind, rank, scaling = kind_of(config), config.rank(target.path), config.scaling(target.path)
    if rank > min(target.out, target.into):
        raise InvalidInputError(
            f"init_lora_weights={kind!r} has no rank {rank} on {target.path}.",
            f"The weight has only {min(target.out, target.into)} singular vectors.",
            "Use a smaller r.",
        )
    if kind == "olora" and isinstance(target.layer, Conv1D):
        raise UnsupportedOptionError(
            f"init_lora_weights='olora' cannot initialise {target.path}.",
            "PEFT's factors have the wrong shapes for Conv1D.",
            "Use 'pissa'.",
        )
    straight = torch.from_numpy(np.ascontiguousarray(target.straight(weight), np.float32))
    if kind == "olora":
        q, r = torch.linalg.qr(straight)
        a, b = r[:rank], q[:, :rank]
    elif kind == "pissa":
        u, s, vh = torch.linalg.svd(straight, full_matrices=False)
        root = torch.diag(torch.sqrt(s[:rank] / scaling))
        a, b = root @ vh[:rank], u[:, :rank] @ root
    else:
        u, _, _ = torch.linalg.svd(straight, full_matrices=False)
        return np.zeros((rank, target.into), np.float32), u[:, -rank:].numpy(), weight
    rest = straight - scaling * b @ a
    return a.numpy(), b.numpy(), target.straight(rest.numpy())
