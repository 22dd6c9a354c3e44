"""GGUF files: blocks against gguf-py's and transformers' own readers, and files that are damaged or made to do damage."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from hfax.errors import CheckpointCorruptError
from hfax.load.gguf import blocks
from hfax.load.gguf.file import TYPES, GgufFile

WRITTEN = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4)
READ = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS)
HALVES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}  # fmt: skip
"""Where random blocks get float16 scales that are numbers."""


def rows_of(kind: Type) -> np.ndarray:
    """[4, bytes] uint8, 512 values in a row: quantized by gguf-py, or random blocks where it only reads."""
    generator = np.random.default_rng(int(kind))
    if kind in WRITTEN:
        return gguf.quantize(generator.normal(size=(4, 512)).astype(np.float32), kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    found = generator.integers(0, 256, (4, 512 // values, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = generator.uniform(-1, 1, found.shape[:2]).astype(np.float16)
        found[..., at : at + 2] = scale[..., None].view(np.uint8)
    return found.reshape(4, -1)


@pytest.mark.parametrize("kind", [*WRITTEN, *READ], ids=lambda kind: kind.name)
def test_a_type_is_dequantized_bit_for_bit(kind: Type) -> None:
    """The sizes of blocks and the order of bits are ggml's; gguf-py computes in float32 in the same order."""
    rows = rows_of(kind)
    expected = gguf.dequantize(rows, kind)
    found = blocks.dequantize(int(kind), torch.from_numpy(rows.copy())).numpy()
    assert TYPES[int(kind)] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [*WRITTEN, *READ], ids=lambda kind: kind.name)
def test_codes_stand_for_the_same_numbers(kind: Type) -> None:
    """Unsigned codes become signed ones, whose offset is rounded once in float32."""
    rows = rows_of(kind)
    expected = gguf.dequantize(rows, kind)
    packed = blocks.pack(int(kind), torch.from_numpy(rows.copy()))
    assert packed.layout == blocks.layout_of(int(kind), (4, 512))
    found = packed.dequantize().numpy()
    if packed.offset is None or kind in (Type.Q4_1, Type.Q5_1):
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# ---------------------------------------------------------------------------------------------------------- damaged files


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def gguf_bytes(
    entries: list[bytes], tensors: list[bytes], data: bytes = b"", *, num_entries: int | None = None,
    num_tensors: int | None = None, version: int = 3, alignment: int = 32,
) -> bytes:  # fmt: skip
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = header + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


GOOD = gguf_bytes(
    [entry("general.architecture", 8, string("llama")), entry("numbers", 9, struct.pack("<IQ2f", 6, 2, 1.0, 2.0)),
     entry("tokens", 9, struct.pack("<IQ", 8, 2) + string("a") + string("b"))],
    [tensor("one", (2, 32), 2, 0), tensor("two", (4,), 0, 64)],
    bytes(64 + 16),
)  # fmt: skip


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    file = GgufFile(path)
    assert file.metadata["tokens"] == ["a", "b"]
    assert file.metadata["numbers"].tolist() == [1.0, 2.0]
    assert {name: (info.type_name, info.shape) for name, info in file.tensors.items()} == {
        "one": ("Q4_0", (2, 32)),
        "two": ("F32", (4,)),
    }


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for size in range(len(GOOD)):
        path.write_bytes(GOOD[:size])
        with pytest.raises(CheckpointCorruptError, match=r"model\.gguf"):
            GgufFile(path)


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    file = GgufFile(path)
    path.write_bytes(GOOD[:-1])
    with pytest.raises(CheckpointCorruptError, match="become shorter"):
        file.read_rows("two", 0, 1)


HUGE = 1 << 60
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "tensors": (lambda: gguf_bytes([], [], num_tensors=HUGE), "tensors, which do not fit"),
    "entries": (lambda: gguf_bytes([], [], num_entries=HUGE), "metadata entries, which do not fit"),
    "a million entries": (
        lambda: gguf_bytes([entry(f"{i:07}", 7, b"\1") for i in range(1_000_000)], []),
        "1000000 metadata entries",
    ),
    "a string without an end": (lambda: gguf_bytes([struct.pack("<Q", HUGE)], [], bytes(64)), "a metadata key"),
    "a length that overflows": (
        lambda: gguf_bytes([entry("k", 8, struct.pack("<Q", (1 << 64) - 1))], [], bytes(64)),
        "needs 18446744073709551615 bytes",
    ),
    "an array without an end": (
        lambda: gguf_bytes([entry("k", 9, struct.pack("<IQ", 6, HUGE))], [], bytes(64)),
        "numbers in the metadata 'k'",
    ),
    "strings without an end": (
        lambda: gguf_bytes([entry("k", 9, struct.pack("<IQ", 8, HUGE))], [], bytes(64)),
        "strings in the metadata 'k'",
    ),
    "arrays 1,000 deep": (
        lambda: gguf_bytes([entry("k", 9, struct.pack("<IQ", 9, 1) * 1000)], [], bytes(64)),
        "an array of type 9",
    ),
    "not text": (lambda: gguf_bytes([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []), "is not text"),
    "an unknown kind of metadata": (lambda: gguf_bytes([entry("k", 77, b"")], [], bytes(64)), "unknown type 77"),
    "a key twice": (lambda: gguf_bytes([entry("k", 7, b"\1")] * 2, []), "'k' twice"),
    "an unknown type": (lambda: gguf_bytes([], [tensor("t", (32,), 99, 0)], bytes(64)), "type 99"),
    "no dimensions": (lambda: gguf_bytes([], [tensor("t", (), 0, 0)], bytes(64)), "0 dimensions"),
    "many dimensions": (lambda: gguf_bytes([], [tensor("t", (1,) * 9, 0, 0)], bytes(64)), "9 dimensions"),
    "a huge tensor": (lambda: gguf_bytes([], [tensor("t", (HUGE, HUGE), 0, 0)], bytes(64)), "ends at byte"),
    "rows that are no blocks": (lambda: gguf_bytes([], [tensor("t", (31,), 2, 0)], bytes(64)), "not blocks of 32"),
    "an empty tensor": (lambda: gguf_bytes([], [tensor("t", (0,), 0, 0)], bytes(64)), "shape"),
    "outside of the file": (lambda: gguf_bytes([], [tensor("t", (8,), 0, 1 << 40)], bytes(64)), "ends at byte"),
    "overlap": (
        lambda: gguf_bytes([], [tensor("a", (16,), 0, 0), tensor("b", (16,), 0, 32)], bytes(128)),
        "'a' and 'b' overlap",
    ),
    "one name twice": (
        lambda: gguf_bytes([], [tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)], bytes(128)),
        "one name",
    ),
    "between two aligned places": (lambda: gguf_bytes([], [tensor("t", (8,), 0, 8)], bytes(64)), "multiple of the"),
    "a wrong alignment": (
        lambda: gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 48))], [], bytes(64)),
        "not a power of two",
    ),
    "big-endian": (lambda: gguf_bytes([], [], version=3 << 24), "big-endian"),
    "the first version": (lambda: gguf_bytes([], [], version=1), "its version is 1"),
    "another format": (lambda: b"PK\3\4" + bytes(100), 'does not begin with "GGUF"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_without_taking_memory(tmp_path: Path, name: str) -> None:
    make, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError, match=message):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
