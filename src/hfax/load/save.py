"""Saves a model's weights as safetensors files that plain transformers loads bit for bit.

Writes arrays by name to `model.safetensors`, or to shards with an index, in a folder. Everything is written and flushed
under temporary names first, so a full disk or an interrupt leaves the folder unchanged. It does not handle
configurations or tokenizers.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory

from hfax.errors import HfaxError, InvalidInputError
from hfax.load.safetensors_header import ALIGNMENT, STORED_DTYPES, make_header

INDEX_NAME = "model.safetensors.index.json"
_PATTERN = "model{suffix}.safetensors"
_EARLIER_SAVE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_WRITE_BYTES = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_safetensors(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    max_shard_size: int | str = "50GB",
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write one model's weights, replacing an earlier save in the folder.

    Args:
        folder: created if it does not exist.
        tensors: name to a torch tensor or anything `numpy.asarray` accepts (numpy and jax arrays). Each is fetched from
            its device only when it is written; tensors in host memory are not copied.
        max_shard_size: maximum file size, in bytes or as a string such as "5GB"; larger models are sharded with an index.
        metadata: written to every file; None: `{"format": "pt"}`, which transformers requires.

    Returns:
        The files written, the index last.

    Raises:
        InvalidInputError: a dtype that safetensors does not support, or an invalid `max_shard_size`.
        HfaxError: the disk is full, or the folder cannot be written; its previous contents are kept.

    Tensors with a size that is a multiple of 64 bytes start at such an offset, so that `SafetensorsFile` can map them.
    """
    folder = Path(folder)
    metadata = {"format": "pt"} if metadata is None else metadata
    layouts = {name: _layout(name, tensor) for name, tensor in tensors.items()}
    shards = _split(layouts, max_shard_size)
    total_bytes = sum(num_bytes for _, _, num_bytes in layouts.values())
    written: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, total_bytes)
        for file_name, names in shards.items():
            temporary = written[file_name] = folder / f".{file_name}.{uuid.uuid4().hex[:8]}.tmp"
            _write_shard(temporary, {name: layouts[name] for name in names}, tensors, metadata)
        if len(shards) > 1:
            temporary = written[INDEX_NAME] = folder / f".{INDEX_NAME}.{uuid.uuid4().hex[:8]}.tmp"
            _write_index(temporary, shards, total_bytes)
        return _put_in_place(folder, written)
    except OSError as error:
        raise _cannot_write(folder, total_bytes, error) from error
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def _layout(name: str, tensor: Any) -> tuple[str, tuple[int, ...], int]:
    """(safetensors dtype, shape, size in bytes) of a tensor, without fetching it."""
    is_torch = isinstance(tensor, torch.Tensor)
    dtype_name = str(tensor.dtype).removeprefix("torch.") if is_torch else np.dtype(tensor.dtype).name
    if dtype_name not in STORED_DTYPES:
        raise InvalidInputError(
            f"{name!r} of shape {tuple(tensor.shape)} has dtype {dtype_name}.",
            f"safetensors supports {', '.join(STORED_DTYPES)}.",
            "Cast it to one of these before saving.",
        )
    return STORED_DTYPES[dtype_name], tuple(tensor.shape), int(tensor.nbytes)


def _split(layouts: Mapping[str, tuple[str, tuple[int, ...], int]], max_shard_size: int | str) -> dict[str, list[str]]:
    """File name to its tensor names, in byte order."""
    try:
        split = split_state_dict_into_shards_factory(
            dict(layouts),
            get_storage_size=lambda layout: layout[2],
            filename_pattern=_PATTERN,
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise InvalidInputError(
            f"max_shard_size={max_shard_size!r} is not a size.", str(error), 'Pass bytes, or a string such as "5GB".'
        ) from error
    shards = split.filename_to_tensors or {_PATTERN.format(suffix=""): []}
    return {file_name: sorted(names, key=lambda name: _place(layouts[name])) for file_name, names in shards.items()}


def _place(layout: tuple[str, tuple[int, ...], int]) -> tuple[bool, int]:
    """Sort key: wider dtypes first; sizes that would misalign the tensors after them go last."""
    _, shape, num_bytes = layout
    itemsize = num_bytes // max(int(np.prod(shape, dtype=np.int64)), 1)
    return num_bytes % ALIGNMENT != 0, -itemsize


def _write_shard(
    path: Path,
    layouts: Mapping[str, tuple[str, tuple[int, ...], int]],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> None:
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(make_header(layouts, metadata)))
        for name, (_, shape, num_bytes) in layouts.items():
            content = _content(tensors[name])
            if len(content) != num_bytes:
                raise AssertionError(f"{name!r} of shape {shape} gave {len(content)} bytes, not {num_bytes}")
            _write_all(file.fileno(), content)
        os.fsync(file.fileno())


def _content(tensor: Any) -> memoryview:
    """A tensor's bytes, row-major and little endian; a view if host memory already has that layout."""
    if isinstance(tensor, torch.Tensor):
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data
    array = np.asarray(tensor)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return array.reshape(-1).view(np.uint8).data


def _write_all(fd: int, content: memoryview) -> None:
    for start in range(0, len(content), _WRITE_BYTES):
        chunk = content[start : start + _WRITE_BYTES]
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]


def _write_index(path: Path, shards: Mapping[str, list[str]], total_bytes: int) -> None:
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(folder: Path, written: Mapping[str, Path]) -> tuple[Path, ...]:
    """Rename temporary files to their final names, and remove the rest of an earlier save.

    Each rename is atomic. If shards with the same names are replaced, the earlier index is removed first: a crash between
    renames then leaves a clearly incomplete folder, never a mix of two models.
    """
    earlier = {path.name for path in earlier_save(folder)}
    if INDEX_NAME in earlier and any(name in earlier for name in written if name != INDEX_NAME):
        (folder / INDEX_NAME).unlink()
    for name, temporary in written.items():
        temporary.replace(folder / name)
    for name in earlier - set(written):
        (folder / name).unlink(missing_ok=True)
    _flush_folder(folder)
    return tuple(folder / name for name in written)


def earlier_save(folder: Path) -> Iterator[Path]:
    """The weight files of an earlier save in the folder."""
    return (path for path in folder.iterdir() if _EARLIER_SAVE.fullmatch(path.name))


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_free(folder: Path, total_bytes: int) -> None:
    if shutil.disk_usage(folder).free < total_bytes:
        raise OSError(errno.ENOSPC, "not enough free space", str(folder))


def _cannot_write(folder: Path, total_bytes: int, error: OSError) -> HfaxError:
    if error.errno in _FULL:
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        return HfaxError(
            f"{total_bytes / 1e9:.3f} GB of weights could not be saved to {folder}: {error.strerror}.",
            f"The disk has {free / 1e9:.3f} GB free, or a quota is lower. An earlier checkpoint is kept until the new "
            "one is complete, so both must fit.",
            "Free some space or save to another disk. Nothing in the folder was changed.",
        )
    return HfaxError(
        f"{folder} cannot be written.", f"{type(error).__name__}: {error}", "Check the path and its permissions."
    )
