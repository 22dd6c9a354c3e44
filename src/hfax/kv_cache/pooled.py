"""A cache whose layers write into pools of pages that many sequences share.

The tokens of a step stand one after the other in one row, so a layer does not say how long a sequence is, and masks between the
step's tokens mean nothing: attention reads a sequence's pages and knows its length. A layer notes whether attention did so;
modelling code that computes attention by itself would mix the sequences.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from hfax.errors import UnsupportedModelError
from hfax.kv_cache.cache import LayeredCache
from hfax.kv_cache.layers import Tensor

_POOLED = ("full_attention", "sliding_attention")


class PoolOps(Protocol):
    """What a backend provides."""

    def write_rows(self, arrays: dict[str, Tensor], key: Tensor, value: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A pool's arrays with the step's keys and values, and the keys as a tensor that carries the pool."""
        ...

    def is_read(self, key: Tensor) -> bool:
        """Whether attention read the pool that a tensor of `write_rows` carries."""
        ...


class PoolLayer(CacheLayerMixin):
    """One layer's keys and values, in a pool.

    Args:
        ops: the backend's operations.
        num_slots: more than any step's tokens, so that no mask is left out for being causal within the step.
        arrays: of the pool, by name.
        is_sliding: the layer sees a window; which keys are in it, attention says.
    """

    is_compileable = True

    def __init__(self, ops: PoolOps, num_slots: int, arrays: dict[str, Tensor], *, is_sliding: bool) -> None:
        super().__init__()
        self.ops = ops
        self.num_slots = num_slots
        self.arrays = arrays
        self.is_sliding = is_sliding
        self.carrier: Tensor = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values; return them, the keys with the pool."""
        if self.carrier is not None:
            raise UnsupportedModelError(
                "A layer's cache is filled twice in one step.", "Its pages hold each token once.", "Use slots."
            )
        self.is_initialized = True
        self.arrays, self.carrier = self.ops.write_rows(self.arrays, key_states, value_states)
        return self.carrier, value_states

    def get_seq_length(self) -> int:
        """0: there is no one length."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """More keys than queries."""
        return self.num_slots, 0

    def get_max_length(self) -> int:
        """As `get_mask_sizes`."""
        return self.num_slots

    def reset(self) -> None:
        """Not used: a layer lives for one trace."""


def pooled_layers(config: PretrainedConfig) -> list[str]:
    """The kinds of a model's layers.

    Raises:
        UnsupportedModelError: one of them keeps something else than keys and values.
    """
    types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if others := sorted(set(types) - set(_POOLED)):
        raise UnsupportedModelError(
            f"The model has layers of kind {', '.join(others)}.",
            "Pages hold keys and values of every token.",
            "Each sequence gets a cache of its own.",
        )
    return list(types)


def make_pooled_cache(
    config: PretrainedConfig, ops: PoolOps, num_slots: int, arrays: dict[str, Tensor]
) -> LayeredCache:
    """A cache object for one trace of a step.

    Args:
        config: the model's configuration.
        ops: the backend's operations.
        num_slots: see `PoolLayer`.
        arrays: pools by layer: "layers.0.key_pages", ….

    Raises:
        UnsupportedModelError: see `pooled_layers`.
    """
    layers = []
    for index, kind in enumerate(pooled_layers(config)):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        layers.append(PoolLayer(ops, num_slots, own, is_sliding=kind == "sliding_attention"))
    return LayeredCache(layers=layers)


def pooled_arrays(cache: LayeredCache) -> dict[str, Tensor]:
    """The pools after a step, by layer; the inverse of `make_pooled_cache(arrays=…)`.

    Raises:
        UnsupportedModelError: a layer's attention did not read its pool, so its results are of no sequence.
    """
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, PoolLayer)
        if layer.carrier is not None and not layer.ops.is_read(layer.carrier):
            raise UnsupportedModelError(
                f"Layer {index} computes attention by itself.",
                "Its modelling code does not hand the cache's keys to transformers' attention interface as they are.",
                "Each sequence gets a cache of its own.",
            )
        found |= {f"layers.{index}.{name}": array for name, array in layer.arrays.items()}
    return found
