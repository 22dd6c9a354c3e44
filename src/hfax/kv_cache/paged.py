"""Paged keys and values of a layer, for the TPU decoding attention kernels.

It replaces a full or sliding-window layer and behaves the same in prefill; in decode it writes to its pages and passes them to
attention together with the equivalent dense arrays, which are computed only if some attention cannot read pages.
"""

from __future__ import annotations

from typing import Any, Protocol

from hfax.kv_cache.layers import CacheOps, FullAttentionLayer, Tensor


class PagedCacheOps(CacheOps, Protocol):
    """The operations of a backend that supports pages."""

    def fits_pages(self, key: Tensor, value: Tensor, capacity: int, window: int | None) -> bool:
        """Whether a kernel supports keys and values of these shapes."""
        ...

    def fill_pages(
        self, key: Tensor, value: Tensor, padding: Tensor, capacity: int, window: int | None
    ) -> dict[str, Tensor]:
        """The pages after a prompt with `padding` tokens, [batch], before each sequence: arrays by name."""
        ...

    def write_page(
        self,
        pages: dict[str, Tensor],
        key: Tensor,
        value: Tensor,
        padding: Tensor,
        position: Tensor,
        capacity: int,
        scales: tuple[float, float],
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The pages with one more token, and the equivalent dense keys and values; the keys carry the pages."""
        ...


class PagedLayer(FullAttentionLayer):
    """Paged keys and values of all tokens or of a window.

    If no kernel supports the shapes, it keeps all tokens like `FullAttentionLayer`.

    Args:
        ops: the backend's operations.
        capacity: capacity in tokens, padding included.
        length: tokens held, a scalar array; None in prefill.
        padding: [batch], padding tokens before each prompt.
        window: number of tokens a query attends to; None: all.
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
        """Like `FullAttentionLayer.update`, on pages."""
        if self.base_length is None:
            fits = self.paged_ops.fits_pages(key_states, value_states, self.capacity, self.window)
            if not fits or self.prompt_length != key_states.shape[-2]:
                return super().update(key_states, value_states)
            self.is_initialized, self.num_new = True, key_states.shape[-2]
            keys, values = self._stored(key_states, value_states)
            self._keep(self.paged_ops.fill_pages(keys, values, self.padding, self.capacity, self.window))
            return self.ops.readable((keys, values), key_states, self.scales)
        pages = {name: array for name in self.page_names if (array := getattr(self, name)) is not None}
        if not pages:
            return super().update(key_states, value_states)
        if key_states.shape[-2] != 1:
            raise NotImplementedError("several tokens at once onto a cache in pages")
        self.num_new = 1
        pages, keys, values = self.paged_ops.write_page(
            pages, key_states, value_states, self.padding, self.base_length, self.capacity, self.scales
        )
        self._keep(pages)
        return keys, values

    def _keep(self, pages: dict[str, Tensor]) -> None:
        for name, array in pages.items():
            setattr(self, name, array)
