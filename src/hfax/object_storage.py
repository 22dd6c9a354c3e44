"""Files in object stores, named by URLs: `gs://bucket/folder`, `s3://…`, `hf://owner/name`, and every other protocol of fsspec.

Lists folders, and reads and writes files, whole or in ranges. A read that fails is tried again from the byte that it had reached.
This module knows nothing of what is in a file.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hfax.errors import CheckpointAccessError, CheckpointNotFoundError, UnsupportedOptionError

logger = logging.getLogger(__name__)

_URL = re.compile(r"[a-z][a-z0-9+.-]+://.+", re.IGNORECASE | re.DOTALL)
_PACKAGES = {"gs": "hfax[gcs]", "gcs": "hfax[gcs]", "s3": "hfax[s3]", "s3a": "hfax[s3]"}
_VERSIONS = ("generation", "etag", "ETag", "VersionId", "LastModified", "mtime", "created", "blob_id", "sha256")
"""Fields of fsspec's `info` that change with a file's contents, by any store."""
_HEAD_BYTES = 1 << 20
_TRIES = 6
_FIRST_WAIT_S = 0.25

_Result = TypeVar("_Result")


def is_url(name: str) -> bool:
    """Whether a name is a URL with a protocol."""
    return _URL.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteState:
    """What a store says of a file.

    Args:
        version: identifies the contents, as far as the store can tell: the size, and generation, ETag or time.
        digest: algorithm and hexadecimal digest of the contents, if the store has one.
    """

    version: str
    digest: tuple[str, str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of an object store, as it was when its folder was listed.

    Args:
        system: fsspec's file system.
        path: in `system`.
        name: relative to its folder.
        size: in bytes.
        version: see `RemoteState`; of the listing, which may tell it in other words than `ask`.
    """

    system: Any
    path: str
    name: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.system.unstrip_protocol(self.path)

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of the file; tried again where a connection breaks.

        Raises:
            CheckpointAccessError: the store refuses it, or cannot be reached after several tries.
            CheckpointNotFoundError: it is gone.
        """
        end, found = self.size if end is None else end, bytearray()

        def read() -> bytes:
            while begin + len(found) < end:
                data = self.system.cat_file(self.path, start=begin + len(found), end=end)
                if not data:
                    raise EOFError(f"it ends at byte {begin + len(found)}, and had {self.size} bytes")
                found.extend(data[: end - begin - len(found)])
            return bytes(found)

        return _trying(read, str(self))

    @functools.cached_property
    def head(self) -> tuple[RemoteState, bytes]:
        """The state in which the file was when it was first read, and its first bytes.

        Raises:
            CheckpointAccessError: see `read`.
            CheckpointNotFoundError: see `read`.
        """
        return self.ask(), self.read(0, min(_HEAD_BYTES, self.size))

    def ask(self) -> RemoteState:
        """The state in which the file is now.

        Raises:
            CheckpointAccessError: see `read`.
            CheckpointNotFoundError: see `read`.
        """

        def look() -> Mapping[str, Any]:
            self.system.invalidate_cache(self.path.rpartition("/")[0])
            return self.system.info(self.path)

        found = _trying(look, str(self))
        return RemoteState(version=_version(found), digest=_digest(found))


class RemoteFolder:
    """A folder of an object store.

    Args:
        url: its URL.

    Raises:
        UnsupportedOptionError: the protocol is unknown, or its package is not installed.
        CheckpointAccessError: there are no credentials, say.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0].lower()
        try:
            import fsspec

            self._system, path = fsspec.url_to_fs(self.url)
        except ImportError as error:
            raise UnsupportedOptionError(
                f"{url} cannot be read: the package for {protocol}:// is not installed.",
                str(error),
                f"Run: pip install {_PACKAGES[protocol]!r}" if protocol in _PACKAGES else "Install it.",
            ) from error
        except ValueError as error:
            raise UnsupportedOptionError(
                f"{url} has an unknown protocol.", str(error), "Use gs://, s3://, hf://, or another one of fsspec."
            ) from error
        except Exception as error:
            raise _refused(url, error) from error
        self._root = str(path).rstrip("/")

    def files(self) -> dict[str, RemoteFile]:
        """The files of the folder and of its folders, by their names relative to it; empty if there are none.

        Raises:
            CheckpointAccessError: the store refuses it, or cannot be reached.
        """

        def look() -> Mapping[str, Any]:
            self._system.invalidate_cache(self._root)
            try:
                return self._system.find(self._root, maxdepth=2, detail=True)
            except FileNotFoundError:
                return {}

        found: dict[str, RemoteFile] = {}
        for path, info in _trying(look, self.url).items():
            if info.get("type") == "file" and path != self._root:
                name = path[len(self._root) :].lstrip("/")
                found[name] = RemoteFile(
                    system=self._system,
                    path=path,
                    name=name,
                    size=int(info["size"]),
                    version=_version(info),
                )
        return found

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole.

        Raises:
            CheckpointAccessError: the store refuses it, or cannot be reached.
        """

        def write() -> None:
            self._system.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(f"{self._root}/{name}", data)

        _trying(write, f"{self.url}/{name}")


def _trying(act: Callable[[], _Result], what: str) -> _Result:
    """The result of a request, repeated with growing pauses while it fails for reasons that may pass."""
    wait = _FIRST_WAIT_S
    for left in reversed(range(_TRIES)):
        try:
            return act()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"There is no {what}.", str(error) or type(error).__name__, "Check the URL."
            ) from error
        except Exception as error:
            if left == 0 or isinstance(error, PermissionError):
                raise _refused(what, error) from error
            logger.info("%s: %s; trying again in %.2f s", what, error, wait)
        time.sleep(wait)
        wait *= 2
    raise AssertionError("unreachable")


def _refused(what: str, error: Exception) -> CheckpointAccessError:
    lines = str(error).strip().splitlines()
    return CheckpointAccessError(
        f"{what} cannot be reached.",
        f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
        "Check the URL, the credentials of its store (fsspec's documentation says where they are looked for), and the network.",
    )


def _version(info: Mapping[str, Any]) -> str:
    return repr([(name, str(info[name])) for name in ("size", *_VERSIONS) if info.get(name) is not None])


def _digest(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The digest that Google's store or the Hub has of a file. Amazon's ETag is one for some files, and does not say for which."""
    if (lfs := info.get("lfs")) is not None:
        sha = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        return ("sha256", sha) if sha else None
    if sha := info.get("sha256"):
        return "sha256", sha
    if md5 := info.get("md5Hash"):
        return "md5", base64.b64decode(md5).hex()
    return None
