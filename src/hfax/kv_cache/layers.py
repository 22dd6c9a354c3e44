"""The KV cache of one layer, for each kind of layer: full attention, sliding window, recurrent state, cross-attention.

Each class implements the protocol that transformers' modelling code calls (`update`, `get_seq_length`, `get_mask_sizes`, …) and
holds its state as plain attributes that are replaced, never modified in place. A layer lives for one trace. It is either filled
from empty (prefill: the layer holds nothing, lengths are Python ints, attention sees only the new keys) or continued (decode: the
layer holds fixed-size arrays, the length is a scalar array). It does not depend on JAX: the backend provides writes at traced
positions and padding as `CacheOps`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

Tensor = Any
"""A backend's tensor: in a trace, the object that modelling code treats as a torch.Tensor."""


class CacheOps(Protocol):
    """The operations that a backend provides to the cache."""

    def write(self, buffer: Tensor, new: Tensor, start: Tensor, scale: float = 1.0) -> Tensor:
        """`buffer` with `new` written from position `start` (a scalar) on axis -2, as by `stored`."""
        ...

    def stored(self, new: Tensor, scale: float = 1.0) -> Tensor:
        """New keys or values as the cache holds them: their numbers may be rounded, and are divided by `scale` before."""
        ...

    def readable(self, held: tuple[Tensor, Tensor], like: Tensor, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The keys and values that the cache holds, as attention takes them: in the dtype of the new keys `like`."""
        ...

    def pad_to(self, new: Tensor, capacity: int) -> Tensor:
        """`new` padded with zeros to `capacity` at the end of axis -2."""
        ...

    def ring_positions(self, length: Tensor, window: int) -> Tensor:
        """For a ring that holds `length` tokens, last one included: the position held by each slot minus the slot, [window].

        Unwritten slots get a negative position.
        """
        ...

    def ring_slot(self, length: Tensor, window: int) -> Tensor:
        """The slot of the token at position `length`: `length` modulo `window`."""
        ...


class FullAttentionLayer(CacheLayerMixin):
    """Keys and values of every token, [batch, heads, capacity, head_dim].

    Some models put image features before the prompt; the layer then holds that many tokens more than `capacity`.
    """

    is_compileable = True
    is_sliding = False
    supports_early_init = False
    state_names = ("keys", "values")
    reads_back = True
    """Whether attention gets keys and values from `update` alone; else they are held in their own dtype."""

    def __init__(self, ops: CacheOps, capacity: int, length: Tensor | None) -> None:
        super().__init__()
        self.ops = ops
        self.capacity = capacity
        self.base_length = length
        self.num_new = 0
        self.prompt_length: int | None = None
        self.scales = (1.0, 1.0)
        """What keys and values are divided by where they are held as float8."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the first `update` creates the arrays."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those that attention reads: the new ones in prefill, else the whole buffer.

        Also in prefill they are those that the cache holds, so that a token's numbers do not depend on how its prompt was read.
        """
        self.is_initialized = True
        start, self.num_new = self.num_new, self.num_new + key_states.shape[-2]
        if self.base_length is None:
            self._require_one_prefill(start)
            if self.prompt_length is not None:
                self.capacity += max(self.num_new - self.prompt_length, 0)
            keys, values = self._stored(key_states, value_states)
            self.keys, self.values = self.ops.pad_to(keys, self.capacity), self.ops.pad_to(values, self.capacity)
            return self.ops.readable((keys, values), key_states, self.scales)
        self._write(key_states, value_states, self.base_length + start if start else self.base_length)
        return self.ops.readable((self.keys, self.values), key_states, self.scales)

    def _stored(self, *states: Tensor) -> list[Tensor]:
        """New keys and values as the cache holds them."""
        if not self.reads_back:
            return list(states)
        return [self.ops.stored(new, scale) for new, scale in zip(states, self.scales, strict=True)]

    def _write(self, key_states: Tensor, value_states: Tensor, position: Tensor) -> None:
        """Write new keys and values from a position on."""
        of_keys, of_values = self.scales
        self.keys = self.ops.write(self.keys, key_states, position, of_keys)
        self.values = self.ops.write(self.values, value_states, position, of_values)

    def restored(self) -> None:
        """Called after the arrays are restored: count the entries before the prompt."""
        if (
            self.base_length is not None
            and self.keys is not None
            and (before := self.keys.shape[-2] - self.capacity) > 0
        ):
            self.base_length = self.base_length + before
            self.capacity += before

    def _require_one_prefill(self, num_before: int) -> None:
        if num_before:
            raise NotImplementedError("a layer's cache was filled twice in one prefill")

    def get_seq_length(self) -> Tensor | int:
        """Tokens held: a Python int in prefill, a scalar array in decode."""
        if self.base_length is None:
            return self.num_new
        return self.base_length + self.num_new if self.num_new else self.base_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor | int]:
        """Number of keys that attention reads, and the position of the first (or, for a ring, of each)."""
        return (query_length if self.base_length is None else self.capacity), 0

    def get_max_length(self) -> int:
        """Capacity, in tokens."""
        return self.capacity

    def reset(self) -> None:
        """Not used: a layer lives for one trace."""


class SlidingWindowLayer(FullAttentionLayer):
    """Keys and values of the last `window` tokens, in a ring: the token at position p is in slot p modulo window."""

    is_sliding = True

    def restored(self) -> None:
        """No-op: there are no entries before the prompt."""

    def __init__(self, ops: CacheOps, capacity: int, length: Tensor | None, *, window: int) -> None:
        super().__init__(ops, capacity, length)
        self.window = min(window, capacity)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Like `FullAttentionLayer.update`; in prefill attention sees all new keys, and the last `window` are kept."""
        if self.window == self.capacity:
            return super().update(key_states, value_states)
        self.is_initialized = True
        start, self.num_new = self.num_new, self.num_new + key_states.shape[-2]
        if self.base_length is None:
            self._require_one_prefill(start)
            keys, values = self._stored(key_states, value_states)
            self.keys, self.values = self._ring(keys), self._ring(values)
            return self.ops.readable((keys, values), key_states, self.scales)
        if key_states.shape[-2] != 1:
            raise NotImplementedError("several tokens at once onto a sliding-window cache")
        self._write(key_states, value_states, self.ops.ring_slot(self.base_length, self.window))
        return self.ops.readable((self.keys, self.values), key_states, self.scales)

    def _ring(self, states: Tensor) -> Tensor:
        """The last `window` of [batch, heads, length, head_dim], each in its slot."""
        length = states.shape[-2]
        if length <= self.window:
            return self.ops.pad_to(states, self.window)
        last = states[:, :, length - self.window :]
        shift = length % self.window
        return (
            torch.cat([last[:, :, self.window - shift :], last[:, :, : self.window - shift]], dim=-2) if shift else last
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor | int]:
        """In decode the second value is a vector: the position of each slot minus the slot."""
        if self.base_length is None or self.window == self.capacity:
            return super().get_mask_sizes(query_length)
        return self.window, self.ops.ring_positions(self.base_length + 1, self.window)


class RecurrentLayer(LinearAttentionLayer):
    """Fixed-size convolution and recurrent states of a state-space or linear-attention layer."""

    def __init__(self, length: Tensor | None, *, num_states: int) -> None:
        super().__init__(number_of_states=num_states)
        if length is not None:
            self.has_previous_state = dict.fromkeys(range(num_states), True)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keep the last `conv_kernel_size` columns; return the columns that the convolution reads (old ones first)."""
        if self.has_previous_state[state_idx]:
            old: Any = self.conv_states[state_idx]
            kernel = old.shape[-1]
            full = torch.cat([old, conv_states], dim=-1)
        else:
            kernel = conv_kernel_size or conv_states.shape[-1]
            full = conv_states
            self.has_previous_state[state_idx] = True
            if full.shape[-1] < kernel:
                full = torch.nn.functional.pad(full, (kernel - full.shape[-1], 0))
        self.conv_states[state_idx] = full[..., full.shape[-1] - kernel :] + 0
        self.is_conv_states_initialized[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replace the state."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


class HybridLayer(RecurrentLayer, FullAttentionLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Attention keys and values plus recurrent states, for layers with both."""

    def __init__(self, ops: CacheOps, capacity: int, length: Tensor | None, *, num_states: int) -> None:
        FullAttentionLayer.__init__(self, ops, capacity, length)
        RecurrentLayer.__init__(self, length, num_states=num_states)


class HybridSlidingLayer(RecurrentLayer, SlidingWindowLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A sliding window of keys and values plus recurrent states."""

    def __init__(self, ops: CacheOps, capacity: int, length: Tensor | None, *, window: int, num_states: int) -> None:
        SlidingWindowLayer.__init__(self, ops, capacity, length, window=window)
        RecurrentLayer.__init__(self, length, num_states=num_states)


class IndexedLayer(FullAttentionLayer):
    """Keys and values of every token, and the keys of a sparse layer's indexer."""

    state_names = ("keys", "values", "indexer_keys", "positions")

    def __init__(self, ops: CacheOps, capacity: int, length: Tensor | None) -> None:
        super().__init__(ops, capacity, length)
        self.indexer_keys: Tensor = None
        self.positions: Tensor = None
        self.num_new_indexed = 0

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store new indexer keys, [batch, length, dim]; return the new ones in prefill, else all, [batch, capacity, dim]."""
        start, self.num_new_indexed = self.num_new_indexed, self.num_new_indexed + indexer_key_states.shape[1]
        if self.base_length is None:
            self._require_one_prefill(start)
            self.indexer_keys = self.ops.pad_to(indexer_key_states, self.capacity)
            return indexer_key_states
        position = self.base_length + start if start else self.base_length
        self.indexer_keys = self.ops.write(self.indexer_keys, indexer_key_states, position)
        return self.indexer_keys

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of all slots, [n, batch, capacity]; None before the prompt. Models append those of the step, and set it."""
        return self.positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        if self.positions is None:
            self.positions = self.ops.pad_to(positions.unsqueeze(-1), self.capacity).squeeze(-1)
        else:
            new = positions[..., self.capacity :].unsqueeze(-1)
            self.positions = self.ops.write(self.positions.unsqueeze(-1), new, self.base_length).squeeze(-1)


class CrossAttentionLayer(FullAttentionLayer):
    """Keys and values of an encoder output: written once at full length, then only read."""

    reads_back = False

    def restored(self) -> None:
        """No-op: its length is independent of the decoder sequence."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the encoder keys and values unchanged."""
        self.is_initialized = True
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Encoder tokens held; 0 before the first update."""
        return 0 if self.keys is None else self.keys.shape[-2]
