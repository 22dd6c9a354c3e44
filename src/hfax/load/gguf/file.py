"""GGUF files: metadata, and which tensors a file holds and where.

Parses a file into validated records, and reads a tensor's bytes. The format is a fixed header, key-value pairs, a table of tensors,
then the tensors' data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every length is checked against the file's size
before it is used. This module knows nothing about models, nor what the bytes of a quantized tensor mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hfax.errors import CheckpointCorruptError

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
"""ggml's number of each type: its name, and the values and bytes of a block."""

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The numpy dtype of each type of metadata but strings and arrays."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
"""More metadata or tensors than any model has by far; a file that announces more is damaged, or meant to take time."""
_MAX_STRINGS = 1 << 21
"""In all arrays of a file; the largest vocabularies have 2^18 tokens and as many merges."""
_MAX_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor.

    Args:
        type: a key of `TYPES`.
        shape: in torch's order: rows of the last axis are contiguous, and whole blocks.
        begin: file offset of the first byte.
        end: file offset after the last byte.
    """

    type: int
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def type_name(self) -> str:
        """Such as "Q4_K"."""
        return TYPES[self.type][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the last axis."""
        _, values, size = TYPES[self.type]
        return self.shape[-1] // values * size


class GgufFile:
    """A GGUF file: its metadata and its tensors' places, read and validated; tensors' bytes are read on demand.

    Args:
        path: the file.

    Attributes:
        metadata: by key: an int, float, bool or str, a list of str, or an array of numbers.
        tensors: by name.
        header_bytes: bytes before the tensors' data.

    Raises:
        CheckpointCorruptError: the file is truncated, or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._fd = os.dup(file.fileno())
            if os.fstat(self._fd).st_size == 0:
                raise _corrupt(path, "it is empty")
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as view:
                reader = _Reader(path, view)
                self.metadata, num_tensors = _read_metadata(reader)
                self.tensors, self.header_bytes = _read_table(reader, num_tensors, self.metadata)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def read_header(self) -> bytes:
        """The bytes before the tensors' data."""
        return os.pread(self._fd, self.header_bytes, 0)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows of a tensor seen as a matrix: [last - first, row_bytes] uint8, in memory of its own.

        Raises:
            CheckpointCorruptError: the file has become shorter, or cannot be read.
        """
        info = self.tensors[name]
        array = np.empty((last - first, info.row_bytes), np.uint8)
        buffer, done = memoryview(array.data).cast("B"), 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], info.begin + first * info.row_bytes + done)
            except OSError as error:
                raise _corrupt(self.path, f"reading tensor {name!r} failed: {error}") from error
            if count == 0:
                raise _corrupt(self.path, f"it has become shorter since it was opened; tensor {name!r} is cut off")
            done += count
        return array


class _Reader:
    """A position in a file's bytes; whatever would pass the end is refused."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.size = len(view)
        self.position = 0
        self._view = view
        self._strings = 0

    def fail(self, found: str) -> NoReturn:
        raise _corrupt(self.path, found)

    def left(self) -> int:
        return self.size - self.position

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left():
            self.fail(f"{what} at byte {self.position} needs {size} bytes, and the file ends after {self.left()}")
        self.position += size
        return self._view[self.position - size : self.position]

    def unpack(self, format: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(format, self.take(struct.calcsize(format), what))

    def count(self, number: int, smallest: int, most: int, what: str) -> int:
        """The number of things that follow, each of at least `smallest` bytes."""
        if number > most or number * smallest > self.left():
            self.fail(f"it announces {number} {what}, which do not fit into its {self.size} bytes")
        return number

    def string(self, what: str) -> str:
        (size,) = self.unpack("<Q", what)
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} before byte {self.position} is not text: {error.reason}")

    def array(self, what: str) -> Any:
        kind, number = self.unpack("<IQ", what)
        if kind == _STRING:
            self._strings += self.count(number, 8, _MAX_STRINGS - self._strings, f"strings in {what}")
            return self._string_list(number, what)
        if kind not in _SCALARS:
            self.fail(f"{what} is an array of type {kind}, which is not one of numbers or strings")
        dtype = np.dtype(_SCALARS[kind])
        self.count(number, dtype.itemsize, self.size, f"numbers in {what}")
        return np.frombuffer(self.take(number * dtype.itemsize, what), dtype).copy()

    def _string_list(self, number: int, what: str) -> list[str]:
        """Same as `string` in a loop, which would take a second for a large vocabulary."""
        found, view, position, size_at = [], self._view, self.position, struct.Struct("<Q").unpack_from
        try:
            for _ in range(number):
                (size,) = size_at(view, position)
                position += 8 + size
                if position > self.size:
                    raise struct.error
                found.append(str(view[position - size : position], "utf-8"))
        except struct.error:
            self.fail(f"string {len(found)} of {what} is cut off")
        except UnicodeDecodeError as error:
            self.fail(f"string {len(found)} of {what} is not text: {error.reason}")
        self.position = position
        return found

    def value(self, what: str) -> Any:
        (kind,) = self.unpack("<I", what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()


def _read_metadata(reader: _Reader) -> tuple[dict[str, Any], int]:
    """The key-value pairs, and the number of tensors."""
    if bytes(reader.take(4, "the magic number")) != b"GGUF":
        reader.fail('it does not begin with "GGUF"')
    (version,) = reader.unpack("<I", "the version")
    if version not in _VERSIONS:
        swapped = version in (2 << 24, 3 << 24)
        reader.fail("it is big-endian" if swapped else f"its version is {version}, and hfax reads 2 and 3")
    num_tensors, num_entries = reader.unpack("<QQ", "the header")
    reader.count(num_tensors, 8 + 4 + 8 + 4 + 8, _MAX_ENTRIES, "tensors")
    reader.count(num_entries, 8 + 4 + 1, _MAX_ENTRIES, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string("a metadata key")
        if key in metadata:
            reader.fail(f"its metadata have {key!r} twice")
        metadata[key] = reader.value(f"the metadata {key!r}")
    return metadata, num_tensors


def _read_table(reader: _Reader, number: int, metadata: dict[str, Any]) -> tuple[dict[str, TensorInfo], int]:
    """The tensors by name, and where their data begin."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        reader.fail(f"its alignment is {alignment!r}, which is not a power of two")
    found: list[tuple[str, int, tuple[int, ...], int]] = []
    for _ in range(number):
        name = reader.string("a tensor's name")
        (dimensions,) = reader.unpack("<I", f"tensor {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            reader.fail(f"tensor {name!r} has {dimensions} dimensions")
        shape = reader.unpack(f"<{dimensions}Q", f"tensor {name!r}")[::-1]  # the fastest first in the file
        kind, offset = reader.unpack("<IQ", f"tensor {name!r}")
        if kind not in TYPES:
            reader.fail(
                f"tensor {name!r} has the type {kind}, which ggml did not have when this version of hfax was made"
            )
        if offset % alignment:
            reader.fail(f"tensor {name!r} is at {offset}, which is not a multiple of the alignment {alignment}")
        found.append((name, kind, shape, offset))
    start = -(-reader.position // alignment) * alignment
    tensors = {name: _locate(reader, name, kind, shape, start + offset) for name, kind, shape, offset in found}
    if len(tensors) < len(found):
        reader.fail("two of its tensors have one name")
    ordered = sorted(tensors, key=lambda name: tensors[name].begin)
    for one, other in itertools.pairwise(ordered):
        if tensors[one].end > tensors[other].begin:
            reader.fail(f"tensors {one!r} and {other!r} overlap")
    return tensors, reader.position


def _locate(reader: _Reader, name: str, kind: int, shape: tuple[int, ...], begin: int) -> TensorInfo:
    _, values, size = TYPES[kind]
    if shape[-1] % values or 0 in shape:
        reader.fail(
            f"tensor {name!r} of type {TYPES[kind][0]} has shape {shape}, whose rows are not blocks of {values}"
        )
    end = begin + math.prod(shape) // values * size
    if end > reader.size:
        reader.fail(f"tensor {name!r} ends at byte {end}, and the file at {reader.size}")
    return TensorInfo(type=kind, shape=shape, begin=begin, end=end)


def _corrupt(path: Path, found: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path} is not a readable GGUF file: {found}.",
        "The file was not copied or downloaded completely, or another program damaged it.",
        "Download it again; hfax reads little-endian GGUF of version 2 and 3.",
    )
