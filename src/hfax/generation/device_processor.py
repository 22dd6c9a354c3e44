"""A caller's logits processor as a function of JAX arrays, which runs inside the decoding program.

Turns the padded buffer of a program into what such a function reads. It does not know options and hosts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.logits_processors import DecodeStep

ScoresFunction = Callable[[jax.Array, jax.Array], jax.Array]
"""From `input_ids` [batch, capacity] int32 and `scores` [batch, vocab] float32 to scores of the same shape."""


@dataclasses.dataclass(frozen=True)
class DeviceProcessor:
    """A logits processor that is traced into the decoding program.

    Args:
        function: takes and returns arrays, and has no effects.
        key: what the function computes, for the key of its program; "" before `keyed`.
    """

    function: ScoresFunction = dataclasses.field(compare=False, repr=False)
    key: str = ""

    def keyed(self, batch: int, capacity: int, vocab_size: int) -> DeviceProcessor:
        """The processor with a key for arrays of these sizes.

        Raises:
            InvalidInputError: the function cannot be traced, or returns another shape.
        """
        ids = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
        scores = jax.ShapeDtypeStruct((batch, vocab_size), jnp.float32)
        try:
            traced, returned = jax.make_jaxpr(self.function, return_shape=True)(ids, scores)
        except (TypeError, ValueError, IndexError, AttributeError, jax.errors.JAXTypeError) as error:
            raise InvalidInputError(
                f"The device processor {self._name} cannot be traced.",
                str(error).split("\n")[0],
                "Write it with jax.numpy and without Python conditions on values; or pass it unwrapped, to run on the host.",
            ) from error
        if getattr(returned, "shape", None) != scores.shape:
            raise InvalidInputError(
                f"The device processor {self._name} returns {returned}.",
                f"A processor returns scores of the shape that it gets, here {scores.shape}.",
                "Return the new scores.",
            )
        digest = hashlib.sha256(str(traced.jaxpr).encode())
        for constant in traced.consts:
            digest.update(np.asarray(constant).tobytes())
        return dataclasses.replace(self, key=digest.hexdigest())

    def apply(self, scores: jax.Array, at: DecodeStep) -> jax.Array:
        """The processed scores at a step of a program."""
        shift = at.tokens.shape[1] - at.end
        is_text = jnp.arange(at.tokens.shape[1])[None] >= (at.state["first"] + shift)[:, None]
        return self(jnp.where(is_text, jnp.roll(at.tokens, shift, axis=1), -1), scores)

    def __call__(self, input_ids: jax.Array, scores: jax.Array) -> jax.Array:
        """The function's scores, as float32."""
        return self.function(input_ids, scores).astype(jnp.float32)

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def device_processor(function: ScoresFunction) -> Any:
    """Mark a function of JAX arrays as a logits processor that runs inside the decoding program, without waiting for the host.

    Args:
        function: `(input_ids, scores) -> scores`. `input_ids`: [batch, capacity] int32, the text so far, prompt included, moved to
            the right: the last token is `input_ids[:, -1]`, and columns before the first token are -1. `scores`: [batch, vocab]
            float32. It is traced once for each size, so it must not depend on anything that changes, and sees neither the
            length as a number nor torch tensors.

    Returns:
        An object for `generate(logits_processor=[...])` of the backend `jax`.

    Examples:
        >>> import jax.numpy as jnp
        >>> @hfax.device_processor
        ... def no_doubles(input_ids, scores):
        ...     return jnp.where(jnp.arange(scores.shape[1])[None] == input_ids[:, -1:], -jnp.inf, scores)
        >>> out = model.generate(ids, max_new_tokens=4, logits_processor=[no_doubles])
    """
    return DeviceProcessor(function)
