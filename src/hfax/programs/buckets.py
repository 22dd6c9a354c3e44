"""Buckets: the sizes that programs are compiled for, so that prompts of many lengths share few programs. Plain arithmetic."""

from __future__ import annotations

import dataclasses

_SMALLEST_PROMPT = 16
_SMALLEST_CAPACITY = 128

Size = tuple[int, int, int]
"""Rows, padded prompt length in tokens, and cache capacity in tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """How sizes are rounded up.

    Args:
        made: sizes with precompiled programs: the smallest that fits a request is used; if none fits, a power of two.
        most_padding: tokens of padding that a prompt may have; None: any number.
    """

    made: tuple[Size, ...] = ()
    most_padding: int | None = None

    def prompt(self, rows: int, length: int, limit: int | None = None) -> tuple[int, int]:
        """Padded rows and length of a batch of prompts; `limit` is the model's context length."""
        fitting = [(r, n) for r, n, _ in self.made if r >= rows and n >= length and (limit is None or n <= limit)]
        return min(fitting, default=(batch_bucket(rows), prompt_bucket(length, limit)))

    def have_room(self, rows: int, length: int, more: int, limit: int | None = None) -> bool:
        """Whether prompts of `length` tokens may have `more` tokens of padding at least; other arguments as of `prompt`."""
        wanted = length + more
        if limit is not None and wanted > limit:
            return False
        if self.made and not any(r >= rows and n >= wanted for r, n, _ in self.made):
            return False
        return self.most_padding is None or self.prompt(rows, wanted, limit)[1] - length <= self.most_padding

    def capacity(self, rows: int, prompt: int, tokens: int) -> int:
        """Cache capacity for `rows` padded prompts of length `prompt`, and `tokens` tokens in total."""
        fitting = [c for r, n, c in self.made if (r, n) == (rows, prompt) and c >= tokens]
        return min(fitting, default=capacity_bucket(tokens))


def size_class(n: int, smallest: int = 1) -> tuple[int, int]:
    """The smallest size of a class, and the largest, to which the others are padded.

    Classes end at powers of two, and from 64 also half-way between them (64, 96, 128, 192, …): nine up to 512, and at most a
    third of what is computed is padding.

    Args:
        n: a size in the class.
        smallest: where the first class ends.
    """
    top = max(power_of_two(n), smallest)
    half = top // 4 * 3
    if top <= smallest:
        return 1, top
    if top < 128:
        return top // 2 + 1, top
    return (top // 2 + 1, half) if n <= half else (half + 1, top)


def length_class(length: int, limit: int | None = None) -> tuple[int, int]:
    """The `size_class` of a forward call's tokens, from 16 and up to `limit` (the model's context length)."""
    low, high = size_class(length, _SMALLEST_PROMPT)
    return low, high if limit is None or length > limit else min(high, limit)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def prompt_bucket(length: int, limit: int | None = None) -> int:
    """The padded length of a prompt: a power of two from 16, capped at `limit` (the model's context length)."""
    bucket = max(power_of_two(length), _SMALLEST_PROMPT)
    return max(min(bucket, limit), length) if limit is not None else bucket


def batch_bucket(size: int) -> int:
    """The padded number of prompts: a power of two."""
    return power_of_two(size)


def capacity_bucket(length: int) -> int:
    """The cache capacity for `length` tokens: a power of two from 128 to 1024, then a multiple of 1024."""
    if length <= 1024:
        return max(power_of_two(length), _SMALLEST_CAPACITY)
    return -(-length // 1024) * 1024
