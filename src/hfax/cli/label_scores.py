"""Label scores from a model.

Uses a sequence-classification head, or the probability that a causal language model assigns to the label's tokens after a prompt.
Takes a loaded model and tokenizer, and runs one forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.programs.buckets import prompt_bucket

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label's score.

    Args:
        label: the label's text.
        score: a probability. Scores sum to 1 over all labels, except for multi-label heads (independent probabilities)
            and regression (raw values).
        log_prob: sum of the label tokens' log-probabilities under a causal model; None for a classifier.
        num_tokens: number of label tokens; None for a classifier.
    """

    label: str
    score: float
    log_prob: float | None = None
    num_tokens: int | None = None


def scores_of_head(
    model: JaxModel, tokenizer: Any, text: str, labels: Mapping[int, str], problem_type: str | None
) -> list[LabelScore]:
    """Scores from a sequence-classification head, in label order.

    Args:
        model: a model with such a head.
        tokenizer: the model's tokenizer.
        text: to classify.
        labels: the config's labels by index.
        problem_type: the config's.

    Raises:
        InvalidInputError: the text is longer than the model's context.
    """
    inputs = dict(tokenizer(text, return_tensors="np"))
    _check_length(inputs["input_ids"].shape[1], model)
    logits = _numbers(model.output("logits", **inputs))[0].astype(np.float32)
    scores = _head_scores(logits, problem_type)
    return [LabelScore(label=labels.get(i, f"LABEL_{i}"), score=float(s)) for i, s in enumerate(scores)]


def scores_under_causal_model(
    model: JaxModel, tokenizer: Any, text: str, labels: Sequence[str], template: str, *, per_token: bool
) -> list[LabelScore]:
    """Probabilities of labels as continuations of a prompt, in the order given.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer.
        text: replaces `{text}` in the template.
        labels: two or more labels.
        template: contains `{text}` once, and ends with `{label}`.
        per_token: compare mean log-probabilities per token instead of sums, which favour short labels.

    All labels are scored from the same position: the first at which tokens of prompt and label differ from the prompt's.

    Raises:
        InvalidInputError: prompt plus label exceed the model's context.
    """
    before, after = template.removesuffix("{label}").split("{text}")
    prompt = f"{before}{text}{after}"
    rows = [list(tokenizer(prompt + label)["input_ids"]) for label in labels]
    start = max(1, min(_common_length(row, tokenizer(prompt)["input_ids"]) for row in rows))
    _check_length(max(map(len, rows)), model)
    log_probs = _token_log_probs(model, rows, start)
    sums = np.array([sum(row) for row in log_probs])
    counts = np.array([len(row) for row in log_probs])
    scores = _softmax(sums / counts if per_token else sums)
    return [
        LabelScore(label=label, score=float(score), log_prob=float(total), num_tokens=int(count))
        for label, score, total, count in zip(labels, scores, sums, counts, strict=True)
    ]


def _token_log_probs(model: JaxModel, rows: Sequence[Sequence[int]], start: int) -> list[list[float]]:
    """Log-probabilities of each row's tokens from position `start`, from one forward pass.

    Rows are right-padded to a bucket size, so other texts can reuse the cached program; causal models ignore right padding.
    """
    longest = max(map(len, rows))
    width = prompt_bucket(longest, max(model.context_length or 0, longest))
    ids = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32)
    logits = _numbers(model.output("logits", input_ids=ids, attention_mask=mask, use_cache=False))
    result = []
    for row, row_logits in zip(rows, logits, strict=True):
        drawn = row_logits[start - 1 : len(row) - 1].astype(np.float32)
        shifted = drawn - drawn.max(axis=-1, keepdims=True)
        normalized = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        result.append([float(normalized[i, token]) for i, token in enumerate(row[start:])])
    return result


def _numbers(array: Any) -> np.ndarray:
    """Convert a torch tensor or jax array to NumPy."""
    return array.float().numpy() if hasattr(array, "numpy") else np.asarray(array)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _head_scores(logits: np.ndarray, problem_type: str | None) -> np.ndarray:
    if problem_type == "multi_label_classification":
        return 1 / (1 + np.exp(-logits))
    if problem_type == "regression" or logits.size == 1:
        return logits
    return _softmax(logits)


def _softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def _check_length(length: int, model: JaxModel) -> None:
    context = model.context_length
    if context is not None and length > context:
        raise InvalidInputError(
            f"The text has {length} tokens, including the template; the model's context holds {context}.",
            "Scores for positions beyond the context would be wrong.",
            "Shorten the text.",
        )
