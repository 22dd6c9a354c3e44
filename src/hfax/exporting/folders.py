"""Folders that are written whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from hfax.errors import HfaxError, InvalidInputError


@contextlib.contextmanager
def replacing(folder: Path, marker: str) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` if the block ends well, and vanishes if it does not.

    Args:
        folder: is not there, is empty, or is an earlier one of the same kind.
        marker: the file that a folder of this kind has.

    Raises:
        InvalidInputError: the folder holds something else.
        HfaxError: it cannot be written.
    """
    if folder.exists() and not (folder / marker).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"{folder} is there, and has no {marker}.",
            "An export replaces whatever is in its folder.",
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
            "Check the path, its permissions and the free space. What was there before is still there.",
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
