"""Flax checkpoint files: nested names to arrays, as msgpack (`flax.serialization`).

Indexes a file's arrays by path and reads them one at a time, and writes arrays by path to a file. It knows nothing about models.
The format: maps from strings to maps or to an extension of type 1, which holds (shape, dtype name, bytes); arrays larger than a
gigabyte are maps of flat chunks.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from hfax.errors import CheckpointCorruptError

_ARRAY, _SCALAR = 1, 3
_CHUNKED, _CHUNK_BYTES = "__msgpack_chunked_array__", 1 << 30
FlaxPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlaxArray:
    """One array of a file.

    Args:
        shape: array shape.
        dtype: array dtype.
        parts: byte ranges (begin, end) in the file, in order.
        read: returns the array, memory-mapped if it has a single part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[int, int], ...]
    read: Callable[[], np.ndarray]


def read_flax_index(path: Path) -> dict[FlaxPath, FlaxArray]:
    """Index a file's arrays by path, without reading their data.

    Raises:
        CheckpointCorruptError: not a Flax checkpoint, or truncated.
    """
    try:
        content = np.memmap(path, np.uint8, "r")
        cursor = _Cursor(content, path)
        found: dict[FlaxPath, FlaxArray] = {}
        cursor.walk((), found)
    except (ValueError, IndexError, KeyError, TypeError, OSError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointCorruptError(
            f"{path} is not a complete Flax checkpoint.",
            f"{type(error).__name__}: {error}",
            "Download or copy the file again, and check that it is a Flax checkpoint.",
        ) from error
    if cursor.at != len(content):
        raise CheckpointCorruptError(
            f"{path} has {len(content) - cursor.at} bytes after its last array.",
            "It is not a single Flax checkpoint.",
            "Download it again.",
        )
    return found


class _Cursor:
    """Walks a file from the start, skipping array data."""

    def __init__(self, content: np.ndarray, path: Path) -> None:
        self._content = content
        self._path = path
        self.at = 0

    def walk(self, path: FlaxPath, found: dict[FlaxPath, FlaxArray]) -> None:
        """Parse the value at the cursor: a map, adding its arrays to `found`, or one array."""
        kind = self._byte()
        count = self._length(kind, 0x80, 0x90, {0xDE: ">H", 0xDF: ">I"})
        if count is None:
            found[path] = self._leaf(kind)
            return
        own: dict[FlaxPath, FlaxArray] = {}
        chunked, shape = False, ()
        for _ in range(count):
            key = self._text()
            if key == _CHUNKED:
                chunked = self._byte() == 0xC3
            elif chunked and key == "shape":
                shape = self._numbers_of_map()
            else:
                self.walk((*path, key), own)
        if chunked:
            ordered = sorted(own.items(), key=lambda item: int(item[0][-1]))
            found[path] = self._array(shape, ordered[0][1].dtype, tuple(p for _, a in ordered for p in a.parts))
        else:
            found.update(own)

    def _leaf(self, kind: int) -> FlaxArray:
        fixed = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
        size = fixed.get(kind)
        if size is None:
            size = self._length(kind, 0, 0, {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"})
        if size is None:
            raise ValueError(f"byte {self.at - 1} does not start an array ({kind:#04x})")
        extension = self._byte()
        end = self.at + size
        if extension not in (_ARRAY, _SCALAR) or end > len(self._content):
            raise ValueError(f"byte {self.at - 1}: an extension of type {extension} with {size} bytes")
        if self._byte() != 0x93:
            raise ValueError(f"byte {self.at - 1} does not start a (shape, dtype, bytes) list")
        shape = self._numbers_of_list()
        dtype = _dtype(self._text())
        count = self._length(self._byte(), 0, 0, {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"})
        if count is None or self.at + count != end or count != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"byte {self.at}: {count} bytes for an array of {shape} {dtype}")
        part = (self.at, end)
        self.at = end
        return self._array(shape, dtype, (part,))

    def _array(self, shape: tuple[int, ...], dtype: np.dtype, parts: tuple[tuple[int, int], ...]) -> FlaxArray:
        if sum(end - begin for begin, end in parts) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the chunk sizes do not add up for an array of {shape} {dtype}")
        content = self._content

        def read() -> np.ndarray:
            pieces = [content[begin:end] for begin, end in parts]
            flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            return np.frombuffer(flat, dtype).reshape(shape)

        return FlaxArray(shape=shape, dtype=dtype, parts=parts, read=read)

    def _numbers_of_list(self) -> tuple[int, ...]:
        count = self._length(self._byte(), 0x90, 0xA0, {0xDC: ">H", 0xDD: ">I"})
        if count is None:
            raise ValueError(f"byte {self.at - 1} does not start a list")
        return tuple(self._number() for _ in range(count))

    def _numbers_of_map(self) -> tuple[int, ...]:
        count = self._length(self._byte(), 0x80, 0x90, {0xDE: ">H"})
        if count is None:
            raise ValueError(f"byte {self.at - 1} does not start a map")
        found = {int(self._text()): self._number() for _ in range(count)}
        return tuple(found[i] for i in range(len(found)))

    def _number(self) -> int:
        kind = self._byte()
        if kind < 0x80:
            return kind
        return self._unpack(
            {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}[kind]
        )

    def _text(self) -> str:
        size = self._length(self._byte(), 0xA0, 0xC0, {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"})
        if size is None or self.at + size > len(self._content):
            raise ValueError(f"byte {self.at - 1} does not start a string")
        text = self._content[self.at : self.at + size].tobytes().decode()
        self.at += size
        return text

    def _length(self, kind: int, low: int, high: int, longer: Mapping[int, str]) -> int | None:
        """Length of the value this byte starts; small lengths are encoded in the byte itself, from `low`."""
        if low <= kind < high:
            return kind - low
        return self._unpack(longer[kind]) if kind in longer else None

    def _unpack(self, form: str) -> int:
        size = struct.calcsize(form)
        (value,) = struct.unpack(form, self._content[self.at : self.at + size].tobytes())
        self.at += size
        return value

    def _byte(self) -> int:
        value = int(self._content[self.at])
        self.at += 1
        return value


def write_flax(
    path: Path, arrays: Iterable[tuple[FlaxPath, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]
) -> None:
    """Write a file that `flax.serialization` reads, one array in memory at a time.

    Args:
        path: output file.
        arrays: path, shape, dtype, and a function that returns the array.

    Raises:
        OSError: the file cannot be written.
    """
    tree: dict[str, Any] = {}
    for place, shape, dtype, read in arrays:
        node = tree
        for part in place[:-1]:
            node = node.setdefault(part, {})
        node[place[-1]] = (shape, np.dtype(dtype), read)
    with path.open("wb") as file:
        _write(file, tree)
        file.flush()
        os.fsync(file.fileno())


def _write(file: BinaryIO, node: Any) -> None:
    if isinstance(node, dict):
        file.write(_head(len(node), 0x80, 16, {0xDE: (16, ">H"), 0xDF: (32, ">I")}))
        for key in sorted(node):
            file.write(_packed_text(key))
            _write(file, node[key])
        return
    shape, dtype, read = node
    array = np.ascontiguousarray(read()).reshape(shape)
    if array.nbytes <= _CHUNK_BYTES:
        _write_array(file, array)
        return
    step = _CHUNK_BYTES // dtype.itemsize
    chunks = [array.reshape(-1)[i : i + step] for i in range(0, array.size, step)]
    file.write(b"\x83" + _packed_text(_CHUNKED) + b"\xc3" + _packed_text("shape"))
    file.write(_head(len(shape), 0x80, 16, {0xDE: (16, ">H")}))
    for axis, size in enumerate(shape):
        file.write(_packed_text(str(axis)) + _packed_number(size))
    file.write(_packed_text("chunks") + _head(len(chunks), 0x80, 16, {0xDE: (16, ">H"), 0xDF: (32, ">I")}))
    for number, chunk in enumerate(chunks):
        file.write(_packed_text(str(number)))
        _write_array(file, chunk)


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    name = _packed_text(array.dtype.name)
    shape = _head(array.ndim, 0x90, 16, {0xDC: (16, ">H")}) + b"".join(_packed_number(n) for n in array.shape)
    head = b"\x93" + shape + name + _head(array.nbytes, 0, 0, {0xC4: (8, ">B"), 0xC5: (16, ">H"), 0xC6: (32, ">I")})
    size = len(head) + array.nbytes
    if (short := {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(size)) is not None:
        file.write(bytes([short, _ARRAY]))
    else:
        file.write(_head(size, 0, 0, {0xC7: (8, ">B"), 0xC8: (16, ">H"), 0xC9: (32, ">I")}) + bytes([_ARRAY]))
    file.write(head)
    file.write(array.reshape(-1).view(np.uint8).data)


def _head(count: int, low: int, small: int, longer: Mapping[int, tuple[int, str]]) -> bytes:
    if count < small:
        return bytes([low + count])
    kind, form = next((k, f) for k, (bits, f) in longer.items() if count < 1 << bits)
    return bytes([kind]) + struct.pack(form, count)


def _packed_text(text: str) -> bytes:
    data = text.encode()
    return _head(len(data), 0xA0, 32, {0xD9: (8, ">B"), 0xDA: (16, ">H")}) + data


def _packed_number(number: int) -> bytes:
    return _head(number, 0, 128, {0xCC: (8, ">B"), 0xCD: (16, ">H"), 0xCE: (32, ">I"), 0xCF: (64, ">Q")})


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
