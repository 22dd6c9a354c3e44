"""Collates rows of pairs, and of completions with a verdict, into batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hfax.train.data import Batch, Row, padded
from hfax.train.ignored import IGNORED


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCollator:
    """Collates rows of `pair_rows` or `reward_rows`: chosen and rejected sequences are right-padded to the same length.

    Args:
        pad_token_id: token id for padding.
        pad_to_multiple_of: round lengths up to this multiple, to limit shapes and compilations.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 64

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """`chosen_ids`, `rejected_ids`, their attention masks and labels, [rows, length] int32; other numbers [rows] float32."""
        sides = [f"{side}_ids" for side in ("chosen", "rejected")]
        length = _round_up(max(len(row[name]) for row in rows for name in sides), self.pad_to_multiple_of)
        batch: Batch = {}
        for name in rows[0]:
            if name in sides:
                ids = [row[name] for row in rows]
                batch[name] = padded(ids, length, self.pad_token_id)
                batch[name.replace("_ids", "_attention_mask")] = _mask(ids, length)
            elif name.endswith("_labels"):
                batch[name] = padded([row[name] for row in rows], length, IGNORED)
            else:
                batch[name] = np.array([row[name] for row in rows], np.float32)
        return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictCollator:
    """Collates rows of `verdict_rows`, and pairs each prompt with the completion of the row before it, for KTO's KL term.

    Args:
        group: rows of a forward pass: the first of them gets the completion of the last.
        has_kl: whether the loss has that term.
        max_length: tokens that are kept of prompt and completion; None: all.
        pad_token_id: token id for padding.
        pad_to_multiple_of: round lengths up to this multiple, to limit shapes and compilations.
    """

    group: int
    has_kl: bool = True
    max_length: int | None = None
    pad_token_id: int = 0
    pad_to_multiple_of: int = 64

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """`input_ids`, `attention_mask` and `labels`, [rows, length] int32, the same with "KL_" before, and `label` [rows]."""
        answers = [row["completion_ids"] for row in rows]
        batch = self._sequences(rows, answers, "")
        if self.has_kl:
            groups = [answers[i : i + self.group] for i in range(0, len(answers), self.group)]
            batch |= self._sequences(rows, [answer for g in groups for answer in (g[-1], *g[:-1])], "KL_")
        return {**batch, "label": np.array([row["label"] for row in rows], np.int32)}

    def _sequences(self, rows: Sequence[Row], answers: list[Any], prefix: str) -> Batch:
        prompts = [list(row["prompt_ids"]) for row in rows]
        ids = [[*p, *a][: self.max_length] for p, a in zip(prompts, answers, strict=True)]
        labels = [[*[IGNORED] * len(p), *a][: self.max_length] for p, a in zip(prompts, answers, strict=True)]
        length = _round_up(max(map(len, ids)), self.pad_to_multiple_of)
        return {
            f"{prefix}input_ids": padded(ids, length, self.pad_token_id),
            f"{prefix}attention_mask": _mask(ids, length),
            f"{prefix}labels": padded(labels, length, IGNORED),
        }


def _mask(values: Sequence[Sequence[int]], length: int) -> np.ndarray:
    return (np.arange(length)[None] < np.array([[len(v)] for v in values])).astype(np.int32)


def _round_up(length: int, multiple: int) -> int:
    return math.ceil(max(length, 1) / multiple) * multiple
