"""transformers' output and cache classes as JAX pytrees, and the caches as torch's pytrees.

Registration is per class, on demand, once per process; it adds to the registries and changes no class.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import torch
import torch.utils._pytree as torch_pytree
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils.generic import ModelOutput

from hfax.tracing.structure import Structure, flatten, make_model_output, unflatten

_registered: set[type] = {dict, list, tuple, type(None)}
_lock = threading.Lock()


def register_pytrees() -> None:
    """Register every `ModelOutput` and cache class defined so far, keeping `None` fields.

    For users of plain torchax: afterwards `jax.jit` and `jax.tree` take and return these objects, and torchax converts the tensors
    in them (it goes by torch's pytrees, where transformers registers its outputs but not its caches). transformers imports
    modelling files lazily, so call it after importing the model class; repeated calls are harmless.

    It imports torchax, which names a device "jax" for the whole process; hfax by itself does not, as `torch.compile` fails then.
    """
    _name_device()
    for root in (ModelOutput, Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, EncoderDecoderCache, DummyLayer):
        for cls in _with_subclasses(root):
            register_output_class(cls)
            if not issubclass(cls, ModelOutput):
                _register_in_torch(cls)


def register_output_class(cls: type) -> None:
    """Register a class if it is a `ModelOutput`, a cache or a cache layer and not registered yet."""
    with _lock:
        if cls in _registered:
            return
        if issubclass(cls, ModelOutput):
            if not dataclasses.is_dataclass(cls):
                return
            names = tuple(f.name for f in dataclasses.fields(cls))
            _register(cls, *_model_output_functions(cls, names))
        elif issubclass(cls, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, EncoderDecoderCache, DummyLayer)):
            _register(cls, _flatten_cache, _unflatten_cache, None)


def _register(cls: type, flatten_function: Any, unflatten_function: Any, with_keys: Any) -> None:
    try:
        jax.tree_util.register_pytree_with_keys(
            cls, with_keys or _flatten_cache_with_keys, unflatten_function, flatten_function
        )
    except ValueError as error:
        if "Duplicate" not in str(error):
            raise
    _registered.add(cls)


def _name_device() -> None:
    """Do what torchax's import does to torch, which is left out where hfax imported it (`hfax.tracing.torchax`)."""
    try:
        import torchax
    except ImportError:
        return
    if not hasattr(torch, "jax"):
        torch.utils.rename_privateuse1_backend("jax")  # pyright: ignore[reportPrivateImportUsage]
        torch._register_device_module("jax", torchax.device_module)  # pyright: ignore[reportAttributeAccessIssue]


def _register_in_torch(cls: type) -> None:
    if cls not in torch_pytree.SUPPORTED_NODES:
        torch_pytree.register_pytree_node(
            cls,
            _flatten_cache,
            _unflatten_torch_cache,
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            flatten_with_keys_fn=_flatten_cache_with_torch_keys,
        )


def _model_output_functions(cls: type, names: tuple[str, ...]) -> tuple[Any, Any, Any]:
    def flatten_output(output: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(output, n) for n in names), None

    def flatten_with_keys(output: Any) -> tuple[tuple[Any, ...], None]:
        return tuple((jax.tree_util.GetAttrKey(n), getattr(output, n)) for n in names), None

    def unflatten_output(_: None, children: Any) -> Any:
        return make_model_output(cls, dict(zip(names, children, strict=True)))

    return flatten_output, unflatten_output, flatten_with_keys


def _flatten_cache(cache: Any) -> tuple[list[Any], Structure]:
    return flatten(cache)


def _flatten_cache_with_keys(cache: Any) -> tuple[list[Any], Structure]:
    arrays, structure = flatten(cache)
    return [(jax.tree_util.SequenceKey(i), a) for i, a in enumerate(arrays)], structure


def _flatten_cache_with_torch_keys(cache: Any) -> tuple[list[Any], Structure]:
    arrays, structure = flatten(cache)
    return [(torch_pytree.SequenceKey(i), a) for i, a in enumerate(arrays)], structure


def _unflatten_cache(structure: Structure, arrays: Any) -> Any:
    return unflatten(structure, list(arrays))


def _unflatten_torch_cache(arrays: Any, structure: Structure) -> Any:
    arrays = list(arrays)
    cache = unflatten(structure, arrays)
    device = next((a.device for a in arrays if isinstance(a, torch.Tensor)), None)
    for part in (cache, *_layers(cache)):
        if device is not None and "device" in vars(part):
            part.device = device  # layers make positions there, which must be where their keys are now
    return cache


def _layers(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [*_layers(cache.self_attention_cache), *_layers(cache.cross_attention_cache)]
    return list(getattr(cache, "layers", ()))


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_with_subclasses(sub) for sub in cls.__subclasses__()))
