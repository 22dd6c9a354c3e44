"""Readers of quantized checkpoints as other libraries publish them, one module a format."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

from hfax.errors import UnsupportedModelError
from hfax.load.packed import StoredWeight
from hfax.load.store import TensorStore

Reader = Callable[[Mapping[str, Any], TensorStore], dict[str, StoredWeight]]
"""`read(quantization_config, store)`: the quantized weights among a checkpoint's tensors, by the names that they have in the
unquantized checkpoint. Raises `UnsupportedModelError` for a variant of the format that it does not know, and
`CheckpointCorruptError` for tensors that do not belong together."""

_READERS: dict[str, str] = {}
"""The module that reads each `quant_method`, with a function `find`: a `Reader`."""


def find_weights(config: PretrainedConfig, store: TensorStore) -> TensorStore:
    """The store of a checkpoint under the names of the unquantized one. The config's `quantization_config` is removed.

    Args:
        config: the model's config.
        store: the checkpoint's tensors.

    Raises:
        UnsupportedModelError: the checkpoint is quantized in a format that hfax does not read.
        CheckpointCorruptError: its tensors do not fit the format.
    """
    owner: Any = config
    given = getattr(owner, "quantization_config", None)
    if given is None:
        return store
    options = dict(given if isinstance(given, Mapping) else given.to_dict())
    method = str(options.get("quant_method", "")).lower()
    if method not in _READERS:
        raise UnsupportedModelError(
            f"The checkpoint is quantized with {method or 'a method that its config does not name'!r}.",
            f"hfax reads {', '.join(sorted(_READERS)) or 'none'}; read as plain numbers, these weights would be noise.",
            "Use the unquantized checkpoint of the same model, with quantization='int8' or 'int4'.",
        )
    weights = importlib.import_module(f"{__name__}.{_READERS[method]}").find(options, store)
    del owner.quantization_config
    return store.with_weights(weights)
