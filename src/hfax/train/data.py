"""Turns data set rows into batches of a few shapes, in an order set by a seed. Knows nothing about models."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.sources import Indexed, is_indexable
from hfax.train.workers import NO_WORKERS, Workers, in_order_with

Row = Mapping[str, Any]
Batch = dict[str, np.ndarray]
Collator = Callable[[Sequence[Row]], Batch]
Text = tuple[list[int], list[int]]
"""Token ids, and a label for each."""
_PADDED_WITH = {"labels": IGNORED, "decoder_input_ids": 0, "attention_mask": 0, "position_ids": 0, "token_type_ids": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddingCollator:
    """Collates rows of token ids into a right-padded batch.

    Args:
        pad_token_id: token id for padding; use 0 if the model reads no mask.
        pad_to_multiple_of: round lengths up to this multiple, to limit shapes and compilations.
        max_length: truncate longer rows; None: no truncation.
        is_causal: use the ids as labels for rows without labels.
        columns: columns to include; None: all numeric columns, such as `input_ids`, `attention_mask` and `labels`.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 64
    max_length: int | None = None
    is_causal: bool = True
    columns: tuple[str, ...] | None = None

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """The batch: [rows, length] int32 for columns of token lists, [rows, …] for numbers and arrays of equal shape.

        Raises:
            InvalidInputError: rows lack required columns.
        """
        names = [n for n in rows[0] if self._is_wanted(n, rows[0][n])]
        missing = next((n for row in rows for n in (*names, *(self.columns or ())) if row.get(n) is None), None)
        if missing is not None or not names:
            raise InvalidInputError(
                f"A row has no {missing!r}." if missing else "Rows have no model input columns.",
                f"Its columns are {', '.join(map(str, rows[0]))}.",
                "Map the data set to rows with input_ids (and labels), or pass a data_collator.",
            )
        batch: Batch = {}
        for name in names:
            values = [np.asarray(row[name]) for row in rows]
            if values[0].ndim == 1 and np.issubdtype(values[0].dtype, np.integer):
                batch[name] = self._padded(name, values)
            else:
                batch[name] = _stacked(name, values)
        ids = batch.get("input_ids")
        if ids is not None and "attention_mask" not in batch:
            lengths = np.array([len(row["input_ids"]) for row in rows])[:, None]
            batch["attention_mask"] = (np.arange(ids.shape[1])[None] < lengths).astype(np.int32)
        if ids is not None and "labels" not in batch and self.is_causal:
            batch["labels"] = np.where(batch["attention_mask"] == 1, ids, IGNORED).astype(np.int32)
        return batch

    def _is_wanted(self, name: str, value: Any) -> bool:
        if self.columns is not None:
            return name in self.columns
        return not isinstance(value, (str, bytes)) and _is_numbers(value)

    def _padded(self, name: str, values: list[np.ndarray]) -> np.ndarray:
        values = [v[: self.max_length] for v in values]
        longest = max(len(v) for v in values)
        length = math.ceil(max(longest, 1) / self.pad_to_multiple_of) * self.pad_to_multiple_of
        length = length if self.max_length is None else min(length, max(self.max_length, longest))
        return padded(values, length, self.pad_token_id if name.endswith("input_ids") else _PADDED_WITH.get(name, 0))


PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]
"""trl's names, see `pack`."""


def pack(rows: Iterable[Row], length: int, *, packing_strategy: PackingStrategy = "bfd") -> list[dict[str, list[int]]]:
    """Pack several sequences per row to reduce padding; `position_ids` separate them.

    Best-fit decreasing: sequences are placed longest first, each in the fullest row with room (Ding et al., 2024,
    https://arxiv.org/abs/2404.10830).

    Args:
        rows: rows with `input_ids` and optional `labels` (default: the ids).
        length: packed row length, in tokens.
        packing_strategy: as in trl. "bfd": sequences longer than `length` are truncated. "bfd_split": they are split, and each part
            is a sequence of its own. "wrapped": all sequences are joined and cut into rows, and attention crosses from one to the
            next.

    Returns:
        Rows with `input_ids`, `labels` (-100 at each sequence's first token and at padding) and `position_ids`, which restart
        at each sequence. There is no attention mask: attention restarts where positions do.

    Raises:
        InvalidInputError: rows without `input_ids`.
    """
    texts: list[Text] = []
    for row in rows:
        if "input_ids" not in row:
            raise InvalidInputError(
                "A row has no 'input_ids'.",
                f"Its columns are {', '.join(map(str, row))}.",
                "Tokenize the data set before packing.",
            )
        ids = list(row["input_ids"])
        texts.append((ids, list(row.get("labels") or ids)))
    if packing_strategy == "wrapped":
        every = itertools.chain.from_iterable
        joined = list(every(ids for ids, _ in texts)), list(every(labels for _, labels in texts))
        return [_packed([part], length) for part in _parts(joined, length)]
    is_split = packing_strategy == "bfd_split"
    texts = [part for text in texts for part in itertools.islice(_parts(text, length), None if is_split else 1)]
    bins: list[list[Text]] = []
    by_room: dict[int, list[int]] = {}
    for text in sorted(texts, key=lambda t: len(t[0]), reverse=True):
        needed = len(text[0])
        room = next((r for r in range(needed, length + 1) if by_room.get(r)), None)
        if room is None:
            bins.append([])
            index, room = len(bins) - 1, length
        else:
            index = by_room[room].pop()
        bins[index].append(text)
        by_room.setdefault(room - needed, []).append(index)
    return [_packed(texts, length) for texts in bins]


def check_packing_strategy(packing_strategy: str, *, is_packing: bool) -> None:
    """Raise for a strategy that does not exist, or that nothing uses.

    Raises:
        InvalidInputError: so.
    """
    known = get_args(PackingStrategy)
    if packing_strategy not in known:
        raise InvalidInputError(
            f"packing_strategy is {packing_strategy!r}.",
            "It says what happens to sequences longer than a packed row.",
            f"Use one of {', '.join(known)}.",
        )
    if packing_strategy != known[0] and not is_packing:
        raise InvalidInputError(
            f"packing_strategy={packing_strategy} is set without packing.",
            "Each row has one sequence.",
            "Turn packing on, or leave it out.",
        )


def _parts(text: Text, length: int) -> Iterator[Text]:
    """A text in parts of at most `length` tokens; the first token of a part follows from nothing before it."""
    ids, labels = text
    for start in range(0, max(len(ids), 1), length):
        part = slice(start, start + length)
        yield ids[part], [IGNORED, *labels[part][1:]]


def _packed(texts: list[Text], length: int) -> dict[str, list[int]]:
    ids = [token for text, _ in texts for token in text]
    labels = [label for _, own in texts for label in own]
    positions = [position for text, _ in texts for position in range(len(text))]
    rest = length - len(ids)
    # padding is its own sequence
    return {
        "input_ids": ids + [0] * rest,
        "labels": labels + [IGNORED] * rest,
        "position_ids": positions + list(range(rest)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Collates rows from `pack` into a batch."""

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """[rows, length] int32 ids, labels and positions."""
        return {
            name: np.array([row[name] for row in rows], np.int32) for name in ("input_ids", "labels", "position_ids")
        }


class BatchOrder:
    """The rows of each step: a pure function of seed and step, so that runs can resume.

    The last rows of an epoch that do not fill a step are dropped: every step has the same shape.

    Args:
        dataset: a sized, indexable data set.
        rows_per_step: rows per step.
        seed: shuffle seed.
        shuffle: reshuffle each epoch; otherwise keep the data order.
        group_by_length: put shuffled rows of similar length into a step, which needs less padding. Reads all rows once.
        workers: processes that read rows ahead.

    Raises:
        InvalidInputError: fewer rows than one step needs, or rows to group that have no length.
    """

    def __init__(
        self,
        dataset: Any,
        rows_per_step: int,
        seed: int,
        shuffle: bool,
        *,
        group_by_length: bool = False,
        workers: Workers = NO_WORKERS,
    ) -> None:
        self._dataset = dataset
        self._rows = rows_per_step
        self._seed, self._shuffle, self._workers = seed, shuffle, workers
        self.length = len(dataset) if is_indexable(dataset) else None
        self.steps_per_epoch = None if self.length is None else self.length // rows_per_step
        if self.steps_per_epoch == 0:
            raise InvalidInputError(
                f"The data set has {self.length} rows, but a step needs {rows_per_step}.",
                "A step reads per_device_train_batch_size rows per device, gradient_accumulation_steps times.",
                "Use a smaller batch or more data.",
            )
        self._lengths = self._lengths_of_rows() if group_by_length else None

    position = None
    """Of the data; it follows from the number of steps."""

    def after(self, steps: int, position: Any = None) -> Iterator[tuple[int, list[Row]]]:
        """Yield epoch and rows of each step after the first `steps`, indefinitely.

        Args:
            steps: number of steps done.
            position: None, see `position`.
        """
        return in_order_with(Indexed(self._dataset), self._picked(steps), self._workers)

    def _picked(self, steps: int) -> Iterator[tuple[int, list[int]]]:
        """Epoch and row numbers of each step."""
        assert self.steps_per_epoch is not None
        epoch, skip = divmod(steps, self.steps_per_epoch)
        while True:
            order = np.arange(self.length or 0)
            if self._shuffle:
                order = np.random.default_rng([self._seed, epoch]).permutation(order)
            if self._lengths is not None:
                order = grouped_by_length(order, self._lengths, self._rows)
            for step in range(skip, self.steps_per_epoch):
                yield epoch, order[step * self._rows : (step + 1) * self._rows].tolist()
            epoch, skip = epoch + 1, 0

    def _lengths_of_rows(self) -> np.ndarray:
        if self.length is None or "input_ids" not in self._dataset[0]:
            raise InvalidInputError(
                "group_by_length needs the lengths of all rows.",
                "The data set has no length." if self.length is None else "Its rows have no input_ids.",
                "Pass a list or a data set of tokenized rows, or leave group_by_length out.",
            )
        return np.array([len(self._dataset[i]["input_ids"]) for i in range(self.length)])


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, rows_per_step: int) -> np.ndarray:
    """Sort each run of up to 50 steps by length, longest first, as in transformers.

    Args:
        order: row numbers, shuffled.
        lengths: length by row number.
        rows_per_step: rows per step.

    Returns:
        The row numbers; the longest row of all comes first, so that a step that does not fit in memory fails at once.
    """
    size = rows_per_step * max(min(len(order) // (rows_per_step * 4), 50), 1)
    runs = [order[i : i + size] for i in range(0, len(order), size)]
    runs = [run[np.argsort(-lengths[run], kind="stable")] for run in runs]
    longest = runs[int(np.argmax([lengths[run[0]] for run in runs]))]
    runs[0][0], longest[0] = longest[0], runs[0][0]
    return np.concatenate(runs)


def in_batches(dataset: Any, size: int) -> Iterator[list[Row]]:
    """All rows, in order, `size` at a time; the last batch may be smaller."""
    rows: list[Row] = []
    for row in dataset:
        rows.append(row)
        if len(rows) == size:
            yield rows
            rows = []
    if rows:
        yield rows


def padded(values: Sequence[Any], length: int, filler: int, dtype: Any = np.int32) -> np.ndarray:
    """Rows of numbers, right-padded to [rows, length].

    Args:
        values: a row's numbers each, at most `length`.
        length: of all rows.
        filler: what they are padded with.
        dtype: of the array.
    """
    out = np.full((len(values), length), filler, dtype)
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
    return out


def _is_numbers(value: Any) -> bool:
    try:
        return np.issubdtype(np.asarray(value).dtype, np.number) or np.asarray(value).dtype == bool
    except (ValueError, TypeError):
        return False


def _stacked(name: str, values: list[np.ndarray]) -> np.ndarray:
    if len({v.shape for v in values}) > 1:
        raise InvalidInputError(
            f"Rows have {name!r} with different shapes {sorted({v.shape for v in values})[:3]}.",
            "Only lists of token ids are padded.",
            "Use a single shape, or pass a data_collator.",
        )
    return np.stack(values)
