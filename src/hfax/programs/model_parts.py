"""The components of a model from which programs are built, for code that builds further programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax

from hfax.programs.program_cache import ProgramCache
from hfax.sharding.layout import Layout

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The components of a model.

    Args:
        traced: its pure functions.
        programs: its program cache.
        layout: its devices and shardings.
        weights: the arrays that programs take besides inputs, by name.
        tied: alias mapped to name, for weights that share an array.
        num_logits: gives the number of logits for each token; raises for a model without a language-modelling head.
        context: the context length in positions; None if unbounded.
    """

    traced: TracedModel
    programs: ProgramCache
    layout: Layout
    weights: Mapping[str, jax.Array]
    tied: Mapping[str, str]
    num_logits: Callable[[], int]
    context: int | None
