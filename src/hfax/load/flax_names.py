"""Flax's names and layouts for the weights of transformers' models, and back.

Turns a path ("encoder", "layer", "0", …, "kernel") and its array into the name and layout that the PyTorch class stored, and a
module's weights into what its Flax class stored. The rules are those of transformers 4's `modeling_flax_pytorch_utils.py`: kernels
of linear layers and of convolutions are turned, scales of norms and tables of embeddings are called otherwise, running statistics
are a collection of their own. Layers that were run by `nn.scan` are stored in one array, with the layers as its first axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from hfax.load.flax_msgpack import FlaxArray, FlaxPath

_SCANNED = re.compile(r"(Flax|Scan)\w*")
_COLLECTIONS = ("params", "batch_stats")
_LEAVES = {"scale": "weight", "embedding": "weight", "kernel": "weight", "mean": "running_mean", "var": "running_var"}
_WITHOUT_POOLER = re.compile("For(MaskedLM|CausalLM|TokenClassification|QuestionAnswering)$")
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._BatchNorm)
_STATISTICS = {"running_mean": "mean", "running_var": "var"}
_WEIGHT_NORM = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}


def torch_arrays(
    index: Mapping[FlaxPath, FlaxArray],
) -> Iterator[tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]:
    """Name, shape, dtype and a function that gives the array, as PyTorch has them, of all arrays of a Flax checkpoint."""
    for path, stored in index.items():
        if path[0] in _COLLECTIONS and len(path) > 1 and all(p[0] in _COLLECTIONS for p in index):
            path = path[1:]
        scanned = next((i for i, part in enumerate(path) if _SCANNED.fullmatch(part)), None)
        if scanned is None:
            yield _as_torch(path, stored.shape, stored.dtype, stored.read)
            continue
        for layer in range(stored.shape[0]):
            own = (*path[:scanned], str(layer), *path[scanned + 1 :])
            yield _as_torch(own, stored.shape[1:], stored.dtype, lambda layer=layer, read=stored.read: read()[layer])


def _as_torch(
    path: FlaxPath, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
) -> tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]:
    leaf = path[-1]
    name = ".".join((*path[:-1], _LEAVES.get(leaf, leaf)))
    if leaf != "kernel":
        return name, shape, dtype, read
    axes = _to_torch_axes(len(shape))
    return name, tuple(shape[a] for a in axes), dtype, lambda: read().transpose(axes)


def _to_torch_axes(ndim: int) -> tuple[int, ...]:
    """Of a kernel: [in, out] to [out, in]; [height, width, in, out] to [out, in, height, width]; likewise with one axis of
    width."""
    return (3, 2, 0, 1) if ndim == 4 else tuple(reversed(range(ndim)))


def flax_paths(
    module: torch.nn.Module, targets: Mapping[str, str]
) -> dict[str, tuple[FlaxPath, tuple[int, ...] | None]]:
    """The path of each stored weight in a Flax checkpoint, and the order of axes that its array has there; None: as it is.

    Args:
        module: the model.
        targets: names as PyTorch checkpoints of transformers 4 have them, to the names of the module's weights.
    """
    has_statistics = any(name.endswith(tuple(_STATISTICS)) for name in targets)
    found: dict[str, tuple[FlaxPath, tuple[int, ...] | None]] = {}
    for name, target in targets.items():
        if name.endswith("num_batches_tracked"):
            continue
        in_flax = name
        for torch_name, flax_name in _WEIGHT_NORM.items():
            in_flax = in_flax.replace(torch_name, flax_name)
        owner, _, leaf = in_flax.rpartition(".")
        axes: tuple[int, ...] | None = None
        if leaf in _STATISTICS:
            leaf = _STATISTICS[leaf]
        elif leaf == "weight":
            leaf, axes = _kind(module.get_submodule(target.rpartition(".")[0]))
        path = (*owner.split("."), leaf) if owner else (leaf,)
        if has_statistics:
            path = ("batch_stats" if leaf in ("mean", "var") else "params", *path)
        found[name] = (path, axes)
    return found


def _kind(part: torch.nn.Module) -> tuple[str, tuple[int, ...] | None]:
    """What the `weight` of a layer is called, and how its axes lie."""
    if isinstance(part, (torch.nn.Linear, Conv1D)):
        return "kernel", (1, 0)
    if isinstance(part, torch.nn.modules.conv._ConvNd):
        return "kernel", (2, 3, 1, 0) if part.weight.ndim == 4 else (2, 1, 0)
    if isinstance(part, torch.nn.Embedding):
        return "embedding", None
    return ("scale" if isinstance(part, _NORMS) else "weight"), None


def unknown_to_flax(module: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """The weights that a Flax class has no array for: counts of batches, tables that it computes, poolers that nothing reads."""
    reads_pooler = not _WITHOUT_POOLER.search(type(module).__name__)
    found = set()
    for name in names:
        owner, _, leaf = name.rpartition(".")
        is_table = "Sinusoidal" in type(module.get_submodule(owner)).__name__
        if leaf == "num_batches_tracked" or is_table or (not reads_pooler and ".pooler." in name):
            found.add(name)
    return found
