"""Files of stored starts: found by a key of everything that they depend on, written whole, and read only if they are whole.

A record is a JSON file that names the digest of a second file (weights that no checkpoint holds, or a tokenizer), which is written
first. So a process that is killed, a full disk or two writers leave a record that is complete, or none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfax.home import hfax_home, put
from hfax.programs.program_files import is_of_another_user, note_use, remove_orphans
from hfax.programs.shared import find_shared, keep, shared_names
from hfax.programs.versions import source_digest, version_of

if TYPE_CHECKING:
    from hfax.backends.protocol import LoadOptions
    from hfax.load.source import CheckpointSource

logger = logging.getLogger(__name__)

_FORMAT = 3
_MOST_RECORDS = 64
"""Number of records of a kind above which the least recently used are removed."""
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".spm")
"""Suffixes of the small files of a checkpoint: its config, tokenizer and chat templates."""
_WEIGHT_INDEX = ".index.json"
_TEMPLATES = "additional_chat_templates/*"
_MOST_TEXT_BYTES = 64 << 20
"""Larger than any tokenizer: a data set in the folder, say, which is not read for each start."""


def is_useful() -> bool:
    """Whether starting from a record spares anything: torch is not imported yet."""
    return "torch" not in sys.modules


def is_recordable(source: CheckpointSource, options: LoadOptions) -> bool:
    """Whether a checkpoint loaded with these options may have a record: safetensors, with defaults except for the dtype,
    the quantization and the task."""
    kept = {name: getattr(options, name) for name in ("dtype", "quantization", "strict", "task")}
    default = type(options)(**kept)
    return source.format == "safetensors" and options == default and isinstance(options.dtype, str)


def key_of(kind: str, parts: Iterable[str]) -> str:
    """The key of a record: a digest of its parts, of this code and of the packages that interpret the record.

    Args:
        kind: "model" or "tokenizer".
        parts: everything else that the record's contents depend on.
    """
    versions = [version_of(name) for name in ("hfax", "transformers", "tokenizers", "jinja2", "safetensors")]
    own = (kind, str(_FORMAT), sys.version, source_digest(Path(__file__).parent), *versions, *_plugins())
    return hashlib.sha256("\n".join([*own, *parts]).encode()).hexdigest()


@functools.cache
def _plugins() -> tuple[str, ...]:
    """Packages that add patches or backends, with their versions: they may change what any model computes."""
    found = importlib.metadata.entry_points()
    entries = [e for group in ("hfax.patches", "hfax.backends") for e in found.select(group=group)]
    return tuple(sorted(f"{e.group} {e.value} {e.dist.version if e.dist else ''}" for e in entries))


def texts_digest(folder: Path) -> str:
    """Digest of the small files of a checkpoint's folder: config, tokenizer, chat templates; of large ones the size and time."""
    digest = hashlib.sha256()
    for path in sorted([*folder.iterdir(), *folder.glob(_TEMPLATES)]):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _TEXT_SUFFIXES and not name.endswith(_WEIGHT_INDEX) and path.is_file():
            stat = path.stat()
            is_small = stat.st_size <= _MOST_TEXT_BYTES
            digest.update(f"{name}\n{stat.st_size}\n{0 if is_small else stat.st_mtime_ns}\n".encode())
            digest.update(path.read_bytes() if is_small else b"")
    return digest.hexdigest()


def record_file(kind: str, subject: str, key: str) -> Path:
    """The path of a record.

    Args:
        kind: of record.
        subject: digest of what it is of, whatever the environment.
        key: from `key_of`.
    """
    return _folder() / f"{kind}-{subject[:16]}-{key}.json"


def records_of(kind: str, subject: str) -> list[Path]:
    """The paths of the records of a subject, for any environment."""
    prefix = f"{kind}-{subject[:16]}-"
    shared = [_folder() / name.partition("/")[2] for name in shared_names(f"{_folder().name}/{prefix}")]
    return sorted({*_folder().glob(f"{prefix}*.json"), *(path for path in shared if path.suffix == ".json")})


def _folder() -> Path:
    return hfax_home() / "starts"


def beside(record: Path) -> Path:
    """The path of a record's second file."""
    return record.with_suffix(".data")


def write_record(record: Path, content: Mapping[str, Any], data: bytes) -> None:
    """Write a record and its second file; a full or read-only disk is no error.

    Args:
        record: its path.
        content: JSON values by name.
        data: contents of the second file.
    """
    try:
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        put(beside(record), data)
        put(record, _encoded(content, data))
        note_use(beside(record))
        note_use(record)
        _prune(record.parent, record.name.partition("-")[0])
    except OSError as error:
        logger.info("%s was not written (%s)", record, error)


def write_into_bundle(record: Path, content: Mapping[str, Any], data: bytes) -> None:
    """Write a record into a bundle, whose folder is moved to its place when it is complete.

    Args:
        record: its path.
        content: JSON values by name.
        data: contents of the second file.

    Raises:
        OSError: the disk is full.
    """
    beside(record).write_bytes(data)
    record.write_bytes(_encoded(content, data))


def _encoded(content: Mapping[str, Any], data: bytes) -> bytes:
    """The contents of a record's first file; `data` is the second's."""
    return json.dumps({**content, "data": hashlib.sha256(data).hexdigest()}).encode()


def read_record(record: Path, *, is_of_cache: bool = True) -> tuple[dict[str, Any], bytes] | None:
    """A record's content and its second file; None if there is none, or it is damaged.

    Args:
        record: its path.
        is_of_cache: another user's is ignored, as are programs in a cache; if there is none, a shared folder may have it.
    """
    shared = _take_shared(record) if is_of_cache and not record.exists() else None
    try:
        if shared is None and is_of_cache and is_of_another_user(record):
            return None
        text, data = shared or (record.read_bytes(), beside(record).read_bytes())
        content: Any = json.loads(text)
        if content.pop("data") == hashlib.sha256(data).hexdigest():
            if is_of_cache:
                renew(record)
            return content, data
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass
    return None


def renew(record: Path) -> bool:
    """Whether a record is there. If so, it is used: those that are not for longest are removed first."""
    if not record.is_file():
        return False
    with contextlib.suppress(OSError):
        os.utime(record)
    note_use(beside(record))
    note_use(record)
    return True


def _take_shared(record: Path) -> tuple[bytes, bytes] | None:
    """The two files of a record of a shared folder, kept in the cache; None if there is none."""
    text, data = (find_shared(f"{_folder().name}/{path.name}") for path in (record, beside(record)))
    if text is None or data is None:
        return None
    keep(beside(record), data)
    keep(record, text)
    return text, data


def _prune(folder: Path, kind: str) -> None:
    with contextlib.suppress(OSError):
        remove_orphans(folder)
        files = sorted(folder.glob(f"{kind}-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for record in files[_MOST_RECORDS:]:
            record.unlink(missing_ok=True)
            beside(record).unlink(missing_ok=True)
