"""The page allocator: allocation, prefix caching, and LRU eviction.

A page is identified by a hash of its tokens, the previous page's hash and a salt, so shared prompt prefixes share pages, but never
across salts. A free page keeps its content until it is reallocated, least recently used first. Imports neither jax nor torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence


@dataclasses.dataclass(kw_only=True)
class CacheCounts:
    """Prefix cache statistics, in tokens: looked up and found."""

    queries: int = 0
    hits: int = 0


class PageAllocator:
    """Allocates the pages of one pool; page 0 is never allocated.

    Args:
        num_pages: number of pages, page 0 included.
        page_size: tokens per page.
        keeps_prefixes: enable prefix caching.
    """

    def __init__(self, num_pages: int, page_size: int, *, keeps_prefixes: bool = True) -> None:
        self.num_pages = num_pages - 1
        self.page_size = page_size
        self.counts = CacheCounts()
        self._keeps_prefixes = keeps_prefixes
        self._blank: deque[int] = deque(range(1, num_pages))
        self._held: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Free pages with cached content, least recently used first."""
        self._place_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._blank) + len(self._unused)

    @property
    def num_held(self) -> int:
        """Number of pages in use."""
        return len(self._held)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages; None if too few are free."""
        if count > self.num_free:
            return None
        places = []
        for _ in range(count):
            if self._blank:
                place = self._blank.popleft()
            else:
                place, _ = self._unused.popitem(last=False)
                del self._place_of[self._hash_of.pop(place)]
            self._held[place] = 1
            places.append(place)
        return places

    def find(self, tokens: Sequence[int], salt: str) -> tuple[list[int], list[bytes]]:
        """Acquire the cached pages of a token sequence's prefix, which excludes at least the last token.

        Returns:
            The pages, and their hashes.
        """
        places: list[int] = []
        hashes: list[bytes] = []
        if self._keeps_prefixes:
            before = _first(salt)
            for start in range(0, len(tokens) - self.page_size, self.page_size):
                before = _hash(before, tokens[start : start + self.page_size])
                place = self._place_of.get(before)
                if place is None:
                    break
                places.append(place)
                hashes.append(before)
            self.counts.queries += len(tokens)
            self.counts.hits += len(places) * self.page_size
        for place in places:
            self._unused.pop(place, None)
            self._held[place] = self._held.get(place, 0) + 1
        return places, hashes

    def remember(self, place: int, tokens: Sequence[int], before: bytes | None, salt: str) -> bytes:
        """Register a full page's tokens, which follow the page with hash `before` (None: first page); returns its hash."""
        key = _hash(_first(salt) if before is None else before, tokens)
        if self._keeps_prefixes and key not in self._place_of and place not in self._hash_of:
            self._place_of[key] = place
            self._hash_of[place] = key
        return key

    def free(self, places: Sequence[int]) -> None:
        """Release a sequence's pages; later pages are evicted before earlier ones."""
        for place in reversed(places):
            left = self._held[place] - 1
            if left:
                self._held[place] = left
                continue
            del self._held[place]
            if place in self._hash_of:
                self._unused[place] = None
            else:
                self._blank.append(place)

    def forget(self) -> None:
        """Drop all cached content after device arrays were lost; pages in use stay allocated."""
        self._place_of.clear()
        self._hash_of.clear()
        self._blank.extend(self._unused)
        self._unused.clear()


def _first(salt: str) -> bytes:
    return hashlib.sha256(salt.encode()).digest()


def _hash(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()
