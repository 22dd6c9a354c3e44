"""A layer's keys and values in pages, for the attention kernel that TPUs decode with.

It stands where a full or sliding layer would and does the same in prefill; in decode it writes into its pages and gives attention
the pages beside the arrays that they stand for, which nobody computes unless some attention cannot read pages.
"""

from __future__ import annotations

from typing import Any, Protocol

from hfax.kv_cache.layers import CacheOps, FullAttentionLayer, Tensor


class PagedCacheOps(CacheOps, Protocol):
    """What a backend that keeps pages provides."""

    def fits_pages(self, key: Tensor, value: Tensor, capacity: int, window: int | None) -> bool:
        """Whether a kernel takes keys and values of these shapes."""
        ...

    def fill_pages(
        self, key: Tensor, value: Tensor, padding: Tensor, capacity: int, window: int | None
    ) -> dict[str, Tensor]:
        """The pages after a prompt, with `padding` tokens, [batch], before each sequence: arrays by name."""
        ...

    def write_page(
        self, pages: dict[str, Tensor], key: Tensor, value: Tensor, padding: Tensor, position: Tensor, capacity: int
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The pages with one token more, and the keys and values that they stand for; the keys carry the pages."""
        ...


class PagedLayer(FullAttentionLayer):
    """Keys and values in pages, of all tokens or of a window.

    Where the shapes do not fit a kernel, it keeps all tokens as `FullAttentionLayer` does.

    Args:
        ops: the backend's operations.
        capacity: tokens, padding included.
        length: tokens held, a scalar array; None in prefill.
        padding: [batch], tokens of padding before each prompt.
        window: how many tokens a query sees; None: all.
    """

    page_names = ("pages", "key_pages", "value_pages")
    state_names = ("keys", "values", *page_names)

    def __init__(
        self, ops: PagedCacheOps, capacity: int, length: Tensor | None, *, padding: Tensor, window: int | None
    ) -> None:
        super().__init__(ops, capacity, length)
        self.paged_ops, self.padding, self.window = ops, padding, window
        self.pages: Tensor = None
        self.key_pages: Tensor = None
        self.value_pages: Tensor = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `FullAttentionLayer.update`."""
        if self.base_length is None:
            fits = self.paged_ops.fits_pages(key_states, value_states, self.capacity, self.window)
            if not fits or self.prompt_length != key_states.shape[-2]:
                return super().update(key_states, value_states)
            self.is_initialized, self.num_new = True, key_states.shape[-2]
            self._keep(self.paged_ops.fill_pages(key_states, value_states, self.padding, self.capacity, self.window))
            return key_states, value_states
        pages = {name: array for name in self.page_names if (array := getattr(self, name)) is not None}
        if not pages:
            return super().update(key_states, value_states)
        if key_states.shape[-2] != 1:
            raise NotImplementedError("several tokens at once onto a cache in pages")
        self.num_new = 1
        pages, keys, values = self.paged_ops.write_page(
            pages, key_states, value_states, self.padding, self.base_length, self.capacity
        )
        self._keep(pages)
        return keys, values

    def _keep(self, pages: dict[str, Tensor]) -> None:
        for name, array in pages.items():
            setattr(self, name, array)
