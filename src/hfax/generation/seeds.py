"""The seed of a call that passes none."""

from __future__ import annotations

import secrets
import sys


def draw_seed() -> int:
    """A seed of 32 bits from torch's generator, so that `transformers.set_seed` applies.

    Before torch is imported nobody has set a seed, and torch would begin with one from the system's entropy, as this does.
    """
    if "torch" not in sys.modules:
        return secrets.randbits(32)
    import torch

    return int(torch.randint(0, 1 << 32, (), dtype=torch.int64))
