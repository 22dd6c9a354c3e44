"""Reading safetensors files, whole and broken. The reference is the safetensors library."""

import json
import os
import struct
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.load.safetensors_file import SafetensorsFile, as_torch

TORCH_DTYPES = (
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def all_dtypes() -> dict[str, torch.Tensor]:
    bits = torch.randint(0, 256, (7 * 5 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {str(d): bits.clone().view(d).reshape(7, -1) for d in TORCH_DTYPES if d != torch.bool}
    return {**tensors, "torch.bool": bits.reshape(7, -1) > 127}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def shift_data(source: Path, target: Path, offset: int) -> Path:
    """The same file with its header padded so that the data begins `offset` bytes after a multiple of 64."""
    content = source.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].rstrip(b" ")
    header += b" " * ((offset - 8 - len(header)) % 64)
    target.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    return target


@pytest.fixture(params=[0, 8, 16, 56])
def file_at_offset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A file of one bfloat16 tensor [300, 64] whose data begins `param` bytes after a multiple of 64."""
    values = np.arange(300 * 64).astype(ml_dtypes.bfloat16).reshape(300, 64)
    save_torch({"w": as_torch(values.copy())}, tmp_path / "plain.safetensors")
    return shift_data(tmp_path / "plain.safetensors", tmp_path / "model.safetensors", request.param), values


def test_every_dtype_reads_bit_for_bit_as_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_torch(all_dtypes(), path, metadata={"format": "pt"})
    reference = load_torch(path)
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.tensors) == set(reference)
        for name, info in file.tensors.items():
            assert info.torch_dtype == reference[name].dtype
            assert same_bits(as_torch(file.read(name)), reference[name]), name


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = {
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "row": np.arange(3, dtype=np.int64),
    }
    save_numpy(stored, path)
    with SafetensorsFile(path) as file:
        for name, value in stored.items():
            read = file.read(name)
            assert read.shape == value.shape
            assert read.dtype == value.dtype
            np.testing.assert_array_equal(read, value)
            assert as_torch(read).shape == value.shape
        assert file.read_slice("scalar", ()) == np.float32(3.5)
        assert file.read_slice("empty", (slice(None), slice(1, 3))).shape == (0, 2)


def test_file_without_tensors_reads_as_empty(tmp_path: Path) -> None:
    assert SafetensorsFile(write_raw(tmp_path / "model.safetensors", {})).tensors == {}


def test_arrays_are_aligned_and_jax_adopts_them_without_a_copy(file_at_offset: tuple[Path, np.ndarray]) -> None:
    import jax

    path, values = file_at_offset
    array = SafetensorsFile(path).read("w")
    assert array.ctypes.data % 64 == 0
    assert array.dtype == ml_dtypes.bfloat16
    placed = jax.device_put(array, jax.devices("cpu")[0])
    assert placed.unsafe_buffer_pointer() == array.ctypes.data
    np.testing.assert_array_equal(np.asarray(placed), values)


def test_torch_view_shares_memory(file_at_offset: tuple[Path, np.ndarray]) -> None:
    array = SafetensorsFile(file_at_offset[0]).read("w")
    tensor = as_torch(array)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == array.ctypes.data


def test_writing_to_an_array_changes_neither_the_file_nor_a_second_read(
    file_at_offset: tuple[Path, np.ndarray],
) -> None:
    path, values = file_at_offset
    before = path.read_bytes()
    first = SafetensorsFile(path).read("w")
    first[:] = 0
    assert path.read_bytes() == before
    np.testing.assert_array_equal(SafetensorsFile(path).read("w"), values)


def test_arrays_outlive_the_file_and_its_replacement(file_at_offset: tuple[Path, np.ndarray]) -> None:
    path, values = file_at_offset
    with SafetensorsFile(path) as file:
        array = file.read("w")
    (path.parent / "new").write_bytes(b"another file")
    (path.parent / "new").replace(path)
    np.testing.assert_array_equal(array, values)
    with pytest.raises(ValueError, match="is closed"):
        file.read("w")


def test_only_tensors_that_are_aligned_in_the_file_are_mapped(tmp_path: Path) -> None:
    """Seen by changing the file in place, which only a mapping follows; `mapped=False` never does."""
    save_numpy({"w": np.ones((4096, 8), np.float32)}, tmp_path / "plain.safetensors")
    for offset, options, is_mapped in (
        (0, {}, True),
        (8, {}, False),
        (0, {"mapped": False}, False),
        (8, {"alignment": 1}, True),
    ):
        path = shift_data(tmp_path / "plain.safetensors", tmp_path / "model.safetensors", offset)
        with SafetensorsFile(path, **options) as file:
            array = file.read("w")
            begin = file.tensors["w"].begin
        with path.open("r+b") as raw:
            raw.seek(begin)
            raw.write(bytes(4))
        assert (array[0, 0] == 0) == is_mapped, (offset, options)


@pytest.mark.parametrize(
    "index",
    [
        np.s_[0:300, 0:64],
        np.s_[32:64, :],
        np.s_[299:, :],
        np.s_[:, 16:32],
        np.s_[100:101, 63:],
        np.s_[-10:, :-1],
        np.s_[5:5, :],
        np.s_[10:3, 1:2],
        np.s_[:400, :],
    ],
)
def test_slices_equal_numpys_and_are_aligned(file_at_offset: tuple[Path, np.ndarray], index: tuple[slice, ...]) -> None:
    path, values = file_at_offset
    part = SafetensorsFile(path).read_slice("w", index)
    np.testing.assert_array_equal(part, values[index])
    assert part.flags.c_contiguous
    assert part.size == 0 or part.ctypes.data % 64 == 0


@pytest.mark.parametrize("index", [np.s_[0:1], np.s_[0:1, 0:1, 0:1], np.s_[::2, :]])
def test_slices_that_are_no_ranges_of_every_axis_are_refused(tmp_path: Path, index: object) -> None:
    save_numpy({"w": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="one slice of step 1 per axis"):
        SafetensorsFile(tmp_path / "model.safetensors").read_slice("w", index if isinstance(index, tuple) else (index,))


def test_tensors_larger_than_an_arena_and_reads_from_several_threads_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = {f"small{i}": rng.integers(0, 255, 100_003, np.uint8) for i in range(40)}
    stored["large"] = rng.integers(0, 255, (70 << 20) + 5, np.uint8)
    save_numpy(stored, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors", mapped=False)
    read: dict[str, np.ndarray] = {}

    def work(names: list[str]) -> None:
        read.update({name: file.read(name) for name in names})

    names = list(stored)
    threads = [threading.Thread(target=work, args=(names[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, value in stored.items():
        np.testing.assert_array_equal(read[name], value)
        assert read[name].ctypes.data % 64 == 0


def test_files_are_closed_when_the_reader_is_dropped(tmp_path: Path) -> None:
    save_numpy({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir())) if open_files.exists() else None
    for _ in range(20):
        SafetensorsFile(tmp_path / "model.safetensors").read("w")
    if before is not None:
        assert len(list(open_files.iterdir())) == before


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
CORRUPT_HEADERS = {
    "is not JSON": b'{"a": ',
    "header is a JSON list": [],
    "is 5, not an object": {"a": 5},
    "'a' has dtype 'F33'": {"a": {**ENTRY, "dtype": "F33"}},
    "'a' has dtype None": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "'a' has shape [-2]": {"a": {**ENTRY, "shape": [-2]}},
    "'a' has shape [2.0]": {"a": {**ENTRY, "shape": [2.0]}},
    "'a' has shape [True]": {"a": {**ENTRY, "shape": [True]}},
    "data_offsets [8, 0]": {"a": {**ENTRY, "data_offsets": [8, 0]}},
    "data_offsets [0]": {"a": {**ENTRY, "data_offsets": [0]}},
    "data_offsets 'x'": {"a": {**ENTRY, "data_offsets": "x"}},
    "shape [3] takes 12 bytes, but its data_offsets [0, 8] span 8": {"a": {**ENTRY, "shape": [3]}},
    "dtype F16 and shape [2] takes 4 bytes": {"a": {**ENTRY, "dtype": "F16"}},
    "'b' at byte": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}},
    "overlaps 'a'": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}},
    "leaves a hole after 'a'": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}},
    "leaves a hole after the header": {"a": {**ENTRY, "data_offsets": [8, 16]}},
    "'b' ends at byte": {"a": ENTRY, "b": {**ENTRY, "shape": [4], "data_offsets": [8, 24]}},
    "its last tensor ends at byte": {"a": ENTRY},
    "names 'a' twice": b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {}}',
    "__metadata__ is not an object of strings": {"__metadata__": {"x": 1}},
}


@pytest.mark.parametrize("found", CORRUPT_HEADERS)
def test_corrupt_header_is_refused_and_named(tmp_path: Path, found: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", CORRUPT_HEADERS[found], bytes(16))
    with pytest.raises(CheckpointCorruptError) as caught:
        SafetensorsFile(path)
    assert found in str(caught.value)
    assert str(path) in caught.value.what


def test_any_truncation_is_refused(tmp_path: Path) -> None:
    save_numpy({"a": np.arange(6, dtype=np.float32), "b": np.arange(3, dtype=np.int8)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointCorruptError):
            SafetensorsFile(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointCorruptError, match="its last tensor ends at byte"):
        SafetensorsFile(path)


def test_truncated_tensor_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_numpy({"weight": np.zeros(100, np.float32)}, path)
    whole = path.stat().st_size
    os.truncate(path, whole - 40)
    with pytest.raises(
        CheckpointCorruptError, match=f"'weight' ends at byte {whole}, but the file ends at byte {whole - 40}"
    ):
        SafetensorsFile(path)


def test_truncation_after_opening_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """A mapping of a file that got shorter kills the process when touched; populating it first is an error."""
    save_numpy({"w": np.zeros(1 << 20, np.float32)}, tmp_path / "plain.safetensors")
    for offset in (0, 8):
        path = shift_data(tmp_path / "plain.safetensors", tmp_path / f"model{offset}.safetensors", offset)
        for is_mapped_before in (False, True):
            whole = path.read_bytes()
            with SafetensorsFile(path) as file:
                if is_mapped_before:
                    file.read("w")
                os.truncate(path, 1 << 20)
                with pytest.raises(CheckpointCorruptError, match=r"had 4194432 bytes|'w'"):
                    file.read("w")
            path.write_bytes(whole)


@pytest.mark.parametrize("length", [0, 1, 7, 99, 100_000_001, 2**63, 2**64 - 1])
def test_impossible_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    save_numpy({"a": np.zeros(2, np.float32)}, path)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(CheckpointCorruptError, match="header"):
        SafetensorsFile(path)


def test_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointCorruptError, match="git lfs pull"):
        SafetensorsFile(path)


def test_packed_dtypes_are_listed_but_not_read(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "model.safetensors", {"q": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, bytes(4)
    )
    file = SafetensorsFile(path)
    assert file.tensors["q"].num_bytes == 4
    with pytest.raises(UnsupportedOptionError, match="F4, 4 bits per value"):
        file.read("q")
