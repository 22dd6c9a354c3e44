"""`model.map`: a whole data set through `generate` or a forward pass, batch by batch, resumable, in order.

Rows are given to the model a batch at a time; over a mesh, batches are split over its axes of batches, so one line of code uses
every device. Results are written as they come, as JSON lines in the order of the rows, and a run that was interrupted goes on where
it stopped. This module knows tokenizers' outputs and files, not programs.
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
) -> Iterator[Any]:
    """Each row's result, in order.

    Args:
        rows: of the data set.
        run: turns a batch of rows into as many results, which JSON can hold.
        batch_size: rows at a time; the last batch may be smaller.
        output: a file of JSON lines, one a row; rows whose lines are there are not run again. None: nothing is written.
        total: how many rows there are, for the bar.
        progress: show a bar where stderr is a terminal.

    Raises:
        InvalidInputError: the file holds something else, or more lines than there are rows.
    """
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
                    f"{output} holds {len(done)} results, and the data set has {index} rows.",
                    "Results are matched to rows by their order.",
                    "Give the file that belongs to this data set, or another name for a new one.",
                )
            yield result
        with _appending(output) as write:
            for batch in _batches(source, batch_size):
                results = run(batch)
                write(results)
                bar.advance(task, len(batch))
                yield from results


_NONE = object()


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
    """Results that an earlier run wrote; a line that it did not finish is cut off."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    try:
        results = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise InvalidInputError(
            f"{path} does not hold JSON lines.", str(error), "Give another name for the output, or remove the file."
        ) from error
    if len(whole) < len(text) and jax.process_index() == 0:
        os.truncate(path, len(whole))
    return results


@contextlib.contextmanager
def _appending(path: Path | None) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Gives what writes lines at the file's end, in process 0, each batch safely on disk before the next is run."""
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
    """A batch of rows as a model's inputs, padded to the longest.

    Args:
        rows: texts, lists of token ids, or mappings that have either under `column` or under "input_ids".
        column: see there.
        tokenizer: for texts.
        is_left: where the padding goes.
        pad_token_id: fills it, where rows are ids.

    Raises:
        InvalidInputError: a row is none of these, or a text without a tokenizer.
    """
    contents = [_content(row, column) for row in rows]
    if all(isinstance(content, str) for content in contents):
        if tokenizer is None:
            raise InvalidInputError(
                "map() got texts and no tokenizer.",
                "The model reads token ids.",
                "Pass tokenizer=…, or rows of token ids.",
            )
        side = "left" if is_left else "right"
        return dict(tokenizer(contents, padding=True, padding_side=side, return_tensors="np"))
    if not all(isinstance(content, (list, tuple, np.ndarray)) and len(content) for content in contents):
        kinds = sorted({type(content).__name__ for content in contents})
        raise InvalidInputError(
            f"map() got rows of {', '.join(kinds)}.",
            "A row is a text or a list of token ids, or a mapping that has one of them.",
            f"Name the column that holds it: column=…; it is {column!r} now.",
        )
    longest = max(len(content) for content in contents)
    ids = np.full((len(rows), longest), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, content in enumerate(contents):
        place = slice(longest - len(content), None) if is_left else slice(len(content))
        ids[row, place], mask[row, place] = content, 1
    return {"input_ids": ids, "attention_mask": mask}


def _content(row: Any, column: str) -> Any:
    if isinstance(row, Mapping):
        return row.get(column, row.get("input_ids"))
    return row


def as_rows(outputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The arrays of a forward pass, row by row, as lists; what has no row for each input is left out."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in outputs.items():
        if not hasattr(value, "shape") or not value.shape or value.shape[0] < count:
            continue
        array = to_host(value) if isinstance(value, jax.Array) else np.asarray(value)
        for index, row in enumerate(array[:count].tolist()):
            rows[index][name] = row
    return rows
