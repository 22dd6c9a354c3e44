"""What one layer's or parameter's adapter looks like: its arrays' names and shapes, and what it adds to the weight.

Every adapter is a pair, `lora_A` [rank, in] and `lora_B` [out, rank]. For parameters with an axis of experts both have it in front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.pytorch_utils import Conv1D

from hfax.tracing.adapters import EMBEDDING_A, EMBEDDING_B, LORA_A, LORA_B, MAGNITUDE, is_turned, low_rank_product

RANK_AXIS = {LORA_A: -2, LORA_B: -1, EMBEDDING_A: -2, EMBEDDING_B: -1}
"""Axis of the rank in an adapter's arrays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A layer or parameter with an adapter.

    Args:
        path: name of the layer, or of the parameter.
        layer: the layer, or the module that owns the parameter.
        is_parameter: whether the adapter is for the parameter alone.
        is_turned: whether the weight is stored as [in, out].
        experts: number of experts stacked in the parameter; None: no such axis.
        out: output width.
        into: input width; rows of an embedding table.
    """

    path: str
    layer: torch.nn.Module
    is_parameter: bool
    is_turned: bool
    experts: int | None
    out: int
    into: int

    @property
    def weight(self) -> str:
        """Name of the adapted weight."""
        return self.path if self.is_parameter else f"{self.path}.weight"

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding layer."""
        return not self.is_parameter and isinstance(self.layer, torch.nn.Embedding)

    @property
    def parts(self) -> tuple[str, str]:
        """Names of the pair's arrays, appended to the path."""
        return (EMBEDDING_A, EMBEDDING_B) if self.is_embedding else (LORA_A, LORA_B)

    def shapes(self, rank: int, *, use_dora: bool = False) -> dict[str, tuple[int, ...]]:
        """Shapes of the adapter's arrays, by part."""
        stack = () if self.experts is None else (self.experts,)
        down, up = self.parts
        found = {down: (*stack, rank, self.into), up: (*stack, self.out, rank)}
        return found | ({MAGNITUDE: (self.out,)} if use_dora else {})

    def straight(self, weight: Any) -> Any:
        """The weight as [out, in], or back."""
        return weight.swapaxes(-1, -2) if self.is_turned else weight

    def merged(self, weight: jax.Array, parts: Mapping[str, jax.Array], scaling: float) -> jax.Array:
        """`weight + scaling · B @ A`, computed in float32, cast to the weight's dtype; for DoRA scaled to its magnitudes."""
        down, up = self.parts
        added = low_rank_product(parts[down], parts[up], scaling)
        merged = self.straight(weight).astype(jnp.float32) + added
        if MAGNITUDE in parts:
            norms = jnp.linalg.norm(merged, axis=1)
            merged = merged * (parts[MAGNITUDE].astype(jnp.float32) / norms)[:, None]
        return self.straight(merged).astype(weight.dtype)


def target_of(module: torch.nn.Module, path: str) -> Target:
    """The layer or parameter of this name."""
    owner, _, name = path.rpartition(".")
    parent = module.get_submodule(owner)
    part: Any = getattr(parent, name)
    given: dict[str, Any] = {"path": path, "is_turned": is_turned(module, path)}
    if isinstance(part, torch.nn.Parameter):
        stack, rows, columns = part.shape if part.ndim == 3 else (None, *part.shape)
        out, into = (columns, rows) if given["is_turned"] else (rows, columns)
        return Target(layer=parent, is_parameter=True, experts=stack, out=out, into=into, **given)
    if isinstance(part, torch.nn.Embedding):
        out, into = part.embedding_dim, part.num_embeddings
    elif isinstance(part, Conv1D):
        out, into = part.nf, part.nx
    else:
        out, into = part.out_features, part.in_features
    return Target(layer=part, is_parameter=False, experts=None, out=out, into=into, **given)
