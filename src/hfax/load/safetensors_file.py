"""Reads safetensors files as numpy arrays that XLA can use without a copy.

If a tensor's file offset is a multiple of 64 bytes, its array is a private mapping of the page cache: nothing is copied,
and processes that load the same file share the memory. Otherwise (the usual case in files not written by hfax, whose
headers are padded to 8 bytes) it is read once into aligned anonymous memory. Either way the array is writable, and
writing to it changes neither the file nor another array. This module knows nothing about names, target dtypes or
devices.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from hfax.load.byte_source import LocalBytes, RemoteBytes
from hfax.load.safetensors_header import ALIGNMENT, TensorInfo, corrupt, read_header
from hfax.object_storage import RemoteFile

if TYPE_CHECKING:
    import torch

_POPULATED_BYTES = 8 << 20
"""Pages loaded in a call: Ctrl-C is handled between two."""
# linux/mman.h since 5.14; Python's mmap module does not name it.
_MADV_POPULATE_READ = 22


class SafetensorsFile:
    """An open safetensors file with a validated header. Reads are thread-safe.

    Args:
        path: the file; one of an object store is read into memory.
        mapped: whether aligned tensors may be memory-mapped instead of copied. A mapped file must not be modified in
            place while its arrays are alive (replacing it with another file, as `save_safetensors` does, is fine): the
            arrays would change too, and truncating it would kill the process.
        alignment: address alignment of every array, in bytes, a power of two. XLA's CPU platform needs 64; devices that
            copy from host memory need none, and with 1 every tensor is mapped.

    Raises:
        CheckpointCorruptError: see `read_header`.

    Arrays keep their memory alive and stay valid after the file is closed.
    """

    def __init__(
        self, path: str | os.PathLike[str] | RemoteFile, *, mapped: bool = True, alignment: int = ALIGNMENT
    ) -> None:
        self._source = RemoteBytes(path) if isinstance(path, RemoteFile) else LocalBytes(Path(path))
        self.path = self._source.path
        self._alignment = alignment
        self._close = weakref.finalize(self, self._source.close)
        try:
            header = read_header(self._source)
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, TensorInfo] = header.tensors
        self.metadata: dict[str, str] = header.metadata
        self._buffers = HostBuffers(ALIGNMENT)
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._fd = self._source.fileno()
        self._may_map = mapped and self._fd is not None

    def read(self, name: str) -> np.ndarray:
        """The whole tensor.

        Raises:
            KeyError: no such tensor.
            CheckpointCorruptError: the file was truncated after it was opened, or the disk failed.
            UnsupportedOptionError: a dtype with less than one byte per value.
        """
        info = self.tensors[name]
        return self._rows(name, info, info.begin, info.end, info.shape)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of the tensor, equal to `read(name)[index]`, allocating only the slice's size.

        Args:
            name: tensor name.
            index: one slice per axis, step 1. Slicing only the leading axis reads only those bytes; other slices read the
                page-cache pages they touch and make one strided copy.

        Raises:
            ValueError: not one slice per axis, or a step other than 1.
            KeyError, CheckpointCorruptError, UnsupportedOptionError: same as `read`.
        """
        info = self.tensors[name]
        if len(index) != len(info.shape) or any(part.step not in (None, 1) for part in index):
            raise ValueError(f"{name!r} of shape {info.shape} takes one slice of step 1 per axis, got {index}")
        ranges = [part.indices(size)[:2] for part, size in zip(index, info.shape, strict=True)]
        shape = tuple(max(stop - start, 0) for start, stop in ranges)
        if shape[1:] == info.shape[1:] and 0 not in shape:
            row_bytes = info.num_bytes // info.shape[0] if shape else info.num_bytes
            begin = info.begin + (ranges[0][0] * row_bytes if shape else 0)
            return self._rows(name, info, begin, begin + row_bytes * (shape[0] if shape else 1), shape)
        whole = self._view(info, info.begin, info.end, info.shape) if self._map() else self.read(name)
        part = self._allocate(shape, info.numpy_dtype)
        np.copyto(part, whole[index])
        return part

    def close(self) -> None:
        """Close the file; arrays read from it stay valid."""
        self._close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, name: str, info: TensorInfo, begin: int, end: int, shape: tuple[int, ...]) -> np.ndarray:
        """Bytes `begin` to `end` of the file as an array, mapped if allowed."""
        if not self._close.alive:
            raise ValueError(f"{self.path} is closed; tensor {name!r} can no longer be read")
        dtype = info.numpy_dtype
        if begin == end:
            return np.empty(shape, dtype)
        if self._may_map and begin % max(self._alignment, dtype.itemsize) == 0 and (mapping := self._map()):
            self._populate(mapping, name, begin, end)
            return self._view(info, begin, end, shape)
        array = self._allocate(shape, dtype)
        self._read_into(array.reshape(-1).view(np.uint8).data, name, begin)
        return array

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self._buffers.take(num_bytes), dtype).reshape(shape)

    def _view(self, info: TensorInfo, begin: int, end: int, shape: tuple[int, ...]) -> np.ndarray:
        mapping = self._map()
        assert mapping is not None
        return np.frombuffer(mapping, np.uint8, end - begin, begin).view(info.numpy_dtype).reshape(shape)

    def _read_into(self, buffer: memoryview, name: str, begin: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = self._source.read_into(buffer[done:], begin + done)
            except OSError as error:
                raise corrupt(self.path, f"reading tensor {name!r} failed: {error}") from error
            if count == 0:
                end = begin + len(buffer)
                raise corrupt(
                    self.path, f"tensor {name!r} ends at byte {end}, but the file now ends at byte {begin + done}"
                )
            done += count

    def _map(self) -> mmap.mmap | None:
        """The whole file, mapped once; None if the file system does not support it."""
        with self._lock:
            if self._mapping is None and self._fd is not None:
                file_bytes = max(info.end for info in self.tensors.values())
                try:
                    # Writable, so that torch and XLA treat the arrays as ordinary memory; private, so that the
                    # file never changes.
                    self._mapping = mmap.mmap(
                        self._fd, file_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                    )
                except ValueError as error:
                    found = os.fstat(self._fd).st_size
                    raise corrupt(self.path, f"it had {file_bytes} bytes when opened and has {found} now") from error
                except OSError as error:
                    if error.errno not in (errno.ENODEV, errno.EACCES, errno.EPERM):
                        raise
                    self._may_map = False
            return self._mapping

    def _populate(self, mapping: mmap.mmap, name: str, begin: int, end: int) -> None:
        """Load the pages now, so that disk errors and waits occur during loading, not in the first forward pass."""
        if sys.platform != "linux":
            return
        for start in range(begin - begin % mmap.PAGESIZE, end, _POPULATED_BYTES):
            try:
                mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATED_BYTES, end - start))
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return  # kernels before 5.14: pages are loaded on first access
                raise corrupt(self.path, f"reading tensor {name!r} failed: {error}") from error


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The array as a torch tensor that shares its memory (bfloat16 and float8 too). The array must be writable."""
    import torch

    if array.dtype.kind != "V" and array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))


_ARENA_BYTES = 8 << 20
_SHARED_BYTES = 1 << 20
"""Tensors of fewer bytes share an arena of `_ARENA_BYTES`: the system limits the number of mappings. An arena is freed when all of
its tensors are gone; larger ones, which may be converted and dropped while a norm beside them stays, have memory of their own."""

_HUGE_PAGE_BYTES = 2 << 20


class HostBuffers:
    """Allocates buffers; each keeps its own memory alive. Thread-safe.

    Args:
        alignment: address alignment of every buffer, in bytes, a power of two no larger than a page.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._lock = threading.Lock()
        self._arena = memoryview(b"")
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """A zeroed buffer of `num_bytes`, at least 1."""
        if num_bytes >= _SHARED_BYTES:
            return _anonymous(num_bytes)[:num_bytes]
        with self._lock:
            start = -(-self._used // self._alignment) * self._alignment
            if start + num_bytes > len(self._arena):
                self._arena, start = _anonymous(_ARENA_BYTES), 0
            self._used = start + num_bytes
            return self._arena[start : self._used]


def _anonymous(num_bytes: int) -> memoryview:
    # Round up to whole huge pages: Linux aligns a mapping to them only if its length is a multiple. Only those that are filled are
    # asked for, so that the rest of the last one is never touched and costs nothing.
    rounded = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    filled = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if filled and sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, 0, filled)
    return memoryview(memory)
