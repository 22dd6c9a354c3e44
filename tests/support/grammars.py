"""What a grammar lets pass."""

from __future__ import annotations

from hfax.engine.grammar import Matcher

END = 2
"""End-of-sequence token of the demo's tokenizer."""


def is_allowed(matcher: Matcher, token: int, size: int) -> bool:
    """Whether a token may be next, in a vocabulary of this size."""
    return bool(matcher.mask(size)[token // 32] >> (token % 32) & 1)
