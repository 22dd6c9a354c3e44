"""What programs of a model are made from, for those who make programs of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from hfax.programs.program_cache import ProgramCache
from hfax.sharding.layout import Layout
from hfax.tracing.traced_model import TracedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model, taken apart.

    Args:
        traced: its pure functions.
        programs: where its compiled programs are kept.
        layout: where they run.
        weights: what they take beside inputs, by name.
        vocab_size: of the logits.
        context: the most positions that it has; None where they are not bound.
    """

    traced: TracedModel
    programs: ProgramCache
    layout: Layout
    weights: Mapping[str, jax.Array]
    vocab_size: int
    context: int | None
