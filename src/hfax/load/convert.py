"""Converts a checkpoint's weights to another format, one tensor in memory at a time.

Turns a folder or a Hub repository into a folder: safetensors or PyTorch pickles to Flax, Flax or pickles to safetensors, keeping
the checkpoint's dtypes. Names are mapped from the model's structure; nothing is computed and no device is used. Orbax is
written by `save_pretrained`, because its arrays use the module's own names.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfax.errors import HfaxError, InvalidInputError
from hfax.load.conversion import check_complete, plan_conversion
from hfax.load.flax_msgpack import FlaxPath, write_flax
from hfax.load.flax_names import flax_paths, unknown_to_flax
from hfax.load.host_arrays import to_numpy
from hfax.load.rules import draw_missing
from hfax.load.save import save_safetensors
from hfax.load.skeleton import Skeleton
from hfax.load.source import CheckpointSource
from hfax.load.store import TensorStore
from hfax.load.weight_files import companions

FLAX_NAME = "flax_model.msgpack"
FORMATS = ("safetensors", "flax", "orbax")
_LEFT_BEHIND = ("*.safetensors*", "*.bin*", "*.msgpack*", "*.h5", "orbax", "*.gguf", "*.onnx")
_Array = tuple[FlaxPath, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


def save_flax(folder: Path, skeleton: Skeleton, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write weights, given by their PyTorch checkpoint names, as a Flax checkpoint.

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; its previous contents are kept.
    """
    store = TensorStore(
        names=tuple(tensors),
        read=lambda name: tensors[name],
        read_slice=lambda name, index: tensors[name][index],
        shape=lambda name: tuple(tensors[name].shape),
        float_dtype=None,
    )
    plan = plan_conversion(skeleton, store.names, store.rules)
    _save_flax(folder, skeleton, store, {source: step.target for step in plan.steps for source, _ in step.sources})


def convert_weights(source: CheckpointSource, store: TensorStore, skeleton: Skeleton, folder: Path, to: str) -> None:
    """Write a checkpoint's weights in another format, and copy its other files, into a folder.

    Args:
        source: the checkpoint.
        store: the checkpoint's tensors.
        skeleton: the checkpoint's model.
        folder: created if it does not exist; an interrupted conversion keeps its previous contents.
        to: "safetensors" or "flax".

    Raises:
        CheckpointCorruptError: tensors are missing or unexpected.
        InvalidInputError: an unknown format, or the checkpoint's own folder.
        HfaxError: the folder cannot be written, or the disk is full.
    """
    if to not in ("safetensors", "flax"):
        raise InvalidInputError(f"Unknown format {to!r}.", "hfax cannot write it.", f"Use one of {', '.join(FORMATS)}.")
    check_other_folder(source, folder)
    names = tuple(store.names)
    plan = plan_conversion(skeleton, names)
    without = unknown_to_flax(skeleton.module, skeleton.shapes) if store.is_flax else set()
    tied = skeleton.tied
    loaded = {step.target for step in plan.steps}
    loaded |= {tied[name] for name in loaded if name in tied}
    check_complete(skeleton, loaded, plan.unexpected, strict=True, without=without)
    if to == "safetensors":
        arrays: dict[str, Any] = {name: LazyTensor(store, name) for name in names}
        absent = sorted(without - loaded)
        arrays |= draw_missing(skeleton, absent)
        arrays |= {name: torch.zeros((), dtype=torch.int64) for name in absent if name.endswith("num_batches_tracked")}
        save_safetensors(folder, arrays)
    else:
        targets = {source: step.target for step in plan.steps for source, _ in step.sources}
        stored_as = {target: source for source, target in targets.items()}

        def is_copy(target: str) -> bool:
            """Whether this is a tied weight stored twice; some checkpoints store different values for weights their config ties."""
            other = stored_as.get(tied.get(target, ""))
            return other is not None and torch.equal(store.read(stored_as[target]), store.read(other))

        _save_flax(folder, skeleton, store, {n: t for n, t in targets.items() if not is_copy(t)})
    copy_companions(source.folder, folder)
    if store.assembled:
        _forget_quantization(folder / "config.json")


def check_other_folder(source: CheckpointSource, folder: Path) -> None:
    """Raise if a checkpoint would be written over itself.

    Raises:
        InvalidInputError: it is the checkpoint's own folder.
    """
    if folder.resolve() == source.folder.resolve():
        raise InvalidInputError(
            f"{folder} is the checkpoint's own folder.",
            "Old and new weight files would be mixed.",
            "Pass another folder.",
        )


def copy_companions(given: Path, folder: Path, *, without: Collection[str] = ()) -> None:
    """Copy all checkpoint files except the weights and those named `without`."""
    for path in given.iterdir():
        if path.is_file() and path.name not in without and not any(path.match(pattern) for pattern in _LEFT_BEHIND):
            shutil.copyfile(path, folder / path.name)
    for name in companions((path.relative_to(given).as_posix() for path in given.glob("*/*")), allow_code=False):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(given / name, folder / name)


def _forget_quantization(path: Path) -> None:
    """Remove `quantization_config` from a config.json and its parts: the weights beside it are plain numbers."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save_flax(folder: Path, skeleton: Skeleton, store: TensorStore, targets: dict[str, str]) -> None:
    """Write a folder's Flax file atomically."""
    paths = flax_paths(skeleton.module, targets)
    absent = unknown_to_flax(skeleton.module, set(targets.values()))

    def arrays() -> Iterator[_Array]:
        for name, (path, axes) in paths.items():
            if targets[name] in absent:
                continue
            stored = LazyTensor(store, name)
            order = tuple(range(len(stored.shape))) if axes is None else axes

            def read(stored: LazyTensor = stored, order: tuple[int, ...] = order) -> np.ndarray:
                return np.asarray(stored).transpose(order)

            yield path, tuple(stored.shape[a] for a in order), stored.dtype, read

    scratch = folder / f".{uuid.uuid4().hex}.{FLAX_NAME}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_flax(scratch, arrays())
        scratch.replace(folder / FLAX_NAME)
    except OSError as error:
        raise HfaxError(
            f"The weights could not be written to {folder}.",
            f"{type(error).__name__}: {error}",
            "Check the path, its permissions and the free space. The folder's previous contents are unchanged.",
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


class LazyTensor:
    """A stored tensor that is read only when it is written."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self._store, self._name = store, name
        self.shape = store.shape(name)
        self.dtype = _exactly(store.read_slice(name, tuple(slice(0, 0) for _ in self.shape))).dtype
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return _exactly(self._store.read(self._name))


def _exactly(tensor: torch.Tensor) -> np.ndarray:
    """Keep the dtype; `to_numpy` would narrow 64-bit types."""
    return tensor.numpy() if tensor.dtype in (torch.int64, torch.float64) else to_numpy(tensor)
