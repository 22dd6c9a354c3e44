"""Reads a model's weights from a checkpoint as its record says, without the rules of its format or class."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hfax.kernels.quantized import QuantizedArray
from hfax.load.codes import to_codes
from hfax.load.host_arrays import aligned_empty
from hfax.load.placement import check_fits
from hfax.phases import meter

if TYPE_CHECKING:
    import jax

    from hfax.kernels.encodings import Encoding
    from hfax.load.codes import Quantization
    from hfax.sharding.layout import Layout
    from hfax.stored.reader import WeightReader

_CONVERTERS = 2
"""Number of weights converted concurrently; bounds the arrays held in host memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        file: index of its file in `CheckpointSource.weight_files`.
        name: its name in the file.
    """

    file: int
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Consecutive rows of a tensor of a checkpoint, all of its leading axes taken as one.

    Args:
        tensor: that they are of.
        begin: the first one.
        end: the one after the last.
    """

    tensor: StoredTensor
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """Where a weight is in a checkpoint, and what is done to it.

    Args:
        tensors: of a weight that is stored quantized: its tensors by field of `QuantizedArray`. Of one that is a tensor: that
            tensor, under "values". Else empty.
        rows: of a weight that is put together from others' rows: these, in its order.
        shape: of a weight that is put together.
        encoding: of the codes of a weight that is stored quantized.
        dtype: of its numbers, where they are not the tensor's own.
        quantization: what its numbers are quantized to; None: they are not.
        width: of a quantized weight, see `QuantizedArray`.
        is_transposed: of a quantized weight, see `QuantizedArray`.
    """

    tensors: Mapping[str, StoredTensor] = dataclasses.field(default_factory=dict)
    rows: tuple[StoredRows, ...] = ()
    shape: tuple[int, ...] = ()
    encoding: Encoding | None = None
    dtype: str = ""
    quantization: Quantization | None = None
    width: int | None = None
    is_transposed: bool = False

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> StoredWeight:
        """From the JSON values of `dataclasses.asdict`."""
        tensors = {field: StoredTensor(**tensor) for field, tensor in content.pop("tensors").items()}
        rows = tuple(StoredRows(tensor=StoredTensor(**r.pop("tensor")), **r) for r in content.pop("rows"))
        return cls(tensors=tensors, rows=rows, shape=tuple(content.pop("shape")), **content)


def read_weights(
    weights: Mapping[str, StoredWeight], num_bytes: int, reader: WeightReader, layout: Layout
) -> dict[str, jax.Array | QuantizedArray]:
    """The weights of a record, placed.

    Args:
        weights: by name.
        num_bytes: their size on the device.
        reader: reads the checkpoint's tensors.
        layout: where to.

    Raises:
        CheckpointCorruptError: a weight cannot be read.
        OutOfMemoryError: the weights do not fit the device.
    """
    check_fits(num_bytes, layout.device, "Loading the weights", "Use a smaller dtype (dtype='bfloat16').")
    loading = meter()
    loading.expect(num_bytes)
    placed: dict[str, Any] = {}

    def read(name: str) -> jax.Array | QuantizedArray:
        return _read(weights[name], name, reader, layout)

    with concurrent.futures.ThreadPoolExecutor(_CONVERTERS, thread_name_prefix="hfax-load") as pool:
        try:
            for name, weight in zip(weights, pool.map(read, weights), strict=True):
                placed[name] = weight
                loading.add(weight.nbytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return placed


def _read(weight: StoredWeight, name: str, reader: WeightReader, layout: Layout) -> jax.Array | QuantizedArray:
    where = layout.weight(name)
    if weight.encoding is not None:
        fields: Any = {f: layout.place(reader.read(t.file, t.name), where) for f, t in weight.tensors.items()}
        return _quantized(weight, fields, weight.encoding, weight.dtype)
    array = (
        _put_together(weight, reader) if weight.rows else reader.read(**dataclasses.asdict(weight.tensors["values"]))
    )
    if weight.dtype and array.dtype.name != weight.dtype:
        array, stored = aligned_empty(array.shape, jnp.dtype(weight.dtype)), array
        array[...] = stored
    if weight.quantization is None:
        return layout.place(array, where)
    found = to_codes(array.swapaxes(-1, -2) if weight.is_transposed else array, weight.quantization)
    assert found is not None  # or no quantization would be recorded
    values, scale = (layout.place(part, where) for part in found)
    encoding: Encoding = "int8" if values.dtype == jnp.int8 else "int4"
    return _quantized(weight, {"values": values, "scale": scale}, encoding, array.dtype)


def _quantized(weight: StoredWeight, fields: dict[str, jax.Array], encoding: Encoding, dtype: Any) -> QuantizedArray:
    of_matrix: Any = {"width": weight.width, "is_transposed": weight.is_transposed}
    return QuantizedArray(**fields, encoding=encoding, dtype=jnp.dtype(dtype), **of_matrix)


def _put_together(weight: StoredWeight, reader: WeightReader) -> np.ndarray:
    whole: np.ndarray | None = None
    read: dict[StoredTensor, np.ndarray] = {}
    done = 0
    for rows in weight.rows:
        if rows.tensor not in read:
            read = {rows.tensor: reader.read(rows.tensor.file, rows.tensor.name)}
        part = read[rows.tensor]
        if whole is None:
            whole = aligned_empty(weight.shape, jnp.dtype(weight.dtype) if weight.dtype else part.dtype)
        end = done + rows.end - rows.begin
        whole.reshape(-1, weight.shape[-1])[done:end] = part.reshape(-1, weight.shape[-1])[rows.begin : rows.end]
        done = end
    assert whole is not None
    return whole
