"""The sliding-window ring holds each token in the slot that decoding will look for it in."""

from typing import Any

import numpy as np
import pytest
import torch

from hfax.kv_cache.layers import FullAttentionLayer, SlidingWindowLayer


class TorchOps:
    """`CacheOps` in plain torch."""

    def stored(self, new, scale=1.0):
        return new

    def readable(self, held, like, scales):
        return held

    def write(self, buffer: Any, new: Any, start: Any, scale: float = 1.0) -> Any:
        buffer = buffer.clone()
        buffer[..., int(start) : int(start) + new.shape[-2], :] = new
        return buffer

    def pad_to(self, new: Any, capacity: int) -> Any:
        return torch.nn.functional.pad(new, (0, 0, 0, capacity - new.shape[-2]))

    def ring_positions(self, length: Any, window: int) -> Any:
        slots = torch.arange(window)
        last = length - 1
        return last - torch.remainder(last - slots, window) - slots

    def ring_slot(self, length: Any, window: int) -> Any:
        return torch.remainder(length, window)


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 11])
def test_after_any_prompt_each_slot_holds_the_position_it_claims(prompt: int) -> None:
    window = 4
    tokens = torch.arange(30, dtype=torch.float32).reshape(1, 1, 30, 1)
    layer = SlidingWindowLayer(TorchOps(), 30, None, window=window)
    seen, _ = layer.update(tokens[:, :, :prompt], tokens[:, :, :prompt])
    assert seen.shape[-2] == prompt
    for length in range(prompt, 20):
        step = SlidingWindowLayer(TorchOps(), 30, torch.tensor(length), window=window)
        step.keys, step.values = layer.keys, layer.values
        size, offset = step.get_mask_sizes(1)
        keys, _ = step.update(tokens[:, :, length : length + 1], tokens[:, :, length : length + 1])
        positions = (torch.arange(size) + offset).numpy()
        valid = positions >= 0
        np.testing.assert_array_equal(keys[0, 0, :, 0].numpy()[valid], positions[valid])
        assert sorted(positions[valid]) == list(range(max(0, length - window + 1), length + 1))
        layer = step


@pytest.mark.parametrize("make", [FullAttentionLayer, lambda *a: SlidingWindowLayer(*a, window=4)])
def test_a_length_that_was_read_does_not_change_with_the_next_update(make: Any) -> None:
    layer = make(TorchOps(), 8, torch.tensor(3))
    layer.keys = layer.values = torch.zeros(1, 1, 8 if make is FullAttentionLayer else 4, 2)
    before = layer.get_seq_length()
    layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert int(before) == 3
    assert int(layer.get_seq_length()) == 4
