"""Atomic folder writes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from hfax.errors import HfaxError, InvalidInputError


@contextlib.contextmanager
def replacing(folder: Path, marker: str) -> Iterator[Path]:
    """A temporary folder that replaces `folder` if the block succeeds, and is removed if it fails.

    Args:
        folder: must not exist, be empty, or be an earlier export of the same kind.
        marker: file that identifies this kind of export.

    Raises:
        InvalidInputError: the folder has other contents.
        HfaxError: the folder cannot be written.
    """
    if folder.exists() and not (folder / marker).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"{folder} already exists and has no {marker}.",
            "An export replaces the whole folder.",
            "Choose another folder, or remove this one.",
        )
    writing, earlier = (folder.with_name(f".{folder.name}.{state}") for state in ("writing", "earlier"))
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        yield writing
        shutil.rmtree(earlier, ignore_errors=True)
        if folder.exists():
            folder.replace(earlier)
        writing.replace(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        raise HfaxError(
            f"{folder} could not be written.",
            f"{type(error).__name__}: {error}",
            "Check the path, its permissions and the free space. The earlier export is unchanged.",
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
