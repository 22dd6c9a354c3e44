"""A checkpoint's weights in another format, one tensor in memory at a time.

Turns a folder or a Hub repository into a folder: safetensors or PyTorch's pickles to Flax, Flax or pickles to safetensors, in the
checkpoint's own dtypes. What names mean is found from the model's structure; nothing is computed and no device is used. Orbax is
written by `save_pretrained`, since its arrays have the module's own names.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
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

FLAX_NAME = "flax_model.msgpack"
FORMATS = ("safetensors", "flax", "orbax")
_LEFT_BEHIND = ("*.safetensors*", "*.bin*", "*.msgpack*", "*.h5", "orbax", "*.gguf", "*.onnx")
_Array = tuple[FlaxPath, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


def save_flax(folder: Path, skeleton: Skeleton, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write weights, by the names that PyTorch checkpoints have, as a Flax checkpoint.

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; what was there before stays.
    """
    store = TensorStore(
        names=tuple(tensors),
        read=lambda name: tensors[name],
        read_slice=lambda name, index: tensors[name][index],
        shape=lambda name: tuple(tensors[name].shape),
        float_dtype=None,
    )
    plan = plan_conversion(skeleton, store.names)
    _save_flax(folder, skeleton, store, {source: step.target for step in plan.steps for source, _ in step.sources})


def convert_weights(source: CheckpointSource, store: TensorStore, skeleton: Skeleton, folder: Path, to: str) -> None:
    """Write the weights of a checkpoint, and the other files beside them, into a folder.

    Args:
        source: the checkpoint.
        store: its tensors.
        skeleton: its model.
        folder: made if it is not there; an interrupted conversion leaves what was there.
        to: "safetensors" or "flax".

    Raises:
        CheckpointCorruptError: tensors are missing or unexpected.
        InvalidInputError: a format that is not known, or the checkpoint's own folder.
        HfaxError: the folder cannot be written, or the disk is full.
    """
    if to not in ("safetensors", "flax"):
        raise InvalidInputError(
            f"There is no format {to!r}.", "Weights go to one that hfax writes.", f"Use {', '.join(FORMATS)}."
        )
    if folder.resolve() == source.folder.resolve():
        raise InvalidInputError(
            f"{folder} is the checkpoint's own folder.", "Its files would be mixed.", "Name another folder."
        )
    names = tuple(store.names)
    plan = plan_conversion(skeleton, names)
    without = unknown_to_flax(skeleton.module, skeleton.shapes) if store.is_flax else set()
    tied = skeleton.tied
    loaded = {step.target for step in plan.steps}
    loaded |= {tied[name] for name in loaded if name in tied}
    check_complete(skeleton, loaded, plan.unexpected, strict=True, without=without)
    if to == "safetensors":
        arrays: dict[str, Any] = {name: _Lazy(store, name) for name in names}
        absent = sorted(without - loaded)
        arrays |= draw_missing(skeleton, absent)
        arrays |= {name: torch.zeros((), dtype=torch.int64) for name in absent if name.endswith("num_batches_tracked")}
        save_safetensors(folder, arrays)
    else:
        targets = {source: step.target for step in plan.steps for source, _ in step.sources}
        stored_as = {target: source for source, target in targets.items()}

        def is_copy(target: str) -> bool:
            """Of a tied weight that is stored twice; some checkpoints store two weights that their config calls tied."""
            other = stored_as.get(tied.get(target, ""))
            return other is not None and torch.equal(store.read(stored_as[target]), store.read(other))

        _save_flax(folder, skeleton, store, {n: t for n, t in targets.items() if not is_copy(t)})
    copy_companions(source.folder, folder)


def copy_companions(given: Path, folder: Path) -> None:
    """All files of a checkpoint but its weights."""
    for path in given.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _LEFT_BEHIND):
            shutil.copyfile(path, folder / path.name)


def _save_flax(folder: Path, skeleton: Skeleton, store: TensorStore, targets: dict[str, str]) -> None:
    """Write a folder's Flax file, whole or not at all."""
    paths = flax_paths(skeleton.module, targets)
    absent = unknown_to_flax(skeleton.module, set(targets.values()))

    def arrays() -> Iterator[_Array]:
        for name, (path, axes) in paths.items():
            if targets[name] in absent:
                continue
            stored = _Lazy(store, name)
            order = tuple(range(len(stored.shape))) if axes is None else axes

            def read(stored: _Lazy = stored, order: tuple[int, ...] = order) -> np.ndarray:
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
            "Check the path, its permissions and the free space. What was there before is still there.",
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


class _Lazy:
    """A stored tensor that is read when it is written."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self._store, self._name = store, name
        self.shape = store.shape(name)
        self.dtype = _exactly(store.read_slice(name, tuple(slice(0, 0) for _ in self.shape))).dtype
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return _exactly(self._store.read(self._name))


def _exactly(tensor: torch.Tensor) -> np.ndarray:
    """As it is: `to_numpy` narrows what has 64 bits."""
    return tensor.numpy() if tensor.dtype in (torch.int64, torch.float64) else to_numpy(tensor)
