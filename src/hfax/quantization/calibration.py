"""Calibration data: texts and conversations of a file as rows of tokens, all of one length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.train.examples import tokenize_rows
from hfax.train.row_formats import json_lines

_ROWS = (".jsonl", ".ndjson")
_ROWS_AT_A_TIME = 256


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a JSONL file, or one row with the text of any other file.

    Raises:
        InvalidInputError: it cannot be read, or a line is no JSON object.
    """
    try:
        return list(json_lines(path)) if path.suffix in _ROWS else [{"text": path.read_text(encoding="utf-8")}]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} could not be read.",
            f"{type(error).__name__}: {error}",
            'Pass a UTF-8 text file, or a .jsonl file of rows like {"text": …} or {"messages": […]}.',
        ) from error


def make_blocks(rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, count: int, length: int) -> np.ndarray:
    """The first tokens of the data, one text after the other, in rows of one length.

    Args:
        rows: in one of the formats of `hfax.train.examples.tokenize_rows`.
        tokenizer: the model's.
        count: rows that are wanted, at most.
        length: tokens of a row.

    Returns:
        [rows, length] int32.

    Raises:
        InvalidInputError: a row has an unknown format, or there are fewer tokens than two rows have.
    """
    tokens: list[int] = []
    rows = iter(rows)
    while some := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
        tokens += [token for found in tokenize_rows(some, tokenizer, max_length=None) for token in found["input_ids"]]
        if len(tokens) >= count * length:
            break
    found = min(len(tokens) // length, count)
    if found < 2:
        raise InvalidInputError(
            f"The calibration data has {len(tokens):,} tokens.",
            f"One row of {length:,} tokens is needed to calibrate with, and one to measure the perplexity.",
            "Pass more text, or a smaller --max-length.",
        )
    return np.asarray(tokens[: found * length], np.int32).reshape(found, length)
