"""Reads a checkpoint's weights while the process still imports what it runs them with. Imports no framework itself."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from hfax.load.safetensors_file import SafetensorsFile
from hfax.stored.records import records_of, texts_digest

if TYPE_CHECKING:
    import numpy as np

    from hfax.load.source import CheckpointSource

KIND = "model"
_READERS = 2


class WeightReader:
    """The tensors of safetensors files, which threads read in the order of the files.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.files = [SafetensorsFile(path) for path in source.weight_files]
        self.num_bytes = sum(info.end - info.begin for file in self.files for info in file.tensors.values())
        digest = hashlib.sha256(texts_digest(source.folder).encode())
        for path, file in zip(source.weight_files, self.files, strict=True):
            digest.update(f"{path.name}\n{file.tensors}\n".encode())
        self.digest = digest.hexdigest()
        """Of the checkpoint's small files, and of the names, shapes and places of its weights."""
        self._threads: ThreadPoolExecutor | None = None
        self._found: dict[tuple[int, str], Future[np.ndarray]] = {}

    @property
    def is_known(self) -> bool:
        """Whether there is a record of this checkpoint, in this version of hfax or another."""
        return bool(records_of(KIND, self.digest))

    def start(self) -> None:
        """Begin to read."""
        self._threads = threads = ThreadPoolExecutor(_READERS, thread_name_prefix="hfax-load")
        for index, file in enumerate(self.files):
            for name in sorted(file.tensors, key=lambda name: file.tensors[name].begin):
                self._found[index, name] = threads.submit(file.read, name)
        threads.shutdown(wait=False)

    def read(self, file: int, name: str) -> np.ndarray:
        """A tensor; waits until it is read.

        Raises:
            CheckpointCorruptError: the file was truncated after it was opened, or the disk failed.
        """
        return self._found.pop((file, name)).result()

    def close(self) -> None:
        """Read nothing more, and forget what was read."""
        for future in self._found.values():
            future.cancel()
        self._found.clear()
