"""Rows of data sets where they lie: JSON Lines by byte offsets, Parquet and `datasets` memory-mapped, Hub data sets as streams.

Knows nothing about tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hfax.errors import BackendNotAvailableError, InvalidInputError
from hfax.train.row_formats import json_lines, json_row

Row = Mapping[str, Any]
_CHUNK = 1 << 24
_BLANK = np.isin(np.arange(256), np.frombuffer(b" \t\r\n\v\f", np.uint8))


class Reader(Protocol):
    """Reads rows, in any process."""

    def __call__(self, where: Any) -> list[Row]:
        """The rows of a `Source.locate`."""
        ...

    def name(self, where: Any, number: int) -> str:
        """How messages name the row of this number in `where`."""
        ...


class JsonLines:
    """The rows of JSON Lines files, read when they are asked for. It keeps 8 bytes a row in memory.

    Args:
        files: the files, whose rows follow each other.

    Raises:
        InvalidInputError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            self._files = tuple(_File.of(path) for path in files)
            self._starts = [_line_starts(path) for path in files]
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename} could not be read.", f"{type(error).__name__}: {error}", "Check the file."
            ) from error
        self._ends = np.cumsum([len(starts) for starts in self._starts])
        self._read = JsonReader(self._files)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._read(self.locate(np.array([index % len(self)])))[0]

    def locate(self, indices: np.ndarray) -> np.ndarray:
        """Where rows are: their file's number and their byte offset, [rows, 2] int64."""
        files = np.searchsorted(self._ends, indices, side="right")
        before = np.concatenate([[0], self._ends[:-1]])[files]
        offsets = [self._starts[file][index] for file, index in zip(files, indices - before, strict=True)]
        return np.stack([files, np.array(offsets, np.int64)], axis=1)

    @property
    def reader(self) -> JsonReader:
        """Reads located rows. Unlike this object, it is cheap to send to another process."""
        return self._read


@dataclasses.dataclass(frozen=True)
class _File:
    path: Path
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> _File:
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns)


@dataclasses.dataclass(frozen=True)
class JsonReader:
    """Reads rows of JSON Lines files.

    Args:
        files: the files, as they were when their rows were located.
    """

    files: tuple[_File, ...]

    def __call__(self, where: np.ndarray) -> list[Row]:
        """The rows at some places.

        Args:
            where: from `JsonLines.locate`.

        Raises:
            InvalidInputError: a line is not a JSON object, or the file has changed.
        """
        lines: list[bytes] = [b""] * len(where)
        for file in np.unique(where[:, 0]):
            with self._unchanged(self.files[file]).open("rb") as opened:
                for index in np.flatnonzero(where[:, 0] == file):
                    opened.seek(int(where[index, 1]))
                    lines[index] = opened.readline()
        return [
            json_row(line, self._path(at), lambda at=at: self._line(at)) for line, at in zip(lines, where, strict=True)
        ]

    def name(self, where: np.ndarray, number: int) -> str:
        """The file and line of the row of this number in `where`."""
        return f"{self._path(where[number])}, line {self._line(where[number])}"

    def _path(self, at: np.ndarray) -> Path:
        return self.files[at[0]].path

    def _line(self, at: np.ndarray) -> int:
        """The number of the line at a byte offset, from 1."""
        with self._path(at).open("rb") as opened:
            before, left = 0, int(at[1])
            while left:
                chunk = opened.read(min(left, _CHUNK))
                before, left = before + chunk.count(b"\n"), left - len(chunk)
        return before + 1

    @staticmethod
    def _unchanged(file: _File) -> Path:
        if _File.of(file.path) != file:
            raise InvalidInputError(
                f"{file.path} changed while it was read.",
                "Rows are read from the places where they were when training began.",
                "Leave the file as it is until training has ended, and resume with the file as it was.",
            )
        return file.path


@dataclasses.dataclass(frozen=True)
class Indexed:
    """The rows of an indexable data set, such as one of `datasets`, which is memory-mapped.

    Args:
        dataset: has `__len__` and `__getitem__`; it is sent to other processes as it is.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def locate(self, indices: np.ndarray) -> list[int]:
        """The indices."""
        return indices.tolist()

    @property
    def reader(self) -> Indexed:
        """This object."""
        return self

    def __call__(self, where: Sequence[int]) -> list[Row]:
        """The rows with these indices."""
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(where)
        return [self.dataset[index] for index in where]

    def name(self, where: Sequence[int], number: int) -> str:
        """The row's index."""
        return f"Row {where[number] + 1}"


def is_indexable(dataset: Any) -> bool:
    """Whether the rows of a data set have an index."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class Given:
    """Reads rows that are given themselves: those of an iterable without an index."""

    def __call__(self, where: list[Row]) -> list[Row]:
        """The rows."""
        return where

    def name(self, where: list[Row], number: int) -> str:
        """Nothing but that it is a row."""
        return "A row"


def find_files(where: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files by path, by pattern ("data/*.jsonl"), or several of them; [] if a path is no file.

    Raises:
        InvalidInputError: some are files and others are not.
    """
    asked = [where] if isinstance(where, (str, Path)) else list(where)
    files = [_matching(Path(each).expanduser()) for each in asked]
    if all(files):
        return [path for paths in files for path in paths]
    if any(files) or len(asked) > 1:
        raise InvalidInputError(
            f"No file found at {asked[next(i for i, paths in enumerate(files) if not paths)]}.",
            "Several files, or a pattern, are files of one data set.",
            "Check the path.",
        )
    return []


def open_rows(where: str | Path | Sequence[str | Path], *, streaming: bool = False) -> Any:
    """Rows of JSON Lines or Parquet files, a `datasets.save_to_disk` folder, or a data set on the Hub.

    Args:
        where: a path, a pattern of paths, several of both, or a Hub id ("owner/name", "owner/name:split").
        streaming: leave the rows where they are: `JsonLines`, a memory-mapped `datasets.Dataset`, or, from the Hub, a
            `datasets.IterableDataset`. Otherwise JSON Lines are read whole, and data sets of the Hub are downloaded.

    Raises:
        InvalidInputError: the data cannot be found or read; for JSON Lines, names the line.
        BackendNotAvailableError: the data need the package datasets, which is not installed.
    """
    files = find_files(where)
    if files and not any(path.suffix == ".parquet" for path in files):
        return JsonLines(files) if streaming else [row for path in files for row in json_lines(path)]
    try:
        import datasets
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{where} {'is no JSON Lines file' if files else 'is not a file'}, and other data sets require the package datasets.",
            str(error),
            "Install it: pip install datasets; or pass a JSON Lines file.",
        ) from error
    name, _, split = str(where).partition(":")
    folder = Path(str(where)).expanduser()
    try:
        if files:
            found: Any = datasets.Dataset.from_parquet([str(path) for path in files])
        elif folder.is_dir():
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(name, split=split or "train", streaming=streaming)
    except Exception as error:  # many exception types, from several packages
        raise InvalidInputError(
            f"No data found at {where}.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Pass JSON Lines or Parquet files, a datasets.save_to_disk folder, or a Hub id.",
        ) from error
    return found["train"] if isinstance(found, Mapping) and "train" in found else found


def _matching(path: Path) -> list[Path]:
    """A file, or the files whose paths match a pattern."""
    if path.is_file():
        return [path]
    root = Path(path.anchor)
    return sorted(found for found in root.glob(str(path.relative_to(root))) if found.is_file())


def _line_starts(path: Path) -> np.ndarray:
    """Byte offsets of the lines that are not blank, int64."""
    found: list[np.ndarray] = []
    with path.open("rb") as file:
        for at, chunk in _chunks(file):
            codes = np.frombuffer(chunk, np.uint8)
            starts = np.concatenate([[0], np.flatnonzero(codes == 10) + 1])
            starts = starts[starts < len(codes)]
            for index in np.flatnonzero(_BLANK[codes[starts]]):  # few: JSON begins with a bracket
                end = starts[index + 1] if index + 1 < len(starts) else len(codes)
                if not chunk[starts[index] : end].strip():
                    starts[index] = -1
            found.append(starts[starts >= 0] + at)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _chunks(file: Any) -> Iterator[tuple[int, bytes]]:
    """Whole lines, many at once, with the offset of the first."""
    at, rest = 0, b""
    while more := file.read(_CHUNK):
        rest += more
        end = rest.rfind(b"\n") + 1
        if end:
            yield at, rest[:end]
            at, rest = at + end, rest[end:]
    if rest:
        yield at, rest
