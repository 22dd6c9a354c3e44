"""Reads a checkpoint's weights while the process still imports what it runs them with. Imports no framework itself."""

from __future__ import annotations

import functools
import hashlib
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from hfax.load.safetensors_file import SafetensorsFile
from hfax.programs.bundle_file import START, is_bundle
from hfax.programs.program_files import is_enabled
from hfax.stored.records import records_of, texts_digest

if TYPE_CHECKING:
    import numpy as np

    from hfax.load.source import CheckpointSource

KIND = "model"
_READERS = 2
_MOST_BYTES = 4 << 30
"""Tensors that are read and not yet asked for: those of a device's memory need not fit the host's together."""


class WeightReader:
    """The tensors of safetensors files, which threads read in the order of the files.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.files = [SafetensorsFile(path) for path in source.safetensors_files]
        self.num_bytes = sum(info.end - info.begin for file in self.files for info in file.tensors.values())
        self._found: dict[tuple[int, str], Future[np.ndarray]] = {}
        self._changed = threading.Condition()
        self._held = 0
        self._wanted: set[tuple[int, str]] = set()
        self._is_closed = False
        self.source = source

    @functools.cached_property
    def digest(self) -> str:
        """Of the checkpoint's small files, and of the names, shapes and places of its weights."""
        digest = hashlib.sha256(texts_digest(self.source.folder).encode())
        for path, file in zip(self.source.safetensors_files, self.files, strict=True):
            digest.update(f"{path.name}\n{file.tensors}\n".encode())
        return digest.hexdigest()

    @property
    def is_of_bundle(self) -> bool:
        """Whether the checkpoint is a bundle that holds its own record."""
        return is_bundle(self.source) and (self.source.folder / START).is_file()

    @property
    def is_known(self) -> bool:
        """Whether there is a record of this checkpoint, in this version of hfax or another."""
        return self.is_of_bundle or (is_enabled() and bool(records_of(KIND, self.digest)))

    def start(self) -> None:
        """Begin to read, at most `_MOST_BYTES` ahead of `read`."""
        threads = ThreadPoolExecutor(_READERS, thread_name_prefix="hfax-load")
        for index, file in enumerate(self.files):
            for name in sorted(file.tensors, key=lambda name: file.tensors[name].begin):
                self._found[index, name] = threads.submit(self._read_ahead, index, name)
        threads.shutdown(wait=False)

    def _read_ahead(self, file: int, name: str) -> np.ndarray:
        size = self._size(file, name)
        with self._changed:
            self._changed.wait_for(
                lambda: self._held + size <= _MOST_BYTES or (file, name) in self._wanted or self._is_closed
            )
            if self._is_closed:
                raise CancelledError
            self._held += size
        return self.files[file].read(name)

    def _size(self, file: int, name: str) -> int:
        info = self.files[file].tensors[name]
        return info.end - info.begin

    def read(self, file: int, name: str) -> np.ndarray:
        """A tensor; waits until it is read. Thread-safe. Only the first read of a tensor is ahead of its use.

        Raises:
            CheckpointCorruptError: the file was truncated after it was opened, or the disk failed.
        """
        future = self._found.pop((file, name), None)
        if future is None or future.cancel():  # its turn has not come
            return self.files[file].read(name)
        with self._changed:
            self._wanted.add((file, name))
            self._changed.notify_all()
        array = future.result()
        with self._changed:
            self._wanted.discard((file, name))
            self._held -= self._size(file, name)
            self._changed.notify_all()
        return array

    def close(self) -> None:
        """Read nothing more, and forget what was read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for future in self._found.values():
            future.cancel()
        self._found.clear()
