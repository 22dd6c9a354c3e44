"""`model.map`: run `generate` or a forward pass over a whole dataset, batch by batch, resumable, in order.

The model gets one batch of rows at a time; over a mesh, batches are sharded over its batch axes, so one line of code uses every
device. For forward passes the rows of a window of batches are sorted by length, so that rows of a batch share a size class. Results
are written as they are produced, as JSON lines in row order, and an interrupted run resumes where it stopped. This module handles
tokenizer outputs and files, not programs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hfax.errors import InvalidInputError
from hfax.sharding.layout import to_host


def map_rows(
    rows: Iterable[Any],
    run: Callable[[list[Any]], list[Any]],
    *,
    batch_size: int,
    output: Path | None,
    total: int | None,
    progress: bool,
    length: Callable[[Any], int] | None = None,
) -> Iterator[Any]:
    """Yield the result of each row, in order.

    Args:
        rows: rows of the dataset.
        run: maps a batch of rows to one JSON-serializable result per row.
        batch_size: rows per batch; the last batch may be smaller.
        output: a JSON Lines file, one line per row; rows already in the file are not run again. None: nothing is written.
        total: number of rows, for the progress bar.
        progress: show a progress bar if stderr is a terminal.
        length: of a row; sorts the rows of 16 batches, whose results are written together. None: rows are not sorted.

    Raises:
        InvalidInputError: `batch_size` is not positive, the file is not JSON Lines, or it has more lines than the dataset has rows.
    """
    if batch_size < 1:
        raise InvalidInputError(
            f"batch_size={batch_size}.", "A batch needs at least one row.", "Pass a positive integer."
        )
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = [] if output is None else _finished(output)
    columns = (TextColumn("map"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("map", total=total, completed=len(done))
        source = iter(rows)
        for index, result in enumerate(done):
            if next(source, _NONE) is _NONE:
                raise InvalidInputError(
                    f"{output} holds {len(done)} results, but the dataset has {index} rows.",
                    "Results are matched to rows by order.",
                    "Pass the output file of this dataset, or the name of a new file.",
                )
            yield result
        with _appending(output) as write:
            for window in _batches(source, batch_size * (1 if length is None else _WINDOW)):
                order = (
                    range(len(window))
                    if length is None
                    else sorted(range(len(window)), key=lambda i: length(window[i]))
                )
                results: list[Any] = [None] * len(window)
                for places in (order[start : start + batch_size] for start in range(0, len(window), batch_size)):
                    for place, result in zip(places, run([window[i] for i in places]), strict=True):
                        results[place] = result
                    bar.advance(task, len(places))
                write(results)
                yield from results


_NONE = object()
_WINDOW = 16
"""Batches whose rows are sorted."""


def _batches(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _finished(path: Path) -> list[Any]:
    """Results written by an earlier run; an incomplete last line is truncated."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    try:
        results = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise InvalidInputError(
            f"{path} does not hold JSON lines.", str(error), "Choose another output file, or remove this one."
        ) from error
    if len(whole) < len(text) and jax.process_index() == 0:
        os.truncate(path, len(whole))
    return results


@contextlib.contextmanager
def _appending(path: Path | None) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A function that appends lines to the file, in process 0; what is written is synced to disk before the next batch runs."""
    if path is None or jax.process_index() != 0:
        yield lambda results: None
        return
    with path.open("a", encoding="utf-8") as file:

        def write(results: Sequence[Any]) -> None:
            file.writelines(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
            file.flush()
            os.fsync(file.fileno())

        yield write


def encode(
    rows: Sequence[Any], column: str, tokenizer: Any, *, is_left: bool, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Encode a batch of rows as model inputs, padded to the longest row.

    Args:
        rows: texts, lists of token ids, or mappings with either under `column` or "input_ids".
        column: key of the text or ids in a mapping.
        tokenizer: required for texts.
        is_left: pad on the left instead of the right.
        pad_token_id: padding value for rows of ids.

    Raises:
        InvalidInputError: a row has another type, or is a text and there is no tokenizer.
    """
    contents = [_content(row, column) for row in rows]
    if all(isinstance(content, str) for content in contents):
        if tokenizer is None:
            raise InvalidInputError(
                "map() got texts but no tokenizer.",
                "The model reads token ids.",
                "Pass tokenizer=…, or rows of token ids.",
            )
        side = "left" if is_left else "right"
        return dict(tokenizer(contents, padding=True, padding_side=side, return_tensors="np"))
    if not all(isinstance(content, (list, tuple, np.ndarray)) and len(content) for content in contents):
        kinds = sorted({type(content).__name__ for content in contents})
        raise InvalidInputError(
            f"map() got rows of {', '.join(kinds)}.",
            "A row must be a text, a list of token ids, or a mapping that contains one of them.",
            f"Pass the name of the column that holds it as column=…; it is {column!r} now.",
        )
    longest = max(len(content) for content in contents)
    ids = np.full((len(rows), longest), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, content in enumerate(contents):
        place = slice(longest - len(content), None) if is_left else slice(len(content))
        ids[row, place], mask[row, place] = content, 1
    return {"input_ids": ids, "attention_mask": mask}


def row_length(row: Any, column: str) -> int:
    """The length of a row in characters or ids, which orders rows; 0 for a row of another type, which `encode` refuses."""
    content = _content(row, column)
    return len(content) if hasattr(content, "__len__") else 0


def _content(row: Any, column: str) -> Any:
    if isinstance(row, Mapping):
        return row.get(column, row.get("input_ids"))
    return row


def as_rows(outputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The arrays of a forward pass as lists, row by row; outputs without one row per input are left out."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in outputs.items():
        if not hasattr(value, "shape") or not value.shape or value.shape[0] < count:
            continue
        array = to_host(value) if isinstance(value, jax.Array) else np.asarray(value)
        for index, row in enumerate(array[:count].tolist()):
            rows[index][name] = row
    return rows


def new_tokens(rows: np.ndarray, ends: tuple[int, ...], tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens of each row up to the first end-of-sequence token, as `{"tokens": […]}`, or `{"text": …}` with a tokenizer.

    Args:
        rows: [batch, new] ids, without the prompts.
        ends: end-of-sequence token ids.
        tokenizer: decodes the tokens; None: ids are returned.
    """
    written = [_until(row.tolist(), ends) for row in rows]
    if tokenizer is None:
        return [{"tokens": row} for row in written]
    return [{"text": tokenizer.decode(row, skip_special_tokens=True)} for row in written]


def _until(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens before the first end-of-sequence token."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
