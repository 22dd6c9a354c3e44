"""Plain transformers as the reference of a verification: its outputs, and which differences from them are rounding.

The reference is transformers' own class with the weights and dtype of the verified model, run by torch on the CPU. What its dtype
rounds shows against a copy in the next wider dtype. Does not know hfax's programs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hfax.backends.jax.model import JaxModel
from hfax.errors import UnsupportedModelError
from hfax.tracing.torchax import is_tensor

TOLERANCE = 1e-4
"""Relative to an output's largest value: float32 sums in a different order."""
_ROUNDING = 4.0
"""A difference up to this multiple of the reference's own error (against the next wider dtype) counts as rounding."""
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_CACHES = ("cache", "past_key_values", "mems", "state")

Inputs = Mapping[str, torch.Tensor]


class Reference:
    """The plain transformers model, and a lazily created copy in the next wider dtype."""

    def __init__(self, model: JaxModel) -> None:
        cls: Any = type(model.module)
        try:
            self.plain = cls.from_pretrained(model.folder, dtype=model.dtype).eval()
        except Exception as error:
            raise UnsupportedModelError(
                f"Plain transformers cannot load {cls.__name__} from {model.folder}.",
                f"{type(error).__name__}: {error}",
                "Run hfax doctor MODEL --check to compare a small copy instead.",
            ) from error
        self.plain.generation_config = model.generation_config

    @functools.cached_property
    def wider(self) -> torch.nn.Module:
        """The same weights in the next wider dtype."""
        return copy.deepcopy(self.plain).to(_WIDER[self.plain.dtype])


def run_plain(plain: Any, inputs: Inputs) -> list[torch.Tensor]:
    """The output tensors of a forward pass of torch."""
    with torch.no_grad():
        return output_tensors(plain(**{n: as_dtype(v, plain.dtype) for n, v in inputs.items()}))


def relative_error(mine: Any, theirs: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """The largest difference relative to the reference's largest value; infinite if shapes or infinities differ.

    Args:
        mine: a tensor or an array.
        theirs: the reference.
        mask: [batch, length] bool, positions to compare; None: all.
    """
    mine = mine if isinstance(mine, torch.Tensor) else torch.from_numpy(np.array(mine, np.float64))
    if tuple(mine.shape) != tuple(theirs.shape):
        return float("inf")
    if mask is not None:
        mine, theirs = mine[mask], theirs[mask]
    mine, theirs = mine.double(), theirs.double()
    finite = torch.isfinite(theirs)
    if not bool((torch.isfinite(mine) == finite).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = max(float(theirs[finite].abs().max()), 1e-30)
    return float((mine - theirs)[finite].abs().max()) / scale


def is_rounding(error: float, rounding: float | None) -> bool:
    """Whether a relative error is rounding.

    Args:
        error: the error.
        rounding: the reference's own error against the next wider dtype; None: not computed.
    """
    return error <= TOLERANCE or (rounding is not None and error <= _ROUNDING * rounding)


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Copies of a result's tensors, without caches."""
    if isinstance(output, torch.Tensor) or is_tensor(output):
        return [output.clone()]
    if isinstance(output, Mapping):
        output = [v for n, v in output.items() if n not in (*_CACHES, "loss")]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in output_tensors(value)]
    return []


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in another dtype; anything else unchanged."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
