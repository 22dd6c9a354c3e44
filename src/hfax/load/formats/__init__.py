"""Readers of quantized checkpoints as other libraries publish them, one module a format."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from hfax.errors import CheckpointCorruptError, UnsupportedModelError
from hfax.kv_cache.scales import keep_scales
from hfax.load.formats.cache_scales import find_scales
from hfax.load.packed import StoredWeight
from hfax.load.store import TensorStore

Reader = Callable[[Mapping[str, Any], TensorStore], dict[str, StoredWeight]]
"""`read(quantization_config, store)`: the quantized weights among a checkpoint's tensors, by the names that they have in the
unquantized checkpoint. Raises `UnsupportedModelError` for a variant of the format that it does not know, and
`CheckpointCorruptError` for tensors that do not belong together."""

_READERS: dict[str, str] = {
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "gptq",
    "hqq": "hqq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "fp8",
    "torchao": "torchao",
}
"""The module that reads each `quant_method`, with a function `find`: a `Reader`."""

_OF_ACTIVATIONS = re.compile(
    r"\.(activation_scale|input_(scale|zero_point|global_scale)|output_(scale|zero_point)|qscale_act"
    r"|(q|k|v|kv|prob)_(scale|zero_point)|kv_cache_scaling_factor)$"
)
"""Scales of activations and of caches, which are no weights: activations are not quantized; caches' scales are in the config."""


def find_weights(config: PretrainedConfig, store: TensorStore) -> TensorStore:
    """The store of a checkpoint under the names of the unquantized one.

    The config's `quantization_config` is removed; scales of keys and values are written into it.

    Args:
        config: the model's config.
        store: the checkpoint's tensors.

    Raises:
        UnsupportedModelError: the checkpoint is quantized in a format that hfax does not read.
        CheckpointCorruptError: its tensors do not fit the format.
    """
    options = _take_options(config)
    if options is None:
        return store
    module = importlib.import_module(f"{__name__}.{_READERS[options['quant_method']]}")
    weights: dict[str, StoredWeight] = module.find(options, store)
    if scales := find_scales(store):
        keep_scales(config, scales)
    unused = {name for name in store.names if _OF_ACTIVATIONS.search(name)}
    found = store.with_weights(weights, without=unused)
    _check_rest(found, weights)
    return found


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the config without `quantization_config`, for a format that hfax reads; the config itself if it has none.

    Raises:
        UnsupportedModelError: the checkpoint is quantized in a format that hfax does not read.
    """
    if next(_owners(config), None) is None:
        return config
    config = copy.deepcopy(config)
    _take_options(config)
    return config


def is_quantized_by_hfax(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was quantized by hfax."""
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "hfax"


def method_of(config: PretrainedConfig) -> str | None:
    """The name of the method that a config says its weights are quantized with, "hfax" for hfax's own; None: they are not."""
    if is_quantized_by_hfax(config):
        return "hfax"
    owner = next(_owners(config), None)
    return None if owner is None else _method(_options_of(owner)) or "an unnamed method"


def _options_of(owner: Any) -> dict[str, Any]:
    given: Any = owner.quantization_config
    return dict(given if isinstance(given, Mapping) else given.to_dict())


def _take_options(config: PretrainedConfig) -> dict[str, Any] | None:
    """Removes `quantization_config` from a config and its parts; returns it, with a `quant_method` that has a reader."""
    taken: dict[str, Any] | None = None
    for owner in list(_owners(config)):
        options = _options_of(owner)
        method = _method(options)
        if method not in _READERS:
            raise UnsupportedModelError(
                f"The checkpoint is quantized with {method or 'a method that its config does not name'!r}.",
                f"hfax reads {', '.join(sorted(_READERS))}; read as plain numbers, these weights would be noise.",
                "Use the unquantized checkpoint of the same model, with quantization='int8' or 'int4'.",
            )
        taken = taken or options | {"quant_method": method}
        del owner.quantization_config
    return taken


def _owners(config: PretrainedConfig) -> Iterator[Any]:
    """The config and its parts (such as `text_config`), those that have a `quantization_config` of another library."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for owner in (config, *parts):
        if (
            owner is not None
            and getattr(owner, "quantization_config", None) is not None
            and not is_quantized_by_hfax(owner)
        ):
            yield owner


def _method(options: Mapping[str, Any]) -> str:
    """The name of the method, which old files of two libraries leave out."""
    if (named := options.get("quant_method")) is not None:
        return str(getattr(named, "value", named)).lower()
    if "load_in_4bit" in options or "load_in_8bit" in options:
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in options else ""


def _check_rest(store: TensorStore, weights: Mapping[str, StoredWeight]) -> None:
    """Raise if a matrix of codes is left that no reader made a weight of: it would be read as noise, or drawn at random."""
    codes = (torch.int8, torch.uint8, torch.int32)
    for name in store.names:
        dtype = None if name in weights else store.dtype(name)
        if dtype is None or len(store.shape(name)) not in (2, 3):
            continue
        if dtype in codes or (dtype.is_floating_point and dtype.itemsize == 1):
            raise CheckpointCorruptError(
                f"{name!r} is stored as {dtype}, without the scales that its format needs.",
                "The checkpoint is incomplete, or its config names another format than the one that it is in.",
                "Download the checkpoint again, or save it again with the library that quantized it.",
            )
