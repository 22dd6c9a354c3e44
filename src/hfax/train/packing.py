"""Checks whether a model isolates packed sequences.

A loss of packed rows is right if no output of a sequence depends on another sequence. That is read off derivatives, which are
exactly zero where attention is masked and, however small the weights, not zero where a convolution or a state carries something
over.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.kernels.target import compiling_for
from hfax.synthetic.fields import special_ids

_LENGTHS = (5, 7)
_TOLERANCE = 2e-2
_LIFT = 0.02
"""Stands for weights that are all zero, through which nothing flows yet."""


def check_packing(model: JaxModel) -> None:
    """Raise unless packed sequences are isolated from each other, and the second has the outputs that it has alone.

    Raises:
        UnsupportedOptionError: a sequence affects the outputs of another one, so losses of packed rows would be wrong.
    """
    ids = _distinct_ids(model)
    try:
        _check_independence(model, ids)
    except (TypeError, InvalidInputError) as error:
        raise _mixed(model, f"It takes no position_ids: {str(error).splitlines()[0]}") from error
    alone = np.asarray(model(input_ids=ids[1][None], use_cache=False).logits, np.float32)[0]
    packed = model(input_ids=np.concatenate(ids)[None], position_ids=_positions(), use_cache=False).logits
    found = np.asarray(packed, np.float32)[0, _LENGTHS[0] :]
    difference = float(np.abs(found - alone).max() / max(float(np.abs(alone).max()), 1e-6))
    if not difference < _TOLERANCE:
        raise _mixed(model, f"After another sequence its logits differ by {difference:.0%} of their scale.")


def _distinct_ids(model: JaxModel) -> list[np.ndarray]:
    """Two sequences without a common id, and without special ones."""
    special = special_ids(model.config)
    usable = [i for i in range(min(model.vocabulary_size or 0, 4096)) if i not in special][: sum(_LENGTHS)]
    if len(usable) < sum(_LENGTHS):
        raise _mixed(model, f"Its vocabulary of {model.vocabulary_size} ids is too small to tell.")
    return np.split(np.array(usable, np.int32), [_LENGTHS[0]])


def _positions() -> np.ndarray:
    return np.concatenate([np.arange(n, dtype=np.int32) for n in _LENGTHS])[None]


def _check_independence(model: JaxModel, ids: list[np.ndarray]) -> None:
    """Raise if outputs of one sequence have a derivative with respect to embeddings of the other's ids."""
    derivatives = _derivatives(model, ids)
    for own, (first, second) in enumerate(((0, 1), (1, 0))):
        if not _is_there(derivatives[own][ids[first]]):
            raise _mixed(
                model, "Its outputs have no derivative with respect to its own embeddings, so nothing is known."
            )
        if _is_there(derivatives[own][ids[second]]):
            raise _mixed(model, f"Outputs of packed sequence {own + 1} depend on sequence {second + 1}.")


def _is_there(derivative: np.ndarray) -> bool:
    return bool((derivative != 0).any())


def _derivatives(model: JaxModel, ids: list[np.ndarray]) -> list[np.ndarray]:
    """For each sequence, derivatives of a random sum of its logits with respect to the embedding table, [vocab, width] float32.

    Logits of the other sequence's ids are left out: where the head is tied, the table is their weights.
    """
    name = _table(model)
    inputs = {"input_ids": np.concatenate(ids)[None], "position_ids": _positions()}

    def total(table: jax.Array, weights: Any, inputs: Any, places: jax.Array, left_out: jax.Array) -> jax.Array:
        logits = model.apply({**weights, name: table}, **inputs, use_cache=False).logits
        factors = jax.random.normal(jax.random.key(0), logits.shape).at[..., left_out].set(0.0)
        return (logits.astype(jnp.float32) * factors * places[None, :, None]).sum()

    def derive(weights: Any, *others: Any) -> jax.Array:
        return jax.grad(total)(weights[name], weights, *others).astype(jnp.float32)

    layout = model.parts.layout
    weights = {**model.buffers, **{n: _lifted(a) for n, a in model.params.items()}}
    if isinstance(table := weights[name], QuantizedArray):
        weights[name] = table.dequantize()
    owner = np.repeat(np.arange(2), _LENGTHS)
    with compiling_for(layout.device, mesh=layout.mesh, pages=False, is_differentiated=True):
        run = jax.jit(derive)
        return [np.asarray(run(weights, inputs, owner == own, ids[1 - own])) for own in range(2)]


def _table(model: JaxModel) -> str:
    """The name of the embedding table's weight."""
    table = model.module.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    path = next(path for path, part in model.module.named_modules() if part is table)
    return model.parts.tied.get(f"{path}.weight", f"{path}.weight")


def _lifted(weight: Any) -> Any:
    if isinstance(weight, QuantizedArray) or not jnp.issubdtype(weight.dtype, jnp.floating) or bool(weight.any()):
        return weight
    return jnp.full_like(weight, _LIFT)


def _mixed(model: JaxModel, why: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{type(model).__name__} does not support packed rows: it does not isolate packed sequences.",
        why,
        "Train without packing.",
    )
