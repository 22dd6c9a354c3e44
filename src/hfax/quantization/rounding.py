"""Rounds the weights of linear layers to codes with scales: which ones, to how many bits, and how."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from hfax.errors import InvalidInputError
from hfax.kernels.encodings import Encoding, columns_of, padded_width, pays
from hfax.kernels.quantized import QuantizedArray
from hfax.load.codes import in_words
from hfax.quantization.gptq import choose_scale, gptq, round_to

Method = Literal["gptq", "awq", "rtn"]
_GROUPS = (128, 64, 32)
_FEWEST_ROWS = 32
"""Matrices with fewer, such as gates and routers, are left as they are: they are small, and much depends on them."""

_MOST_DAMPING = 10
_SHARED = 0.1
"""Share of all experts' mean moment that is added to each one's: few tokens of the data may have chosen it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """How matrices are rounded.

    Args:
        method: see `hfax.quantize`, as for the others.
        bits: of a weight: 4 or 8.
        group_size: columns that share a scale.
        damping: of GPTQ.

    Raises:
        InvalidInputError: one of them is out of range.
    """

    method: Method
    bits: int
    group_size: int
    damping: float

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise InvalidInputError(
                f"method={self.method!r} is not one of hfax's.",
                "It names an algorithm.",
                'Pass "gptq", "awq" or "rtn".',
            )
        if self.bits not in (4, 8) or self.group_size not in _GROUPS:
            raise InvalidInputError(
                f"bits={self.bits} with group_size={self.group_size} is not supported.",
                "Kernels multiply with codes of 4 and 8 bits, in groups of 32, 64 and 128 columns.",
                "Pass 4 or 8 bits, and one of these group sizes.",
            )
        if not 0 < self.damping < 1:
            raise InvalidInputError(f"damping={self.damping} is out of range.", "It is a share.", "Pass 0.01, say.")

    def kind_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Bits and group size of a matrix of this shape; None: it is not quantized.

        Rows that would take no less memory with 4 bits have 8, as by `quantization="int4"`; groups are smaller where rows do not
        divide into larger ones.
        """
        if shape[-2] < _FEWEST_ROWS:
            return None
        if (group := next((g for g in _GROUPS if g <= self.group_size and shape[-1] % g == 0), None)) is None:
            return None
        return (4 if self.bits == 4 and pays(shape[-1]) else 8), group

    def round(self, weight: jax.Array, moment: jax.Array | None) -> QuantizedArray:
        """A quantized matrix, [out, in], or stack of them, [n, out, in].

        Args:
            weight: to quantize.
            moment: of its inputs, [in, in], or of each matrix's, [n, in, in], see `LayerSteps.observe`; None: unknown, all columns
                are rounded alike.
        """
        if moment is not None and moment.ndim == 3:
            shared = _SHARED * moment.mean(axis=0)
            rounded = [self.round(matrix, own + shared) for matrix, own in zip(weight, moment, strict=True)]
            values, scale = (jnp.stack([getattr(each, field) for each in rounded]) for field in ("values", "scale"))
            return dataclasses.replace(rounded[0], values=values, scale=scale)
        kind = self.kind_of(weight.shape)
        assert kind is not None, f"a matrix of {weight.shape} is not quantized"
        bits, group = kind
        if moment is not None and self.method == "gptq":
            codes, scale = self._calibrated(weight.reshape(-1, weight.shape[-1]), moment, bits, group)
        else:
            matrix = weight.reshape(-1, weight.shape[-1])
            importance = jnp.ones(matrix.shape[-1], jnp.float32) if moment is None else jnp.diagonal(moment)
            scale = choose_scale(matrix, importance, bits=bits, group=group, dtype=weight.dtype)
            scales = jnp.repeat(scale.astype(jnp.float32), group, axis=-1)
            codes = round_to(matrix.astype(jnp.float32), scales, bits).astype(jnp.int8)
        *lead, width = weight.shape
        encoding: Encoding = "int8" if bits == 8 else "int4"
        columns = columns_of(width, encoding)
        values = codes if bits == 8 else jax.device_put(in_words(np.asarray(codes), encoding))
        scale = jnp.pad(scale.reshape(-1, width // group), ((0, 0), (0, (columns - width) // group)))
        return QuantizedArray(
            values=values.reshape(*lead, -1),
            scale=scale.reshape(*lead, -1),
            encoding=encoding,
            dtype=weight.dtype,
            width=padded_width(width, encoding),
        )

    def _calibrated(self, weight: jax.Array, moment: jax.Array, bits: int, group: int) -> tuple[jax.Array, jax.Array]:
        """Codes and scales by GPTQ, with ten times the damping as often as float32 needs it to invert the moment."""
        damping = self.damping
        while damping < _MOST_DAMPING:
            codes, scale, is_valid = gptq(
                weight, moment, bits=bits, group=group, damping=damping, scale_dtype=weight.dtype
            )
            if bool(is_valid):
                return codes, scale
            damping *= 10
        raise InvalidInputError(
            "The inputs of a linear layer have moments that cannot be inverted.",
            "With the calibration data, activations are not finite numbers.",
            'Check the checkpoint and its dtype (dtype="bfloat16" in place of float16), or use method="awq" or "rtn".',
        )
