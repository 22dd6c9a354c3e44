"""A cache with layers that write to pools of pages shared by many sequences.

The tokens of a step are packed in one row, so a layer does not report sequence lengths, and masks between the tokens of a step are
meaningless: attention reads the pages of each sequence up to its length. A layer records whether attention did so; modelling code
that computes attention itself would mix the sequences.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hfax.errors import UnsupportedModelError
from hfax.kv_cache.cache import LayeredCache
from hfax.kv_cache.layer_kinds import layer_kinds
from hfax.kv_cache.layers import Tensor
from hfax.kv_cache.scales import scales_of

_POOLED = ("full_attention", "sliding_attention")


class PoolOps(Protocol):
    """The operations that a backend provides."""

    def write_rows(
        self, arrays: dict[str, Tensor], key: Tensor, value: Tensor, scales: tuple[float, float]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The pool arrays with the keys and values of the step, and these as tensors that carry the pool."""
        ...

    def is_read(self, key: Tensor) -> bool:
        """Whether attention read the pool carried by a tensor from `write_rows`."""
        ...


class PoolLayer(CacheLayerMixin):
    """Keys and values of one layer, in a pool.

    Args:
        ops: the backend's operations.
        num_slots: more than the tokens of any step, so that no mask is skipped for being causal within the step.
        arrays: arrays of the pool, by name.
        is_sliding: the layer has a sliding window, applied by attention.
        scales: what keys and values are divided by where they are held as float8.
    """

    is_compileable = True

    def __init__(
        self,
        ops: PoolOps,
        num_slots: int,
        arrays: dict[str, Tensor],
        *,
        is_sliding: bool,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.scales = scales
        self.ops = ops
        self.num_slots = num_slots
        self.arrays = arrays
        self.is_sliding = is_sliding
        self.carrier: Tensor = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the pool exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the step; return them, carrying the pool."""
        if self.carrier is not None:
            raise UnsupportedModelError(
                "A layer's cache is filled twice in one step.", "Its pages hold each token once.", "Use slots."
            )
        self.is_initialized = True
        self.arrays, self.carrier, values = self.ops.write_rows(self.arrays, key_states, value_states, self.scales)
        return self.carrier, values

    def get_seq_length(self) -> int:
        """0: there is no single length."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A number of keys above the number of queries, and offset 0."""
        return self.num_slots, 0

    def get_max_length(self) -> int:
        """The number of slots."""
        return self.num_slots

    def reset(self) -> None:
        """Not used: a layer lives for one trace."""


def pooled_layers(config: PretrainedConfig) -> list[str]:
    """The kinds of a model's layers.

    Raises:
        UnsupportedModelError: a layer caches something other than keys and values.
    """
    types, _ = layer_kinds(config)
    if others := sorted(set(types) - set(_POOLED)):
        raise UnsupportedModelError(
            f"The model has layers of kind {', '.join(others)}.",
            "Pages only hold keys and values of every token.",
            "Use one cache slot per sequence.",
        )
    return types


def make_pooled_cache(
    config: PretrainedConfig, ops: PoolOps, num_slots: int, arrays: dict[str, Tensor]
) -> LayeredCache:
    """A cache object for one trace of a step.

    Args:
        config: the model's configuration.
        ops: the backend's operations.
        num_slots: as in `PoolLayer`.
        arrays: pools by layer: "layers.0.key_pages", ….

    Raises:
        UnsupportedModelError: a layer caches something other than keys and values.
    """
    layers = []
    for index, (kind, scales) in enumerate(zip(pooled_layers(config), scales_of(config), strict=False)):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        layers.append(PoolLayer(ops, num_slots, own, is_sliding=kind == "sliding_attention", scales=scales))
    return LayeredCache(layers=layers)


def pooled_arrays(cache: LayeredCache) -> dict[str, Tensor]:
    """The pools after a step, by layer; the inverse of `make_pooled_cache(arrays=…)`.

    Raises:
        UnsupportedModelError: a layer's attention did not read its pool, so its results are invalid.
    """
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, PoolLayer)
        if layer.carrier is not None and not layer.ops.is_read(layer.carrier):
            raise UnsupportedModelError(
                f"Layer {index} computes attention itself.",
                "Its modelling code does not pass the cached keys unchanged to transformers' attention interface.",
                "Use one cache slot per sequence.",
            )
        found |= {f"layers.{index}.{name}": array for name, array in layer.arrays.items()}
    return found
