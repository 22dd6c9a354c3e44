"""Saving weights. The references are the safetensors library and plain transformers."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hfax.errors import HfaxError, InvalidInputError
from hfax.load.safetensors_file import SafetensorsFile
from hfax.load.save import save_safetensors

TENSORS = {f"layers.{i}.weight": torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def test_saved_files_read_bit_for_bit_in_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5, dtype=torch.bfloat16),
        "transposed": torch.randn(4, 6).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 7),
        "bool": torch.tensor([True, False, True]),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
    }
    assert save_safetensors(tmp_path / "new" / "folder", tensors) == (
        tmp_path / "new" / "folder" / "model.safetensors",
    )
    read = read_folder(tmp_path / "new" / "folder")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].to(torch.complex128), tensor.to(torch.complex128)), name
        assert read[name].shape == tensor.shape


def test_numpy_and_jax_arrays_are_saved_too(tmp_path: Path) -> None:
    import jax.numpy as jnp

    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "numpy": values,
        "strided": values[:, ::2],
        "big_endian": values.astype(">f4"),
        "ml_dtypes": values.astype(ml_dtypes.bfloat16),
        "jax": jnp.asarray(values, jnp.bfloat16),
    }
    save_safetensors(tmp_path, arrays)
    read = read_folder(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name].float().numpy(), np.asarray(array, np.float32), name)
    assert read["jax"].dtype == torch.bfloat16


def test_every_tensor_is_aligned_for_mapping_even_beside_odd_sizes(tmp_path: Path) -> None:
    odd = {
        "a.odd": torch.ones(3),
        "b.byte": torch.ones(5, dtype=torch.uint8),
        "c.half": torch.ones(7, dtype=torch.float16),
    }
    save_safetensors(tmp_path, {**odd, **TENSORS})
    infos = SafetensorsFile(tmp_path / "model.safetensors").tensors
    for name in TENSORS:
        assert infos[name].begin % 64 == 0
    for name in odd:
        assert infos[name].begin % infos[name].numpy_dtype.itemsize == 0


def test_shards_have_transformers_names_and_an_index(tmp_path: Path) -> None:
    files = save_safetensors(tmp_path, TENSORS, max_shard_size=2 * 64 * 32 * 4)
    assert [path.name for path in files] == [
        *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    for name, file_name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file_name)[name], TENSORS[name])


@pytest.mark.parametrize("max_shard_size", ["50GB", 20_000])
def test_plain_transformers_loads_the_folder_bit_for_bit(tmp_path: Path, max_shard_size: int | str) -> None:
    from tiny_models import tiny_llama
    from transformers import AutoModelForCausalLM

    model = tiny_llama().to(torch.bfloat16)
    state = model.state_dict()
    model.config.save_pretrained(tmp_path)
    save_safetensors(tmp_path, state, max_shard_size=max_shard_size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(("first", "second"), [(20_000, "1GB"), ("1GB", 20_000), (20_000, 10_000), (20_000, 20_000)])
def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path, first: int | str, second: int | str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_safetensors(tmp_path, TENSORS, max_shard_size=first)
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    files = save_safetensors(tmp_path, changed, max_shard_size=second)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files} | {"config.json"}
    read = read_folder(tmp_path)
    for name, tensor in changed.items():
        assert torch.equal(read[name], tensor)


def test_weights_mapped_from_a_folder_can_be_saved_into_it(tmp_path: Path) -> None:
    save_safetensors(tmp_path, TENSORS)
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        arrays = {name: file.read(name) for name in file.tensors}
    save_safetensors(tmp_path, {name: arrays[name] for name in reversed(arrays)})
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, TENSORS[name].numpy())
        assert torch.equal(read_folder(tmp_path)[name], TENSORS[name])


# A limit on the size of files stands for a full disk: the system refuses the write in the middle of a shard.
FULL_DISK = """
import resource, sys, torch
from hfax.load.save import save_safetensors
from hfax.errors import HfaxError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_safetensors(sys.argv[1], {"small": torch.ones(10), "z": torch.ones(100_000)}, max_shard_size=1_000)
except HfaxError as error:
    print(error)
"""


def test_full_disk_is_an_error_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    save_safetensors(tmp_path, TENSORS)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "could not be saved" in done.stdout
    assert "Nothing in the folder was changed" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(read_folder(tmp_path)["layers.0.weight"], TENSORS["layers.0.weight"])


INTERRUPTED = """
import sys, time, numpy as np
from hfax.load.save import save_safetensors

class Slow:
    dtype, shape, nbytes = np.dtype(np.float32), (4,), 16
    def __array__(self, dtype=None, copy=None):
        print("writing", flush=True)
        time.sleep(60)

save_safetensors(sys.argv[1], {"a": np.ones(1 << 16, np.float32), "b": Slow()}, max_shard_size=1_000)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupt_leaves_the_earlier_checkpoint(tmp_path: Path, how: signal.Signals) -> None:
    save_safetensors(tmp_path, TENSORS)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(how)
        process.wait(timeout=20)
    names = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert names == ["model.safetensors"]
    if how == signal.SIGINT:
        assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(read_folder(tmp_path)["layers.0.weight"], TENSORS["layers.0.weight"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HfaxError, match="cannot be written"):
        save_safetensors(tmp_path / "file", TENSORS)


def test_a_dtype_outside_the_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"'z' of shape \(2,\) has dtype complex128"):
        save_safetensors(tmp_path / "out", {"a": np.ones(2), "z": np.ones(2, np.complex128)})
    assert not (tmp_path / "out").exists()


def test_a_wrong_shard_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_shard_size='lots' is not a size"):
        save_safetensors(tmp_path, TENSORS, max_shard_size="lots")
