"""Where the bytes of a weight file come from: a file of this machine, or an object store."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from hfax.errors import CheckpointCorruptError
from hfax.object_storage import RemoteFile, RemoteState

# Bytes per call: large enough to amortise its cost, small enough that Ctrl-C is handled at once.
_READ_BYTES = 8 << 20
_PART_BYTES = 16 << 20
"""Size of a request to an object store."""
_REQUESTS = 8
"""Requests at once for one read; two reads go on at once."""
_MOST_PENDING_BYTES = 1 << 30
"""Bytes read out of order and kept to be hashed in order; beyond, a file is not hashed."""


class ByteSource(Protocol):
    """A file's bytes. Thread-safe."""

    size: int

    @property
    def path(self) -> Path | RemoteFile:
        """The file."""
        ...

    def read_into(self, buffer: memoryview, begin: int) -> int:
        """Read bytes from `begin` on into `buffer`, or some of them; returns their number, 0 at the end of the file.

        Raises:
            OSError: the disk failed.
            HfaxError: the object store failed.
        """
        ...

    def fileno(self) -> int | None:
        """A file descriptor that can be mapped; None if there is none."""
        ...

    def close(self) -> None:
        """Read nothing more."""
        ...


class LocalBytes:
    """The bytes of a file of this machine.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self.size = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, begin: int) -> int:
        """Implements `ByteSource`."""
        return os.preadv(self._fd, [buffer[:_READ_BYTES]], begin)

    def fileno(self) -> int:
        """Implements `ByteSource`."""
        return self._fd

    def close(self) -> None:
        """Implements `ByteSource`."""
        os.close(self._fd)


class RemoteBytes:
    """The bytes of a file of an object store, read in parallel requests into the memory where they are wanted.

    Once every byte has been read, the file must not have changed, and its digest must be the store's if that has one and the bytes
    were read about in order.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.path = file
        self.size = file.size
        self._lock = threading.Lock()
        self._left = file.size
        self._state: RemoteState | None = None
        self._digest: _InOrder | None = None

    def read_into(self, buffer: memoryview, begin: int) -> int:
        """Implements `ByteSource`.

        Raises:
            CheckpointCorruptError: the file has changed, or does not have its digest.
        """
        end = min(begin + len(buffer), self.size)
        if begin >= end:
            return 0
        with self._lock:
            state, head = self.path.head
            if self._state is None:
                self._state, self._digest = state, None if state.digest is None else _InOrder(*state.digest)
        if end <= len(head):
            buffer[: end - begin] = head[begin:end]
        else:
            self._request(buffer[: end - begin], begin, end)
        self._note(buffer[: end - begin], begin)
        return end - begin

    def _request(self, buffer: memoryview, begin: int, end: int) -> None:
        def read(start: int) -> None:
            part = self.path.read(start, min(start + _PART_BYTES, end))
            buffer[start - begin : start - begin + len(part)] = part

        starts = range(begin, end, _PART_BYTES)
        if len(starts) == 1:
            return read(begin)
        with ThreadPoolExecutor(min(_REQUESTS, len(starts)), thread_name_prefix="hfax-request") as threads:
            for _ in threads.map(read, starts):
                pass

    def _note(self, data: memoryview, begin: int) -> None:
        with self._lock:
            was_left, self._left = self._left, self._left - len(data)
            is_whole = self._digest is not None and self._digest.add(data, begin) == self.size
            if is_whole and self._digest is not None:
                found, self._digest = self._digest, None
                if not found.matches:
                    raise CheckpointCorruptError(
                        f"{self.path} is damaged: its {found.name} is {found.hexdigest}, not {found.expected}.",
                        "What was read differs from what the store says that it holds.",
                        "Load it again; if that fails, upload the file again.",
                    )
        if was_left > 0 >= self._left and self.path.ask() != self._state:
            raise CheckpointCorruptError(
                f"{self.path} changed while it was read.",
                "Another program replaced the file, so its parts may belong to two checkpoints.",
                "Load it again.",
            )

    def fileno(self) -> None:
        """Implements `ByteSource`."""

    def close(self) -> None:
        """Implements `ByteSource`."""


class _InOrder:
    """The digest of a file whose parts are read about in order, some of them twice."""

    def __init__(self, name: str, expected: str) -> None:
        self.name, self.expected = name, expected.lower()
        self._hash = hashlib.new(name, usedforsecurity=False)
        self._position = 0
        self._pending: dict[int, memoryview] = {}
        self._is_given_up = False

    def add(self, data: memoryview, begin: int) -> int:
        """Take a part; returns up to which byte the file is hashed."""
        if self._is_given_up or begin + len(data) <= self._position:
            return self._position
        self._pending[begin] = max(data, self._pending.get(begin, data), key=len)
        while (start := min(self._pending, default=self._position + 1)) <= self._position:
            part = self._pending.pop(start)[self._position - start :]
            self._hash.update(part)
            self._position += len(part)
        if sum(len(part) for part in self._pending.values()) > _MOST_PENDING_BYTES:
            self._pending.clear()
            self._is_given_up = True
        return self._position

    @property
    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    @property
    def matches(self) -> bool:
        return self.hexdigest == self.expected
