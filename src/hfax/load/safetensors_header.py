"""Safetensors headers: which tensors a file holds, and where.

Parses a file's first bytes into validated `TensorInfo` records, and encodes records as header bytes. The format is eight
bytes of header length (little endian), a JSON object, then the tensors back to back
(https://github.com/huggingface/safetensors#format). This module reads no tensors and knows nothing about models.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch

    from hfax.load.byte_source import ByteSource
    from hfax.object_storage import RemoteFile

MAX_HEADER_BYTES = 100_000_000
"""Same limit as the safetensors library: no real checkpoint comes near it, so a larger header means the file is not
safetensors."""

ALIGNMENT = 64
"""Tensor alignment in files written here, in bytes. XLA's CPU platform uses host memory without a copy only if aligned."""

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
STORED_DTYPES = {name: code for code, name in _NAMES.items()}
"""dtype name (identical in numpy with ml_dtypes, torch and jax) to the safetensors dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor.

    Args:
        dtype: safetensors dtype, such as `BF16`.
        shape: stored shape.
        begin: file offset of the first byte.
        end: file offset after the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file and in memory, in bytes."""
        return self.end - self.begin

    @property
    def numpy_dtype(self) -> np.dtype:
        """The numpy dtype (from ml_dtypes for bfloat16 and float8).

        Raises:
            UnsupportedOptionError: less than one byte per value.
        """
        name = self._name()
        if name in np.sctypeDict:
            return np.dtype(name)
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            UnsupportedOptionError: less than one byte per value.
        """
        import torch

        return getattr(torch, self._name())

    def _name(self) -> str:
        if self.dtype not in _NAMES:
            raise UnsupportedOptionError(
                f"A tensor of shape {self.shape} is stored as {self.dtype}, {_BITS[self.dtype]} bits per value.",
                "hfax reads whole-byte dtypes; packed dtypes belong to quantization methods that it does not support.",
                "Use the same model's bfloat16, float16 or float8 checkpoint.",
            )
        return _NAMES[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """A file's tensors, in byte order, and its free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(source: ByteSource) -> Header:
    """Read and validate a file's header.

    Raises:
        CheckpointCorruptError: the file is not safetensors, is truncated, or its tensors overlap, leave holes or have a
            size that does not match their shape and dtype.
    """
    file_bytes, path = source.size, source.path
    start = _read(source, 128, 0)
    if start.startswith(b"version https://git-lfs"):
        raise corrupt(path, "it is a Git LFS pointer, not the file itself", fix="Run `git lfs pull` in its repository.")
    if len(start) < 8:
        raise corrupt(path, f"it is {file_bytes} bytes long; a safetensors file starts with an 8-byte header length")
    (header_bytes,) = struct.unpack("<Q", start[:8])
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise corrupt(
            path,
            f"its header claims {header_bytes} bytes, but the file has {file_bytes - 8} after the length "
            f"(at most {MAX_HEADER_BYTES} are allowed)",
        )
    entries = _parse(_read(source, header_bytes, 8), header_bytes, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(path, "its __metadata__ is not an object of strings")
    data_start = 8 + header_bytes
    infos = {name: _tensor_info(name, entry, data_start, path) for name, entry in entries.items()}
    ordered = dict(sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(ordered, data_start, file_bytes, path)
    return Header(tensors=ordered, metadata=metadata)


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor, padded so that the tensor starts at a multiple of `ALIGNMENT`.

    Args:
        tensors: name to (safetensors dtype, shape, size in bytes), in write order.
        metadata: free-form strings.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + num_bytes]}
        begin += num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def corrupt(path: Path | RemoteFile, found: str, fix: str | None = None) -> CheckpointCorruptError:
    """The error for an unreadable file; `found` describes the problem."""
    return CheckpointCorruptError(
        f"{path} cannot be read as safetensors: {found}.",
        "The file was not completely written or downloaded, was modified later, or is not safetensors.",
        fix or f"Delete {path.name} and download or save it again.",
    )


def _read(source: ByteSource, count: int, begin: int) -> bytes:
    """Bytes from `begin` on, fewer than `count` at the end of the file."""
    buffer = memoryview(bytearray(count))
    done = 0
    while done < count and (read := source.read_into(buffer[done:], begin + done)):
        done += read
    return bytes(buffer[:done])


def _parse(text: bytes, header_bytes: int, path: Path | RemoteFile) -> dict[str, Any]:
    if len(text) < header_bytes:
        raise corrupt(path, f"its header has {header_bytes} bytes, but only {len(text)} could be read")
    try:
        entries = json.loads(text.decode(), object_pairs_hook=lambda pairs: _unique(pairs, path))
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"its header of {header_bytes} bytes is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise corrupt(path, f"its header is a JSON {type(entries).__name__}, not an object")
    return entries


def _unique(pairs: list[tuple[str, Any]], path: Path | RemoteFile) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise corrupt(path, f"its header names {next(n for n in names if names.count(n) > 1)!r} twice")
    return entries


def _tensor_info(name: str, entry: dict[str, Any], data_start: int, path: Path | RemoteFile) -> TensorInfo:
    if not isinstance(entry, dict):
        raise corrupt(path, f"the header's entry for {name!r} is {entry!r}, not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in _BITS:
        raise corrupt(path, f"tensor {name!r} has dtype {dtype!r}; known dtypes: {', '.join(_BITS)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(path, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    expected, rest = divmod(math.prod(shape) * _BITS[dtype], 8)
    if rest or offsets[1] - offsets[0] != expected:
        raise corrupt(
            path,
            f"tensor {name!r} of dtype {dtype} and shape {shape} takes {expected} bytes, but its data_offsets "
            f"{offsets} span {offsets[1] - offsets[0]}",
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=data_start + offsets[0], end=data_start + offsets[1])


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(tensors: dict[str, TensorInfo], data_start: int, file_bytes: int, path: Path | RemoteFile) -> None:
    """Check that tensors are back to back, from the end of the header to the end of the file."""
    end = data_start
    previous = "the header"
    for name, info in tensors.items():
        if info.begin != end:
            relation = "overlaps" if info.begin < end else "leaves a hole after"
            raise corrupt(path, f"tensor {name!r} at byte {info.begin} {relation} {previous}, which ends at byte {end}")
        if info.end > file_bytes:
            raise corrupt(path, f"tensor {name!r} ends at byte {info.end}, but the file ends at byte {file_bytes}")
        end, previous = info.end, repr(name)
    if end != file_bytes:
        raise corrupt(path, f"its last tensor ends at byte {end}, but the file ends at byte {file_bytes}")
