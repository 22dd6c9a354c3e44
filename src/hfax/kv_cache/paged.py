"""Paged keys and values of a layer, for the TPU kernels.

In prefill a paged layer behaves as the layer that it extends, and keeps pages only if attention to the prompt was such that
attention in decoding can read pages. In decode it writes to its pages and passes them to attention together with the equivalent
dense arrays, which are computed only if some attention cannot read pages.
"""

from __future__ import annotations

from typing import Any, Protocol

from hfax.kv_cache.layers import CacheOps, FullAttentionLayer, SlidingWindowLayer, Tensor


class PagedCacheOps(CacheOps, Protocol):
    """The operations of a backend that supports pages."""

    def watch(self, keys: Tensor, values: Tensor) -> None:
        """Have attention to a prompt's keys and values tell whether attention in decoding can read pages in place of them."""
        ...

    def can_be_read(self, keys: Tensor) -> bool:
        """What attention told of watched keys."""
        ...

    def fill_pages(self, key: Tensor, value: Tensor, padding: Tensor, capacity: int, window: int | None) -> Tensor:
        """The pages after a prompt with `padding` tokens, [batch], before each sequence."""
        ...

    def write_pages(
        self,
        pages: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor,
        position: Tensor,
        capacity: int,
        scales: tuple[float, float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The pages with the next tokens, and the equivalent dense keys and values, which carry the pages."""
        ...


class PagedLayer(FullAttentionLayer):
    """Keys and values of all tokens, in pages if attention can read them.

    Args:
        ops: the backend's operations.
        capacity: capacity in tokens, padding included.
        length: tokens held, a scalar array; None in prefill.
        padding: [batch], padding tokens before each prompt.
    """

    state_names = ("keys", "values", "pages")
    window: int | None = None

    def __init__(
        self, ops: PagedCacheOps, capacity: int, length: Tensor | None, *, padding: Tensor, **of_kind: Any
    ) -> None:
        super().__init__(ops, capacity, length, **of_kind)
        self.paged_ops, self.padding = ops, padding
        self.pages: Tensor = None
        self._prompt: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Like the layer's own `update`, on pages."""
        if self.base_length is None:
            keys, values = super().update(key_states, value_states)
            if self.prompt_length == key_states.shape[-2]:
                self.paged_ops.watch(keys, values)
                self._prompt = (keys, *self._stored(key_states, value_states))
            return keys, values
        if self.pages is None:
            return super().update(key_states, value_states)
        if self.num_new:
            raise NotImplementedError("a layer's pages are written twice in one step")
        self.num_new = key_states.shape[-2]
        self.pages, keys, values = self.paged_ops.write_pages(
            self.pages, key_states, value_states, self.padding, self.base_length, self.capacity, self.scales
        )
        return keys, values

    def settle(self) -> None:
        """After a prompt: keep pages in place of keys and values if attention can read them."""
        if self._prompt is None:
            return
        watched, keys, values = self._prompt
        if self.paged_ops.can_be_read(watched):
            self.pages = self.paged_ops.fill_pages(keys, values, self.padding, self.capacity, self.window)
            self.keys = self.values = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor | int]:
        """Pages stand for as many keys as the capacity."""
        if self.pages is not None:
            return self.capacity, 0
        return super().get_mask_sizes(query_length)


class PagedSlidingLayer(PagedLayer, SlidingWindowLayer):
    """Keys and values of the last `window` tokens, in the pages that they touch, or else in a ring."""
