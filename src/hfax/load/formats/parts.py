"""The stored tensors that make up one quantized weight, and what readers of several formats do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from hfax.errors import CheckpointCorruptError, UnsupportedModelError
from hfax.load.formats.unpacking import powers_of_two
from hfax.load.packed import Encoding, PackedLayout, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

GROUPS = (128, 64, 32, 16)
"""Columns that share a scale where the format leaves it open (a scale of a whole row), in the order of preference."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def by_module(names: Iterable[str], endings: Iterable[str]) -> dict[str, dict[str, str]]:
    """The tensors with these endings by module: ending to name.

    Args:
        names: of all tensors.
        endings: last parts of names, such as "qweight"; they may contain dots.
    """
    found: dict[str, dict[str, str]] = {}
    suffixes = tuple(f".{ending}" for ending in endings)
    for name in names:
        for suffix in suffixes:
            if name.endswith(suffix):
                found.setdefault(name.removesuffix(suffix), {})[suffix[1:]] = name
    return found


def need(parts: Mapping[str, str], module: str, *endings: str) -> tuple[str, ...]:
    """The names of a module's tensors with these endings.

    Raises:
        CheckpointCorruptError: it lacks one.
    """
    for ending in endings:
        if ending not in parts:
            raise CheckpointCorruptError(
                f"The checkpoint has {', '.join(parts.values())}, but not {module}.{ending}.",
                "A quantized weight cannot be read without all of its parts.",
                "Download the checkpoint again, or save it again with the library that quantized it.",
            )
    return tuple(parts[ending] for ending in endings)


def misfit(name: str, what: str, expected: str) -> CheckpointCorruptError:
    """The error for a stored tensor that does not fit the format."""
    return CheckpointCorruptError(
        f"{name!r} {what}.",
        f"The checkpoint's quantization needs {expected}.",
        "Use the config.json that was saved with these weights, or download the checkpoint again.",
    )


def need_shape(store: TensorStore, name: str, *shapes: tuple[int, ...]) -> None:
    """Raise `CheckpointCorruptError` if a stored tensor has none of these shapes."""
    if (found := store.shape(name)) not in shapes:
        raise misfit(name, f"has shape {found}", f"shape {' or '.join(map(str, dict.fromkeys(shapes)))}")


def refused(what: str, why: str) -> UnsupportedModelError:
    """The error for a variant of a format that hfax does not read."""
    return UnsupportedModelError(
        what, why, "Use another quantization of the same model (docs/quantization.md), or the unquantized checkpoint."
    )


def width_of_groups(block: int, width: int) -> int:
    """Columns per scale for scales of `block` columns in rows of `width`: one that divides both, so that the last block of a
    row may be shorter than the others."""
    shared = width if block >= width else math.gcd(block, width)
    return next((group for group in GROUPS if shared % group == 0), shared)


def spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Scales of blocks as scales of groups within rows.

    Args:
        scale: [..., ⌈out / block[0]⌉, ⌈in / block[1]⌉].
        block: rows and columns that share a scale; the last ones of a matrix may be smaller.
        shape: of the weight, [..., out, in].

    Returns:
        [..., out, in / group], with the group of `width_of_groups`.
    """
    *_, rows, width = shape
    group = width_of_groups(block[1], width)
    if block[0] > 1:
        scale = scale.repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
    if min(block[1], width) != group:
        scale = scale.repeat_interleave(-(-min(block[1], width) // group), -1)[..., : width // group]
    return scale


_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def scale_bytes(store: TensorStore, name: str) -> int:
    """Bytes of a scale of this tensor as `as_scale` gives it."""
    return 2 if store.dtype(name) in (*_EXPONENTS, torch.float16, torch.bfloat16) else 4


def as_scale(tensor: torch.Tensor) -> torch.Tensor:
    """Scales as stored, in a dtype of `PackedTensor.scale`."""
    if tensor.dtype in _EXPONENTS:
        return powers_of_two(tensor).to(torch.bfloat16)  # exact
    return tensor if tensor.dtype in _FLOATS else tensor.float()


def block_of(
    store: TensorStore, name: str, shape: tuple[int, ...], given: Iterable[int] | None = None
) -> tuple[int, int]:
    """Rows and columns that share one of a tensor's scales: the config's if they give its shape, else what its shape gives.

    Args:
        store: the checkpoint's tensors.
        name: of the scales.
        shape: of the weight, [..., out, in].
        given: rows and columns in the config.

    Raises:
        CheckpointCorruptError: the scales do not fit the weight.
    """
    *lead, rows, width = shape
    grid = store.shape(name)
    if math.prod(grid) == math.prod(lead):
        return rows, width
    if grid == (*lead, rows):
        return 1, width
    if len(grid) == len(shape) and grid[:-2] == tuple(lead):
        if given is not None and grid[-2:] == tuple(
            -(-size // by) for size, by in zip((rows, width), given, strict=True)
        ):
            return tuple(given)  # pyright: ignore[reportReturnType]
        if rows % grid[-2] == 0 and width % grid[-1] == 0:
            return rows // grid[-2], width // grid[-1]
    expected = f"one scale for a weight of shape {shape}, one a row, or one for each block"
    raise misfit(name, f"has shape {grid}", expected + (f" of {list(given)}" if given else ""))


def as_grid(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales with as many axes as the weight: one for each matrix or each row gets axes of size 1."""
    *lead, rows, _ = shape
    if scale.numel() == math.prod(lead):
        return scale.reshape(*lead, 1, 1)
    return scale[..., None] if tuple(scale.shape) == (*lead, rows) else scale


def order_of(groups: torch.Tensor, size: int, name: str) -> torch.Tensor | None:
    """The order of columns in which each group's are together; None if they are already.

    Args:
        groups: [in], the group of each column (`g_idx`).
        size: columns in a group.
        name: of the tensor, for the error.

    Raises:
        CheckpointCorruptError: groups do not have this many columns.
    """
    if bool((groups == -1).all()):
        return None
    sorted_groups, columns = groups.long().sort(stable=True)
    if not torch.equal(sorted_groups, torch.arange(len(groups)) // size):
        raise misfit(name, "puts other numbers of columns into groups", f"{size} columns in each group")
    return None if torch.equal(columns, torch.arange(len(groups))) else columns


def packed_weight(
    parts: Iterable[str],
    encoding: Encoding,
    shape: tuple[int, ...],
    group: int,
    read: Callable[[], PackedTensor],
    *,
    scale_bytes: int,
    has_offset: bool = False,
) -> StoredWeight:
    """A weight that is read as codes.

    Args:
        parts: names of its tensors.
        encoding: of its codes.
        shape: of the weight.
        group: columns that share a scale.
        read: reads it.
        scale_bytes: of a scale.
        has_offset: whether it may have offsets, which are float32.
    """
    offset_bytes = 4 if has_offset else 0
    layout = PackedLayout(
        encoding=encoding, group=group, shape=shape, scale_bytes=scale_bytes, offset_bytes=offset_bytes
    )
    return StoredWeight(parts=tuple(parts), shape=shape, layout=layout, read=read)


def scaled_codes(
    *,
    parts: Iterable[str],
    encoding: Encoding,
    shape: tuple[int, ...],
    codes: Callable[[], torch.Tensor],
    scale: Callable[[], torch.Tensor],
    block: tuple[int, int],
    scale_bytes: int,
) -> StoredWeight:
    """A weight of codes times scales of blocks, without offsets.

    Args:
        parts: names of its tensors.
        encoding: of its codes.
        shape: of the weight.
        codes: reads the codes, as `PackedTensor` has them.
        scale: reads the scales, one for each block, in any shape of `as_grid`.
        block: rows and columns that share a scale.
        scale_bytes: of a scale as `as_scale` gives it.
    """

    def read() -> PackedTensor:
        spread_out = spread(as_grid(as_scale(scale()), shape), block, shape)
        return PackedTensor(encoding=encoding, codes=codes(), scale=spread_out)

    group = width_of_groups(block[1], shape[-1])
    return packed_weight(parts, encoding, shape, group, read, scale_bytes=scale_bytes)
