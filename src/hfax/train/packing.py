"""Checks whether a model isolates packed sequences."""

from __future__ import annotations

import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.errors import UnsupportedOptionError

_LENGTHS = (5, 7)
_TOLERANCE = 2e-2


def check_packing(model: JaxModel) -> None:
    """Compare the second of two packed sequences with the same sequence alone.

    Raises:
        UnsupportedOptionError: a sequence affects the outputs of the next one, so losses of packed rows would be wrong.
    """
    vocabulary = model.vocabulary_size or 2
    ids = [(np.arange(n, dtype=np.int32)[None] * 7 + 3 + n) % vocabulary for n in _LENGTHS]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in _LENGTHS])[None]
    alone = np.asarray(model(input_ids=ids[1], use_cache=False).logits, np.float32)[0]
    try:
        packed = model(input_ids=np.concatenate(ids, axis=1), position_ids=positions, use_cache=False).logits
    except TypeError as error:
        raise _mixed(model, str(error)) from error
    found = np.asarray(packed, np.float32)[0, _LENGTHS[0] :]
    difference = float(np.abs(found - alone).max() / max(float(np.abs(alone).max()), 1e-6))
    if not difference < _TOLERANCE:
        raise _mixed(model, f"After another sequence its logits differ by {difference:.0%} of their scale.")


def _mixed(model: JaxModel, why: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{type(model).__name__} does not support packed rows: it does not isolate packed sequences.",
        why,
        "Train without packing.",
    )
