"""Legacy pickled checkpoints: read where they are plain tensors, refused where unpickling could run code."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from hfax.errors import CheckpointCorruptError
from hfax.load.pytorch_bin import read_pytorch_bin

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, (str(Path(os.environ["PAYLOAD_FOLDER"])),)


@pytest.mark.parametrize("zipped", [True, False])
def test_shards_in_both_formats_are_read(tmp_path: Path, zipped: bool) -> None:
    paths = [tmp_path / f"pytorch_model-{i}.bin" for i in range(2)]
    for path, name in zip(paths, STATE, strict=True):
        torch.save({name: STATE[name]}, path, _use_new_zipfile_serialization=zipped)
    read = read_pytorch_bin(paths)
    assert read.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD_FOLDER", str(tmp_path / "ran"))
    torch.save({"a": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointCorruptError, match="unpickling it could run code"):
        read_pytorch_bin([tmp_path / "pytorch_model.bin"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle at all", pickle.dumps({"a": 1}, protocol=2), None])
def test_garbage_and_truncated_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(CheckpointCorruptError, match=r"pytorch_model\.bin") as caught:
        read_pytorch_bin([path])
    assert "run code" not in str(caught.value)


def test_a_whole_training_state_is_refused(tmp_path: Path) -> None:
    torch.save({"model": STATE, "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointCorruptError, match="is not a state dict"):
        read_pytorch_bin([tmp_path / "pytorch_model.bin"])
