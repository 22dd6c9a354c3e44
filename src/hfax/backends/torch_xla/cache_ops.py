"""The backend operations of hfax's KV cache (`kv_cache.layers.CacheOps`) on torch_xla tensors."""

from __future__ import annotations

from typing import Any

import torch


class XlaCacheOps:
    """Cache operations with positions as tensors, so that every step is the same program."""

    def write(self, buffer: Any, new: Any, start: Any, scale: float = 1.0) -> Any:
        """`buffer` with `new` written from position `start` (a scalar) on axis -2."""
        index = start + torch.arange(new.shape[-2], device=buffer.device)
        return buffer.index_copy(-2, index, new.to(buffer.dtype))

    def stored(self, new: Any, scale: float = 1.0) -> Any:
        """`new`: the cache holds the model's own numbers."""
        return new

    def readable(self, held: tuple[Any, Any], like: Any, scales: tuple[float, float]) -> tuple[Any, Any]:
        """`held`, as it is."""
        return held

    def pad_to(self, new: Any, capacity: int) -> Any:
        """`new` padded with zeros to `capacity` at the end of axis -2."""
        return torch.nn.functional.pad(new, (0, 0, 0, capacity - new.shape[-2]))

    def ring_positions(self, length: Any, window: int) -> Any:
        """For a ring that holds `length` tokens, last one included: the position held by each slot minus the slot, [window]."""
        slots = torch.arange(window, device=length.device)
        last = length - 1
        return last - (last - slots) % window - slots

    def ring_slot(self, length: Any, window: int) -> Any:
        """The slot of the token at position `length`: `length` modulo `window`."""
        return length % window
