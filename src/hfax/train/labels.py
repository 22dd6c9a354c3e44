"""What labels mean to a model's own loss: which are possible, which are ignored, and over how many the loss is a mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers.loss.loss_utils import ForCausalLMLoss

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED

_CLASSIFIERS = ("SequenceClassification", "TokenClassification", "ImageClassification", "AudioClassification")
_CLASSIFIERS += ("VideoClassification", "SemanticSegmentation")
"""Endings of the names of classes whose labels are below `config.num_labels`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a model's own loss.

    Args:
        ignored: the value that does not count.
        num_classes: exclusive bound of the others; None: unknown, or labels are no classes.
        bound: what has `num_classes` values, for errors.
        is_shifted: the label of a sequence's first token does not count.
        is_of_rows: labels of a row are its target together (CTC), and losses are of rows.
    """

    ignored: int = IGNORED
    num_classes: int | None = None
    bound: str = "vocabulary has ids"
    is_shifted: bool = False
    is_of_rows: bool = False

    def count(self, batch: Mapping[str, Any]) -> jax.Array:
        """The number of labels over which the loss of a batch is the mean; rows for other targets, 1 for a batch without labels."""
        labels = batch.get("labels")
        if labels is None or self.is_of_rows or not jnp.issubdtype(labels.dtype, jnp.integer):
            return jnp.float32(1 if labels is None else labels.shape[0])
        return self._is_counted(labels).sum(dtype=jnp.float32)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise for labels that are not classes of the model, which XLA would not notice.

        Args:
            batch: prepared inputs, arrays on the host or on a device, from which labels are copied. Abstract arrays and those that
                span processes are not checked.

        Raises:
            InvalidInputError: names the row, the value and the number of classes.
        """
        found = _read(batch.get("labels"))
        if self.num_classes is None or found is None:
            return
        is_wrong = (found != self.ignored) & ((found < 0) | (found >= self.num_classes))
        if is_wrong.any():
            place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
            raise InvalidInputError(
                f"labels has the value {found[place]} in row {place[0]}; the model's {self.bound} 0 to {self.num_classes - 1}.",
                f"Any other value has no loss, and XLA would not notice; {self.ignored} marks what is ignored.",
                f"Use the tokenizer or the label ids of this model, and {self.ignored} where nothing is learned.",
            )

    def check_any(self, batch: Mapping[str, Any]) -> None:
        """Raise for a batch whose labels are all ignored.

        Raises:
            InvalidInputError: the loss would be the mean of nothing, NaN in torch.
        """
        found = _read(batch.get("labels"))
        if found is not None and not self.is_of_rows and not self._is_counted(found).any():
            raise InvalidInputError(
                "A batch has no labels to learn from.",
                f"All are {self.ignored}, and the loss is the mean over the others.",
                "Remove rows without labels, or use larger batches.",
            )

    def _is_counted(self, labels: Any) -> Any:
        return (labels[..., 1:] if self.is_shifted and labels.ndim > 1 else labels) != self.ignored


def labels_of(model: JaxModel) -> Labels:
    """The labels of a model's own loss."""
    module: Any = model.module
    config: Any = model.config
    name = type(module).__name__
    if name.endswith(_CLASSIFIERS):
        is_class = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
        ignored = IGNORED
        if "Segmentation" in name:
            ignored = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", ignored))
        num_classes = config.num_labels if is_class else None
        return Labels(ignored=ignored, num_classes=num_classes, bound="config has labels")
    if name.endswith("ForCTC"):
        return Labels(num_classes=config.vocab_size, is_of_rows=True)
    is_shifted = getattr(module, "loss_function", None) is ForCausalLMLoss and not config.is_encoder_decoder
    head: Any = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    has_codes = hasattr(config, "num_codebooks")  # labels of several vocabularies
    return Labels(num_classes=None if has_codes else getattr(head, "out_features", None), is_shifted=is_shifted)


def _read(labels: Any) -> np.ndarray | None:
    """Integer labels on the host; None for others."""
    is_here = isinstance(labels, np.ndarray) or (isinstance(labels, jax.Array) and labels.is_fully_addressable)
    return np.asarray(labels) if is_here and np.issubdtype(labels.dtype, np.integer) else None
