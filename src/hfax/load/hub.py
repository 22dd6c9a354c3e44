"""Downloads a Hub repository's checkpoint into huggingface_hub's cache.

Turns a repository id into a snapshot folder with only the configuration, the tokenizer and one weight format.
huggingface_hub handles downloads, resuming, progress bars and the cache layout; a file appears in the cache only when
it is complete. This module reads no tensors.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from pathlib import Path
from types import TracebackType

import huggingface_hub
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (httpx's in huggingface_hub 1, httpx2's in 2)
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hfax.errors import CheckpointAccessError, CheckpointNotFoundError, HfaxError
from hfax.load.weight_files import (
    check_shards,
    choose_gguf,
    choose_weight_files,
    companions,
    is_gguf,
    listing,
    read_weight_map,
)
from hfax.phases import phase

logger = logging.getLogger(__name__)


def fetch_checkpoint(
    repo_id: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: Path | None,
    local_files_only: bool,
    allow_code: bool,
    gguf: str | None = None,
) -> Path:
    """Fetch the repository files hfax needs; returns the snapshot folder, named by its commit.

    `gguf` names one of a repository's GGUF files, see `choose_gguf`; only that is fetched.

    The revision's commit is looked up on the Hub each time; if the Hub is unreachable, the cached commit is used and a
    warning is logged. Arguments and errors are those of `resolve_checkpoint`. After Ctrl-C the cache holds only
    complete files.
    """
    if local_files_only:
        return _cached_snapshot(repo_id, revision, cache_dir, "local_files_only=True was passed", None, gguf)
    try:
        api = huggingface_hub.HfApi(token=token)
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
        assert info.sha is not None, "the Hub names a commit with every revision"
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        with _Fetcher(repo_id, revision or "main", info.sha, token, cache_dir) as fetcher:
            return _fetch_files(fetcher, repo_id, sizes, allow_code, gguf)
    except OfflineModeIsEnabled as error:
        return _cached_snapshot(repo_id, revision, cache_dir, "HF_HUB_OFFLINE is set", error, gguf)
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise _refused(repo_id, revision, token, error) from error
        reason = f"the Hub returned an error: {_first_line(error)}"
        return _cached_snapshot(repo_id, revision, cache_dir, reason, error, gguf)
    except (LocalEntryNotFoundError, HTTPError) as error:
        reason = _first_line(error.__cause__ or error)
        return _cached_snapshot(repo_id, revision, cache_dir, f"the Hub could not be reached: {reason}", error, gguf)
    except OSError as error:
        raise _cannot_download(repo_id, cache_dir, error) from error


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Commit a folder's files to a Hub repository, created if it does not exist; returns the commit URL.

    Raises:
        CheckpointAccessError: the token has no write access, or the Hub cannot be reached.
    """
    api = huggingface_hub.HfApi(token=token)
    try:
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=made.repo_id,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled) as error:
        raise CheckpointAccessError(
            f"{repo_id!r} could not be uploaded to the Hub.",
            _first_line(error),
            "Check that the token has write access (`hf auth whoami`, `hf auth login`), then try again.",
        ) from error
    return str(commit.commit_url)


class _Fetcher:
    """Fetches files of one commit from the cache or the Hub; the "download" phase starts at the first uncached file."""

    def __init__(
        self, repo_id: str, revision: str, commit: str, token: str | bool | None, cache_dir: Path | None
    ) -> None:
        self._repo_id = repo_id
        self._revision = revision
        self._commit = commit
        self._token = token
        self._cache_dir = cache_dir
        self._phase: contextlib.ExitStack | None = None
        self._stack = contextlib.ExitStack()

    def get(self, name: str, *, is_first: bool = False) -> Path:
        """The local path. `is_first` requests the revision by name, so that the cache records its commit."""
        if cached := self.cached(name):
            return cached
        if self._phase is None:
            self._phase = self._stack
            self._stack.enter_context(phase("download", self._repo_id))
        return Path(
            huggingface_hub.hf_hub_download(
                self._repo_id,
                name,
                revision=self._revision if is_first else self._commit,
                token=self._token,
                cache_dir=self._cache_dir,
            )
        )

    def cached(self, name: str) -> Path | None:
        """The local path if the file is cached."""
        return _cached_file(self._repo_id, name, self._commit, self._cache_dir)

    def check_free(self, missing_bytes: int) -> None:
        """Raise `OSError` if the cache's disk has less than `missing_bytes` free."""
        cache = _cache_folder(self._cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(cache).free) < missing_bytes:
            raise OSError(errno.ENOSPC, f"{missing_bytes / 1e9:.2f} GB to download, {free / 1e9:.2f} GB free")

    def __enter__(self) -> _Fetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def _fetch_files(fetcher: _Fetcher, repo_id: str, sizes: dict[str, int], allow_code: bool, gguf: str | None) -> Path:
    """Fetch files one at a time: huggingface_hub's thread pool would delay Ctrl-C until its downloads finish."""
    if gguf is not None or is_gguf(sizes):
        files = choose_gguf(sizes, gguf, f"the Hub repository {repo_id!r}")
        fetcher.check_free(sum(sizes[name] for name in files if fetcher.cached(name) is None))
        paths = [fetcher.get(name, is_first=name == files[0]) for name in files]
        return paths[0].parents[files[0].count("/")]
    if "config.json" not in sizes:
        raise CheckpointNotFoundError(
            f"The Hub repository {repo_id!r} has no config.json.",
            f"It is not a transformers checkpoint. It has: {listing(sizes)}.",
            "Use the model's transformers repository, often named with -hf.",
        )
    weights = choose_weight_files([name for name in sizes if "/" not in name], f"The Hub repository {repo_id!r}")
    folder = fetcher.get("config.json", is_first=True).parent
    shards: tuple[str, ...] = (weights.main,)
    if weights.is_index:
        index = fetcher.get(weights.main)
        weight_map = read_weight_map(index.read_text(encoding="utf-8", errors="replace"), f"{repo_id}/{weights.main}")
        shards = check_shards(weight_map, sizes, f"the Hub repository {repo_id!r}")
    wanted = [name for name in (*companions(sizes, allow_code), *shards) if fetcher.cached(name) is None]
    if wanted:
        fetcher.check_free(sum(sizes[name] for name in wanted))
    for name in wanted:
        fetcher.get(name)
    return folder


def _cached_snapshot(
    repo_id: str,
    revision: str | None,
    cache_dir: Path | None,
    reason: str,
    error: BaseException | None,
    gguf: str | None,
) -> Path:
    """The snapshot cached by an earlier call, for offline use or when the Hub is unreachable."""
    cache = _cache_folder(cache_dir)
    config = _cached_file(repo_id, "config.json", revision or "main", cache_dir)
    if (config is None or gguf is not None) and (folder := _cached_gguf(repo_id, revision, cache_dir, gguf)):
        return folder
    if config is None or gguf is not None:
        raise CheckpointNotFoundError(
            f"{repo_id!r} ({revision or 'main'}) is neither a local folder nor in the cache {cache}.",
            f"It was not looked up on the Hub: {reason}.",
            "Run once with network access, or pass the checkpoint's folder.",
        ) from error
    folder = config.parent
    # Only the snapshot folder is known to exist; an interrupted download may lack weights or shards.
    names = {path.name for path in folder.iterdir()}
    try:
        weights = choose_weight_files(names, str(folder))
        if weights.is_index:
            index = (folder / weights.main).read_text(encoding="utf-8", errors="replace")
            check_shards(
                read_weight_map(index, weights.main),
                {path.relative_to(folder).as_posix() for path in folder.rglob("*")},
                str(folder),
            )
    except HfaxError as incomplete:
        raise CheckpointNotFoundError(
            f"{repo_id!r} ({revision or 'main'}) is only partly in the cache {cache}.",
            f"A download was interrupted and could not resume: {reason}. {incomplete.what}",
            "Run once with network access; complete files are not downloaded again.",
        ) from error
    if error is not None:
        logger.warning("%s: using the cached commit %s because %s", repo_id, folder.name[:12], reason)
    return folder


def _cached_gguf(repo_id: str, revision: str | None, cache_dir: Path | None, wanted: str | None) -> Path | None:
    """The cached snapshot that has a GGUF file in full; None if there is none."""
    try:
        found = huggingface_hub.snapshot_download(
            repo_id, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns="*.gguf"
        )
        names = [path.relative_to(found).as_posix() for path in Path(found).rglob("*.gguf")]
        choose_gguf(names, wanted, found)
    except (LocalEntryNotFoundError, HfaxError):
        return None
    return Path(found)


def _cached_file(repo_id: str, name: str, revision: str, cache_dir: Path | None) -> Path | None:
    found = huggingface_hub.try_to_load_from_cache(repo_id, name, cache_dir=cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _cache_folder(cache_dir: Path | None) -> Path:
    return cache_dir or Path(HF_HUB_CACHE)


def _refused(repo_id: str, revision: str | None, token: str | bool | None, error: HfHubHTTPError) -> HfaxError:
    """Translate the Hub's HTTP errors into hfax errors."""
    has_token = token is not False and (isinstance(token, str) or huggingface_hub.get_token() is not None)
    status = error.response.status_code
    page = f"https://huggingface.co/{repo_id}"
    if isinstance(error, GatedRepoError):
        why = "The token's account has not been granted access." if has_token else "No token was sent."
        return CheckpointAccessError(
            f"The Hub repository {repo_id!r} is gated (HTTP {status}).",
            f"Access requires accepting its licence first. {why}",
            f"Accept the licence at {page}, then log in with `hf auth login`, or pass token= or set HF_TOKEN.",
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointNotFoundError(
            f"The Hub repository {repo_id!r} has no revision {revision or 'main'!r}.",
            "No branch, tag or commit has that name.",
            f"Use a revision listed at {page}/tree/main, or omit revision.",
        )
    if isinstance(error, RepositoryNotFoundError):
        private = (
            "or the token's account has no access to it" if has_token else "or it is private and no token was sent"
        )
        return CheckpointNotFoundError(
            f"{repo_id!r} is neither a local folder nor a repository on the Hub (HTTP {status}).",
            f"{Path.cwd()} has no such folder; the Hub has no such model, {private}.",
            "Check the spelling (owner/name); for a private repository log in with `hf auth login` or pass token=.",
        )
    if isinstance(error, DisabledRepoError) or status in (401, 403):
        return CheckpointAccessError(
            f"The Hub refused access to {repo_id!r} (HTTP {status}).",
            _first_line(error),
            "Check that the token is valid and can read this repository: `hf auth whoami`, `hf auth login`.",
        )
    return HfaxError(
        f"The Hub did not serve {repo_id!r} (HTTP {status}).", _first_line(error), "Try again in a few minutes."
    )


def _cannot_download(repo_id: str, cache_dir: Path | None, error: OSError) -> HfaxError:
    cache = _cache_folder(cache_dir)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return HfaxError(
            f"{repo_id!r} does not fit on the disk of {cache}: {error.strerror}.",
            "huggingface_hub caches downloads there; complete files were kept, the partial one was removed.",
            "Free some space (`hf cache prune`), or point cache_dir= or HF_HOME to a larger disk.",
        )
    return HfaxError(
        f"Downloading {repo_id!r} to {cache} failed.",
        f"{type(error).__name__}: {_first_line(error)}",
        "Try again: complete files are kept. If it fails again, check the folder's permissions and the network.",
    )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0].strip() if lines else type(error).__name__).rstrip(".")
