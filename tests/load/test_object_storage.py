"""Checkpoints in object stores: read from there as from a disk, over connections that break, and never parts of two."""

from __future__ import annotations

import base64
import hashlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import jax
import numpy as np
import pytest
import transformers
from fsspec.implementations.memory import MemoryFileSystem

from hfax import AutoModelForTPU, object_storage
from hfax.errors import (
    CheckpointAccessError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    UnsupportedOptionError,
)
from hfax.load import byte_source
from hfax.load.safetensors_file import SafetensorsFile
from hfax.load.source import resolve_checkpoint
from hfax.object_storage import RemoteFile, RemoteFolder


class Store(MemoryFileSystem):
    """An object store in this process with the faults of a network, and digests as Google's has them."""

    protocol = "store"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails_left: ClassVar[int] = 0
    shorter_by: ClassVar[int] = 0
    damages: ClassVar[bool] = False
    hides_digests: ClassVar[bool] = False
    requests: ClassVar[list[tuple[str, int | None, int | None]]] = []
    lock: ClassVar[Any] = threading.Lock()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        cls = type(self)
        with cls.lock:
            cls.requests.append((path, start, end))
            if cls.fails_left:
                cls.fails_left -= 1
                raise ConnectionResetError("the connection was reset")
        data = super().cat_file(path, start=start, end=end)
        if cls.damages and start and len(data) > 4096:
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return data[: len(data) - min(cls.shorter_by, len(data) // 2)]

    def _with_digest(self, found: Any) -> Any:
        if found["type"] == "file" and not type(self).hides_digests:
            value = self.store[found["name"]].getvalue()
            found["md5Hash"] = base64.b64encode(hashlib.md5(value).digest()).decode()
        return found

    def info(self, path: str, **more: Any) -> Any:
        return self._with_digest(super().info(path, **more))

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        found = super().ls(path, detail=detail, **more)
        return [self._with_digest(one) for one in found] if detail else found


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    fsspec.register_implementation("store", Store, clobber=True)
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    Store.requests.clear()
    Store.fails_left = Store.shorter_by = 0
    Store.damages = Store.hides_digests = False
    monkeypatch.setattr("hfax.object_storage._FIRST_WAIT_S", 0.001)
    yield Store
    Store.store.clear()


def _upload(folder: Path) -> str:
    url = f"store://bucket/{uuid.uuid4().hex}/model"
    for path in folder.rglob("*"):
        if path.is_file():
            RemoteFolder(url).write(path.relative_to(folder).as_posix(), path.read_bytes())
    Store.requests.clear()
    return url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files; every matrix is larger than a file's head."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.LlamaConfig(
        vocab_size=640,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="6MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def _ids(model: Any) -> list[int]:
    return np.asarray(model.generate(np.asarray([[5, 7, 11]]), max_new_tokens=5, do_sample=False))[0].tolist()


def _weights(model: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in jax.tree.leaves(model.params)]


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return AutoModelForTPU.from_pretrained(folder)


def test_a_model_in_an_object_store_is_that_of_the_disk(folder: Path, local: Any, tmp_path: Path) -> None:
    url = _upload(folder)
    model = AutoModelForTPU.from_pretrained(url)
    for ours, theirs in zip(_weights(model), _weights(local), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert _ids(model) == _ids(local)
    source = resolve_checkpoint(url)
    assert not list(source.folder.rglob("*.safetensors"))
    assert {path.name for path in source.folder.iterdir()} >= {"config.json", "generation_config.json"}


def test_each_byte_is_read_once_and_small_files_only_when_they_change(folder: Path, store: type[Store]) -> None:
    url = _upload(folder)
    AutoModelForTPU.from_pretrained(url)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    for name, size in sizes.items():
        read = sum((end or 0) - (start or 0) for path, start, end in store.requests if path.endswith(name))
        assert size <= read <= size + object_storage._HEAD_BYTES
    store.requests.clear()
    resolve_checkpoint(url)
    assert [path for path, *_ in store.requests if not path.endswith("index.json")] == []
    RemoteFolder(url).write("chat_template.jinja", b"{{ messages }}")
    found = resolve_checkpoint(url).folder
    assert (found / "chat_template.jinja").read_text() == "{{ messages }}"
    fsspec.filesystem("store").rm(f"{url}/chat_template.jinja")
    assert not (resolve_checkpoint(url).folder / "chat_template.jinja").exists()


def test_slices_for_devices_are_read_alone(folder: Path, store: type[Store]) -> None:
    [file] = [f for n, f in RemoteFolder(_upload(folder)).files().items() if n.endswith("00002-of-00005.safetensors")]
    remote, whole = SafetensorsFile(file), SafetensorsFile(folder / file.name)
    name, info = max(whole.tensors.items(), key=lambda item: item[1].num_bytes)
    store.requests.clear()
    rows = info.shape[0]
    index = (slice(rows // 4, rows // 2), slice(None))
    np.testing.assert_array_equal(remote.read_slice(name, index), whole.read(name)[index])
    assert sum((end or 0) - (start or 0) for _, start, end in store.requests) == info.num_bytes // 4
    index = (slice(None), slice(3, 9))
    np.testing.assert_array_equal(remote.read_slice(name, index), whole.read(name)[index])


def test_a_broken_connection_goes_on_where_it_was(folder: Path, store: type[Store], local: Any) -> None:
    url = _upload(folder)
    store.fails_left = 3
    store.shorter_by = 300_000
    model = AutoModelForTPU.from_pretrained(url)
    for ours, theirs in zip(_weights(model), _weights(local), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    starts = [(path, start) for path, start, _ in store.requests if start and path.endswith(".safetensors")]
    assert len(set(starts)) == len(starts)


def test_a_store_that_is_not_reached_is_named(folder: Path, store: type[Store]) -> None:
    url = _upload(folder)
    store.fails_left = 10**6
    with pytest.raises(CheckpointAccessError, match="connection was reset"):
        AutoModelForTPU.from_pretrained(url)


def test_damaged_bytes_are_found_by_the_store_s_digest(folder: Path, store: type[Store]) -> None:
    url = _upload(folder)
    store.damages = True
    with pytest.raises(CheckpointCorruptError, match="md5"):
        AutoModelForTPU.from_pretrained(url)


@pytest.mark.parametrize("hides_digests", [False, True])
def test_a_file_that_is_replaced_meanwhile_is_no_mixture(folder: Path, store: type[Store], hides_digests: bool) -> None:
    store.hides_digests = hides_digests
    url = _upload(folder)
    source = resolve_checkpoint(url)
    files = [SafetensorsFile(file) for file in source.safetensors_files]
    for file in files[1:]:
        [file.read(name) for name in file.tensors]
    replaced = files[0].path
    assert isinstance(replaced, RemoteFile)
    data = bytearray((folder / replaced.name).read_bytes())
    data[-1] ^= 1
    RemoteFolder(url).write(replaced.name, bytes(data))
    with pytest.raises(CheckpointCorruptError, match=r"changed while it was read|md5"):
        [files[0].read(name) for name in files[0].tensors]


def test_what_cannot_be_streamed_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json"):
        AutoModelForTPU.from_pretrained("store://bucket/nothing")
    with pytest.raises(UnsupportedOptionError, match="unknown protocol"):
        AutoModelForTPU.from_pretrained("nonsense://bucket/model")
    with pytest.raises(UnsupportedOptionError, match=r"hfax\[gcs\]"):
        AutoModelForTPU.from_pretrained("gs://bucket/model")
    with pytest.raises(UnsupportedOptionError, match="revision"):
        AutoModelForTPU.from_pretrained(_upload(folder), revision="main")
    for name in ("pytorch_model.bin", "model.gguf", "bundle.json"):
        (one := tmp_path / name.partition(".")[0]).mkdir()
        if name != "model.gguf":
            (one / "config.json").write_text('{"model_type": "llama"}')
        (one / name).write_bytes(b"x")
        with pytest.raises((UnsupportedOptionError, CheckpointNotFoundError)) as caught:
            AutoModelForTPU.from_pretrained(_upload(one))
        assert "from a disk" in str(caught.value) or "no config.json" in str(caught.value)


def test_parts_that_come_out_of_order_are_hashed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(5000)
    view = memoryview(data)
    found = byte_source._InOrder("sha256", hashlib.sha256(data).hexdigest().upper())
    parts = [(0, 128), (3000, 4000), (8, 900), (2000, 3000), (4000, 5000), (500, 700), (900, 2000)]
    assert [found.add(view[a:b], a) for a, b in parts] == [128, 128, 900, 900, 900, 900, 5000]
    assert found.matches
    monkeypatch.setattr(byte_source, "_MOST_PENDING_BYTES", 100)
    found = byte_source._InOrder("sha256", "")
    assert found.add(view[200:400], 200) == 0
    assert found.add(view[:200], 0) == 0
