"""Which page of the pool belongs to whom: allocation, sharing by content, and what is forgotten first.

A page is known by a hash of its tokens, of the page before it, and of a salt, so that equal beginnings of prompts share pages and
texts of different keys never do. A page that nobody holds keeps its content until its place is needed; the one unused for longest
goes first. Neither jax nor torch is imported here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence


@dataclasses.dataclass(kw_only=True)
class CacheCounts:
    """How often prompts were looked up: tokens asked for, and tokens found."""

    queries: int = 0
    hits: int = 0


class PageAllocator:
    """The pages of one pool; place 0 is nobody's.

    Args:
        num_pages: places, the one of nobody included.
        page_size: tokens of a page.
        keeps_prefixes: pages are shared by content.
    """

    def __init__(self, num_pages: int, page_size: int, *, keeps_prefixes: bool = True) -> None:
        self.num_pages = num_pages - 1
        self.page_size = page_size
        self.counts = CacheCounts()
        self._keeps_prefixes = keeps_prefixes
        self._blank: deque[int] = deque(range(1, num_pages))
        self._held: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Places that nobody holds and whose content is known, the one unused for longest first."""
        self._place_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._unused)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return len(self._held)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages; None if there are not so many."""
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
        """Take the pages that hold the beginning of a text, all but its last token at most.

        Returns:
            Their places, and their hashes.
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
        """Say what a held page contains: its tokens, behind the page with hash `before` (None: the first)."""
        key = _hash(_first(salt) if before is None else before, tokens)
        if self._keeps_prefixes and key not in self._place_of and place not in self._hash_of:
            self._place_of[key] = place
            self._hash_of[place] = key
        return key

    def free(self, places: Sequence[int]) -> None:
        """Let go of pages; the last of a text is forgotten before those in front of it."""
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
        """Forget what pages contain, as after their contents were lost; who holds them stays."""
        self._place_of.clear()
        self._hash_of.clear()
        self._blank.extend(self._unused)
        self._unused.clear()


def _first(salt: str) -> bytes:
    return hashlib.sha256(salt.encode()).digest()


def _hash(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()
