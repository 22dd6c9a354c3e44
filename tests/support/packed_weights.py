"""Weights as other libraries' checkpoints store them, with codes at random."""

import jax
import numpy as np
import torch

from hfax.kernels.quantized import QuantizedArray
from hfax.load.packed import PackedTensor
from hfax.load.quantize import pack

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
FORMATS = [
    ("int8", 16, "float16", False),
    ("int8", 32, "float16", False),
    ("int8", 64, "float32", True),
    ("int8", 512, "bfloat16", False),
    ("int4", 128, "float16", True),
    ("int4", 128, "bfloat16", False),
    ("int4", 64, "float32", False),
    ("int4", 32, "float32", True),
    ("int4", 32, "bfloat16", False),
    ("int4", 16, "bfloat16", True),
    ("int4", 256, "float16", False),
    ("fp4", 32, "bfloat16", False),
    ("fp4", 16, "float32", False),
    ("fp4", 128, "float16", True),
    ("fp4", 64, "bfloat16", False),
    ("fp8", 128, "float32", False),
    ("fp8", 128, "bfloat16", True),
    ("fp8", 32, "float16", False),
    ("fp8", 512, "float32", False),
]
"""Encoding, columns of a group, dtype of scales and offsets, and whether there are offsets."""


def packed_tensor(
    encoding: str,
    group: int,
    dtype: str,
    has_offset: bool,
    shape: tuple[int, ...] = (40, 512),
    *,
    permuted: bool = False,
) -> PackedTensor:
    """A weight with every code, and scales of every size that the dtype has."""
    rng = np.random.default_rng(0)
    if encoding == "fp8":
        numbers = rng.integers(0, 256, shape, dtype=np.uint8)
        codes = torch.from_numpy(np.where(numbers % 128 == 127, 0, numbers)).view(torch.float8_e4m3fn)
    elif encoding == "fp4":
        codes = torch.from_numpy(rng.integers(0, 16, shape, dtype=np.uint8))
    else:
        least = {"int8": -128, "int4": -8}[encoding]
        codes = torch.from_numpy(rng.integers(least, -least, shape, dtype=np.int8))
    of_groups = (*shape[:-1], shape[-1] // group)
    scale = rng.uniform(0.5, 1.0, of_groups) * 2.0 ** rng.integers(
        -18, 3, of_groups
    )  # float16 has 2^-18 below its normal numbers
    offset = torch.from_numpy(rng.standard_normal(of_groups)).to(getattr(torch, dtype)) if has_offset else None
    return PackedTensor(
        encoding=encoding,  # pyright: ignore[reportArgumentType]
        codes=codes,
        scale=torch.from_numpy(scale).to(getattr(torch, dtype)),
        offset=offset,
        columns=torch.from_numpy(rng.permutation(shape[-1])) if permuted else None,
    )


def packed_array(tensor: PackedTensor, dtype: torch.dtype = torch.float32) -> QuantizedArray:
    """The weight on a CPU device."""
    packed = pack(tensor, dtype, HERE)
    assert packed is not None
    return packed
