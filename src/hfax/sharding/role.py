"""What the traced computation shows of a weight."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """How a weight can be split.

    Args:
        axis: of the weight.
        units: into how many parts at most, for instance heads; every split's size must divide it.
        is_output: the axis is what the weight makes, rather than what it reads.
    """

    axis: int
    units: int
    is_output: bool
