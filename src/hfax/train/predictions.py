"""Collects the logits and labels of an evaluation for `compute_metrics`, as transformers' Trainer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.losses import Apply

if TYPE_CHECKING:
    from transformers import EvalPrediction

ComputeMetrics = Callable[["EvalPrediction"], Mapping[str, float]]


class Predictor:
    """What `compute_metrics` is given.

    Args:
        compute_metrics: takes transformers' `EvalPrediction` with numpy arrays, and returns metrics by name.
        preprocess_logits: maps logits and labels, JAX arrays in the compiled program, to what is kept of them; None: all logits.
    """

    def __init__(self, compute_metrics: ComputeMetrics, preprocess_logits: Callable[[Any, Any], Any] | None) -> None:
        self._compute, self._preprocess = compute_metrics, preprocess_logits

    def outputs(self, apply: Apply, batch: Mapping[str, Any]) -> Any:
        """Logits of a batch, or what is kept of them.

        Raises:
            InvalidInputError: the batch has no labels.
        """
        if "labels" not in batch:
            raise InvalidInputError(
                "compute_metrics needs labels.",
                f"The batch has {', '.join(sorted(batch))}.",
                'Add "labels" to the rows of the evaluation data.',
            )
        inputs = {"use_cache": False, **batch} if "input_ids" in batch else dict(batch)
        logits = apply(**inputs).logits
        kept = logits if self._preprocess is None else self._preprocess(logits, batch["labels"])
        return kept.astype(jnp.float32) if kept.dtype == jnp.bfloat16 else kept

    def metrics(self, predictions: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, float]:
        """Metrics of all batches, with "eval_" before their names.

        Args:
            predictions: kept outputs of each batch, [rows, …].
            labels: labels of each batch, [rows, …]; both are padded to the longest with -100.
        """
        from transformers import EvalPrediction  # its module imports torch_xla, if that is installed

        found = self._compute(EvalPrediction(predictions=_joined(predictions), label_ids=_joined(labels)))
        return {name if name.startswith("eval_") else f"eval_{name}": float(value) for name, value in found.items()}


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    length = max(array.shape[1] for array in arrays)
    widths = [[(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)] for array in arrays]
    return np.concatenate([np.pad(a, width, constant_values=IGNORED) for a, width in zip(arrays, widths, strict=True)])
