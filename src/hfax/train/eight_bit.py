"""Optimizer moments in 8 bits between updates, which compute in float32.

The numbers are those of the dynamic data type of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021,
https://arxiv.org/abs/2110.02861), which bitsandbytes uses: 127 or 254 magnitudes over seven decades, times the largest magnitude of
a block. Two things differ from bitsandbytes. A block is a part of a matrix's column, so that it is made of whole tiles of a TPU. A
second moment that is not zero never becomes zero, since the update is divided by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hfax.kernels import target

_BLOCK = 256
"""Most elements that share a scale, as in bitsandbytes."""
_SMALLEST_BLOCK = 16
_FEWEST_ELEMENTS = 4096
"""Smaller weights keep float32 moments, as in bitsandbytes."""
_NOT_NEGATIVE = ("nu",)
"""Fields of optax's states whose arrays have no sign."""
_LARGE = 1 << 24
"""Elements of weights that one TPU updates in parts."""
_DECADES = 7
_SIGN = 128
_FIRST_DECADE = -7


class EightBitMoment(NamedTuple):
    """A moment of one weight.

    Args:
        codes: uint8, of the weight's shape.
        scales: float32, the largest magnitude of each block: of the weight's shape, with blocks in the last axis but one.
    """

    codes: jax.Array
    scales: jax.Array


def with_eight_bit_moments(
    transformation: optax.GradientTransformation, keeps_float32: Callable[[str], bool]
) -> optax.GradientTransformation:
    """The transformation with moments in 8 bits between its updates.

    Args:
        transformation: one of optax whose state is a named tuple of moments, which begin with zeros, such as
            `optax.scale_by_adam()`; parameters are dicts by name. The float32 moments of all weights would be in memory at once,
            unless the update goes through `hfax.train.updates.ByWeight`.
        keeps_float32: whether the moments of a weight of this name stay as they are. Those of small weights do in any case, and
            those of weights whose last axis but one has no blocks of at least 16 elements, a power of two.
    """

    def is_coded(name: str, array: jax.Array) -> bool:
        return not keeps_float32(name) and array.size >= _FEWEST_ELEMENTS and block_of(array.shape) >= _SMALLEST_BLOCK

    def zeros(name: str, array: jax.Array) -> Any:
        """Made as they are stored: XLA would fold the codes of constants while it compiles, for minutes."""
        if not is_coded(name, array):
            return array
        *lead, rows, columns = array.shape
        scales = (*lead, rows // block_of(array.shape), columns)
        return EightBitMoment(jnp.zeros(array.shape, jnp.uint8), jnp.zeros(scales, jnp.float32))

    def init(params: Any) -> Any:
        state: Any = transformation.init(params)
        fields = {f: {n: zeros(n, a) for n, a in arrays.items()} for f, arrays in _moments(state).items()}
        return state._replace(**fields)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        found: dict[str, jax.Array] = {}
        fields: dict[str, dict[str, Any]] = {field: {} for field in _moments(state)}
        others = state
        for name, gradient in updates.items():
            own = {field: arrays[name] for field, arrays in _moments(state).items()}
            if is_coded(name, gradient):
                found[name], own, others = _in_blocks_of(gradient, own, functools.partial(updated, state))
            else:
                found[name], own, others = updated(state, gradient, own)
            for field, array in own.items():
                fields[field][name] = array
        return found, others._replace(**fields)

    def updated(state: Any, gradient: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any], Any]:
        """The update of one weight, its moments, and the state, in which other fields than those are new."""
        of_one = state._replace(**{field: {"": array} for field, array in own.items()})
        result: Any = transformation.update({"": gradient}, of_one)
        found, new = result
        return found[""], {field: arrays[""] for field, arrays in _moments(new).items()}, new

    return optax.GradientTransformation(init, update)


def _moments(state: Any) -> dict[str, dict[str, Any]]:
    """The fields of a state of optax that have an array for each weight."""
    return {field: value for field, value in state._asdict().items() if isinstance(value, dict)}


def _in_blocks_of(
    gradient: jax.Array, own: dict[str, EightBitMoment], updated: Any
) -> tuple[jax.Array, dict[str, Any], Any]:
    """`updated` of a weight whose moments have codes.

    Of a large weight on one TPU, one block after the other: XLA writes out the scales, repeated for each element, and what is
    computed on the way, six arrays of the weight's size in float32.
    """

    def of_blocks(given: Any) -> Any:
        gradient, moments = given
        numbers = {field: decode(moment, has_sign=field not in _NOT_NEGATIVE) for field, moment in moments.items()}
        found, new, others = updated(gradient, numbers)
        coded = {field: encode(array, has_sign=field not in _NOT_NEGATIVE) for field, array in new.items()}
        return found, coded, others._replace(**dict.fromkeys(new))

    shape = gradient.shape
    blocks = gradient.reshape(-1, block_of(shape), shape[-1])
    moments = {
        f: EightBitMoment(m.codes.reshape(blocks.shape), m.scales.reshape(-1, shape[-1])) for f, m in own.items()
    }
    if target.is_for("tpu") and target.is_one_device() and gradient.size > _LARGE:
        found, coded, others = jax.lax.map(of_blocks, (blocks, moments))
        others = jax.tree.map(lambda each: each[0], others)
    else:
        found, coded, others = of_blocks((blocks, moments))
    new = {f: EightBitMoment(m.codes.reshape(shape), m.scales.reshape(own[f].scales.shape)) for f, m in coded.items()}
    return found.reshape(shape), new, others


def block_of(shape: tuple[int, ...]) -> int:
    """Elements in a block: the largest power of two, at most 256, that divides the last axis but one."""
    rows = shape[-2] if len(shape) >= 2 else 0
    return min(_BLOCK, rows & -rows)


def encode(blocks: jax.Array, *, has_sign: bool) -> EightBitMoment:
    """The nearest numbers of the data type.

    Args:
        blocks: float32, [..., rows of a block, columns].
        has_sign: whether elements may be negative. If not, they have twice as many magnitudes, and only zero becomes zero.
    """
    scales = jnp.abs(blocks).max(-2)
    # a block of zeros has no scale
    relative = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1)[..., None, :]
    decade: Any = sum((relative >= _lowest(each, has_sign)).astype(jnp.int32) for each in range(1, _DECADES))
    cells = jnp.left_shift(2 - has_sign, decade)
    place = (relative / _ten_to(decade) - 0.1) / 0.9 * cells
    codes = cells + jnp.clip(place.astype(jnp.int32), 0, cells - 1)
    if has_sign:
        codes = jnp.where(relative < _lowest(0, True), 0, codes)
        is_one = (blocks > 0) & (relative >= _lowest_of_one(True))
        codes = jnp.where(blocks < 0, codes + _SIGN, codes)
        # there is no negative zero: its code is that of one
        codes = jnp.where(is_one, _SIGN, jnp.where(codes == _SIGN, 0, codes))
    else:
        codes = jnp.where(relative >= _lowest_of_one(False), 1, jnp.where(blocks > 0, codes, 0))
    return EightBitMoment(codes.astype(jnp.uint8), scales)


def decode(moment: EightBitMoment, *, has_sign: bool) -> jax.Array:
    """The numbers of a moment in blocks, float32, see `encode`."""
    codes = moment.codes.astype(jnp.int32)
    magnitude = codes & (_SIGN - 1) if has_sign else codes
    cells = jnp.where(magnitude > 0, magnitude, 1)
    number = cells.astype(jnp.float32)
    # the power of two in it is the number of cells of its decade
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(number, jnp.int32) & 0x7F800000, jnp.float32)
    first = 1 if has_sign else 2
    decade: Any = sum((cells >= (first << each)).astype(jnp.int32) for each in range(1, _DECADES))
    value = _ten_to(decade) * (0.1 + 0.9 * ((number + 0.5) / power - 1))
    value = jnp.where(magnitude == 0, 0, value)
    if has_sign:
        value = jnp.where(codes == _SIGN, 1, jnp.where(codes > _SIGN, -value, value))
    else:
        value = jnp.where(codes == 1, 1, value)
    return value * moment.scales[..., None, :]


def _lowest(decade: int, has_sign: bool) -> float:
    """The lowest magnitude whose nearest number is in this decade."""
    if decade == 0:
        return 10.0**_FIRST_DECADE * (1 + 9 * 0.5 / (2 - has_sign)) / 2
    begin = 10.0 ** (_FIRST_DECADE + decade)
    return begin + 0.9 * begin / ((2 - has_sign) << (decade - 1))


def _lowest_of_one(has_sign: bool) -> float:
    """The lowest magnitude that is nearer to 1 than to the number below."""
    return 1 - 0.9 * 0.25 / ((2 - has_sign) << (_DECADES - 1))


def _ten_to(decade: jax.Array) -> jax.Array:
    """The end of a decade: 1e-6 of the first, 1 of the last."""
    found: Any = 1.0
    for each in reversed(range(_DECADES - 1)):
        found = jnp.where(decade <= each, 10.0 ** (_FIRST_DECADE + 1 + each), found)
    return found
