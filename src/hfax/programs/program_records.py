"""What each program on disk was made for, so that hfax can say why another one had to be made.

A record is a JSON file beside its program: the parts of its key by name, long ones as digests. Programs are found by their keys
alone; records are read only to explain a miss, and a program without one is used all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hfax.home import put

_MOST_CHARACTERS = 48
"""Longer parts are kept as digests."""
_NAME = "name"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A program on disk.

    Args:
        path: its file.
        parts: of its key, by name; "name" is the program's own.
    """

    path: Path
    parts: Mapping[str, str]

    @property
    def name(self) -> str:
        """Such as `prefill[1, 64]`."""
        return self.parts.get(_NAME, "")

    def differences(self, parts: Mapping[str, str]) -> list[str]:
        """Which parts differ from those of another key, in words: "jax (0.10.1, now 0.10.2)"."""
        now = shortened(parts)
        return [
            _difference(part, self.parts.get(part, ""), value)
            for part, value in now.items()
            if self.parts.get(part, "") != value
        ]


def shortened(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts of a key as records keep them."""
    return {
        name: value if len(value) <= _MOST_CHARACTERS else f"#{hashlib.sha256(value.encode()).hexdigest()[:16]}"
        for name, value in parts.items()
    }


def _difference(part: str, then: str, now: str) -> str:
    if then.startswith("#") or now.startswith("#"):
        return part
    return f"{part} ({then or 'none'}, now {now or 'none'})"


def write_record(program: Path, parts: Mapping[str, str]) -> None:
    """Write the record of a program that has just been stored; a full disk is no error."""
    with contextlib.suppress(OSError):
        put(record_path(program), json.dumps(shortened(parts)).encode())


def record_path(program: Path) -> Path:
    """The file of a program's record."""
    return program.with_suffix(".json")


def read_records(folder: Path) -> Iterator[Record]:
    """The records of the programs in a folder; unreadable ones are left out."""
    for path in sorted(folder.glob("*.json")):
        program = path.with_suffix(".program")
        with contextlib.suppress(OSError, ValueError):
            parts: Any = json.loads(path.read_text(encoding="utf-8"))
            if program.is_file() and isinstance(parts, dict):
                yield Record(path=program, parts={str(name): str(value) for name, value in parts.items()})


def why_missing(folder: Path, parts: Mapping[str, str]) -> str:
    """Why no program in a folder has a key, in one sentence: how the most similar one differs.

    Args:
        folder: of the programs.
        parts: of the key, with the program's name.
    """
    records = list(read_records(folder))
    alike = [record for record in records if record.name == parts[_NAME]]
    if not alike:
        return "no program of this name and size was made before"
    closest = min(alike, key=lambda record: len(record.differences(parts)))
    return f"the most similar program on disk differs in {', '.join(closest.differences(parts)) or 'nothing'}"
