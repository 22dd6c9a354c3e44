"""Local folders and the demo: which files are taken, and what is said when they are not there."""

import json
from pathlib import Path

import pytest

from hfax.errors import CheckpointCorruptError, CheckpointNotFoundError, HfaxError
from hfax.load.source import resolve_checkpoint

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})


def make_folder(folder: Path, *names: str, **contents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(contents.get(name.replace(".", "_").replace("-", "_"), "{}"))
    return folder


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    source = resolve_checkpoint(make_folder(tmp_path, "config.json", "model.safetensors"))
    assert source.folder == tmp_path
    assert source.name == str(tmp_path)
    assert source.revision is None
    assert source.format == "safetensors"
    assert source.weight_files == (tmp_path / "model.safetensors",)
    assert source.weight_map is None


def test_a_folder_with_shards_keeps_the_index(tmp_path: Path) -> None:
    make_folder(tmp_path, "config.json", "model.safetensors.index.json", *SHARDS, model_safetensors_index_json=INDEX)
    source = resolve_checkpoint(str(tmp_path))
    assert source.weight_files == tuple(tmp_path / shard for shard in SHARDS)
    assert source.weight_map == {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}


def test_safetensors_come_before_pickles_and_a_single_file_before_shards(tmp_path: Path) -> None:
    names = [
        "config.json",
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        *SHARDS,
    ]
    make_folder(tmp_path, *names, model_safetensors_index_json=INDEX)
    assert resolve_checkpoint(tmp_path).weight_files[0].name == SHARDS[0]
    make_folder(tmp_path, "model.safetensors")
    assert resolve_checkpoint(tmp_path).weight_files[0].name == "model.safetensors"
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    source = resolve_checkpoint(tmp_path)
    assert (source.format, source.weight_files) == ("pytorch_bin", (tmp_path / "pytorch_model.bin",))


def test_paths_relative_and_with_tilde_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "owner" / "name", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("owner/name", "./owner/name", "~/owner/name", "owner/name/"):
        assert (resolve_checkpoint(name).folder / "config.json").is_file()


def test_a_folder_named_demo_is_meant_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "demo", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("./demo").folder == Path("demo")


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./nothing", "~/nothing", "../no-such-sibling", "a/b/c", "nothing/", "no such model", ""],
)
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name: str) -> None:
    if name == "":
        name = "./"  # the working folder exists, but holds no checkpoint
        with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json"):
            resolve_checkpoint(name)
        return
    with pytest.raises(CheckpointNotFoundError, match="There is no folder"):
        resolve_checkpoint(name)


def test_a_missing_folder_is_told_its_neighbours(tmp_path: Path) -> None:
    make_folder(tmp_path / "llama-3")
    with pytest.raises(CheckpointNotFoundError, match="has: llama-3"):
        resolve_checkpoint(tmp_path / "llama3")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    make_folder(tmp_path, "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="is a file, not a checkpoint folder"):
        resolve_checkpoint(tmp_path / "model.safetensors")


INCOMPLETE = {
    "no config": (["model.safetensors", "params.json"], CheckpointNotFoundError, "has no config.json"),
    "empty": ([], CheckpointNotFoundError, "It has: nothing"),
    "no weights": (["config.json", "README.md"], CheckpointNotFoundError, "has no weights"),
    "tensorflow": (["config.json", "tf_model.h5"], CheckpointNotFoundError, "it has tf_model.h5"),
    "gguf": (["config.json", "q4.gguf"], CheckpointCorruptError, "q4.gguf is not a readable GGUF"),
    "adapter": (["config.json", "adapter_model.safetensors"], CheckpointNotFoundError, "merge_and_unload"),
    "original": (["config.json", "consolidated.00.pth"], CheckpointNotFoundError, "it has consolidated.00.pth"),
    "no index": (["config.json", *SHARDS], CheckpointNotFoundError, "Download model.safetensors.index.json too"),
    "missing shard": (
        ["config.json", "model.safetensors.index.json", SHARDS[0]],
        CheckpointCorruptError,
        f"missing from {{}}: {SHARDS[1]}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_folders_say_what_is_missing(tmp_path: Path, case: str) -> None:
    names, kind, text = INCOMPLETE[case]
    make_folder(tmp_path, *names, model_safetensors_index_json=INDEX)
    with pytest.raises(HfaxError) as caught:
        resolve_checkpoint(tmp_path)
    assert type(caught.value) is kind
    assert text.format(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"weight_map": {}}', "is empty"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "'../../etc/passwd'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd'"),
        ('{"weight_map": {"a": 5}}', "names the shard 5"),
        ('{"weight_map": ["a"]}', "names the shard None"),
        ('{"weight_map": {"a": ["x"]}}', "unhashable"),
    ],
)
def test_corrupt_indices_are_refused(tmp_path: Path, index: str, found: str) -> None:
    make_folder(tmp_path, "config.json", "model.safetensors.index.json", model_safetensors_index_json=index)
    with pytest.raises(CheckpointCorruptError) as caught:
        resolve_checkpoint(tmp_path)
    assert found in caught.value.what
