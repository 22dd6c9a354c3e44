"""Converts weight names and layouts between Flax and PyTorch for transformers models.

Maps a path ("encoder", "layer", "0", …, "kernel") and its array to the PyTorch name and layout, and a module's weights to those of
its Flax class. The rules are those of transformers 4's `modeling_flax_pytorch_utils.py`: linear and convolution kernels are
transposed, norm scales and embedding tables are renamed, and running statistics are a separate collection. Layers run by
`nn.scan` are stored as one array with layers on the first axis.
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
    """PyTorch name, shape, dtype and a function that returns the array, for every array of a Flax checkpoint."""
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
    """Axis order of a kernel: [in, out] to [out, in]; [height, width, in, out] to [out, in, height, width]; [width, in, out] to
    [out, in, width]."""
    return (3, 2, 0, 1) if ndim == 4 else tuple(reversed(range(ndim)))


def flax_paths(
    module: torch.nn.Module, targets: Mapping[str, str]
) -> dict[str, tuple[FlaxPath, tuple[int, ...] | None]]:
    """Each stored weight's path in a Flax checkpoint, and its axis order there; None if unchanged.

    Args:
        module: the model.
        targets: weight names in transformers 4 PyTorch checkpoints, mapped to the module's weight names.
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
    """Flax's name for a layer's `weight`, and its axis order."""
    if isinstance(part, (torch.nn.Linear, Conv1D)):
        return "kernel", (1, 0)
    if isinstance(part, torch.nn.modules.conv._ConvNd):
        return "kernel", (2, 3, 1, 0) if part.weight.ndim == 4 else (2, 1, 0)
    if isinstance(part, torch.nn.Embedding):
        return "embedding", None
    return ("scale" if isinstance(part, _NORMS) else "weight"), None


def unknown_to_flax(module: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Weights that a Flax class does not store: batch counts, computed tables, unused poolers."""
    reads_pooler = not _WITHOUT_POOLER.search(type(module).__name__)
    found = set()
    for name in names:
        owner, _, leaf = name.rpartition(".")
        is_table = "Sinusoidal" in type(module.get_submodule(owner)).__name__
        if leaf == "num_batches_tracked" or is_table or (not reads_pooler and ".pooler." in name):
            found.add(name)
    return found
