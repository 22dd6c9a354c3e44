"""Data sets that are tokenized and packed while a model trains, in the order that a seed gives, from any position.

Rows are prepared in buffers: tokenized, packed and shuffled together. A position is a buffer and how many of its rows were used,
so that a run resumes by preparing one buffer again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfax.errors import HfaxError, InvalidInputError
from hfax.train.data import BatchOrder, PackingStrategy, check_packing_strategy
from hfax.train.examples import NothingToLearnError, tokenize_examples
from hfax.train.sources import Given, Indexed, JsonLines, Reader, Row, is_indexable, open_rows
from hfax.train.workers import NO_WORKERS, Workers, in_order_with

Prepare = Callable[[Sequence[Row]], list[Any]]
Position = dict[str, Any]
"""`epoch`, `buffer` (its number in the epoch), `row` (the next one in it) and `source` (`state_dict` of an iterable before it)."""
_FIRST: Position = {"epoch": 0, "buffer": 0, "row": 0, "source": None}


@dataclasses.dataclass(frozen=True, eq=False)
class StreamingDataset:
    """Rows that are tokenized while a model trains, for data that does not fit in memory.

    A run needs `max_steps`, since the number of rows is not known before. Rows at the end of an epoch that do not fill a step go
    into the first step of the next.

    Args:
        rows: JSON Lines or Parquet files (a path, a pattern such as "data/*.jsonl", or several), a `datasets.save_to_disk` folder,
            or a Hub id ("owner/name", "owner/name:split"), which is streamed; an indexable data set, which is read in random
            order; or any re-iterable, such as a `datasets.IterableDataset`, which is read in its own.
        tokenizer: the model's; None: rows have token ids.
        max_length: maximum row length, in tokens; longer rows are truncated. None: no maximum.
        packing: pack several sequences of a buffer per row of `max_length` tokens, see `hfax.train.data.pack`.
        packing_strategy: how; "bfd" truncates longer sequences, "bfd_split" splits them, "wrapped" joins all.
        buffer_size: rows that are read, tokenized, packed and shuffled together. Indexable data are also shuffled as a whole.
        prepare: makes rows with token ids of a buffer's rows, in place of `tokenizer`, `max_length` and `packing`. It runs in
            `TrainingArguments.dataloader_num_workers` processes, so it must be picklable.

    Raises:
        InvalidInputError: the rows cannot be found, or packing without `max_length`.

    Examples:
        >>> rows = StreamingDataset([{"input_ids": [5, 6, 7]}] * 8, max_length=16, packing=True)
        >>> next(iter(rows))["input_ids"][:6].tolist()
        [5, 6, 7, 5, 6, 7]
    """

    rows: Any
    tokenizer: Any = None
    _: dataclasses.KW_ONLY
    max_length: int | None = 1024
    packing: bool = False
    packing_strategy: PackingStrategy = "bfd"
    buffer_size: int = 1000
    prepare: Prepare | None = None

    def __post_init__(self) -> None:
        if self.packing and self.max_length is None:
            raise InvalidInputError("packing has no max_length.", "Rows are filled up to it.", "Pass max_length=1024.")
        check_packing_strategy(self.packing_strategy, is_packing=self.packing)
        for name in ("buffer_size", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInputError(f"{name}={value} is too small.", "It is a count.", f"Pass another {name}.")
        several = isinstance(self.rows, (list, tuple)) and bool(self.rows) and isinstance(self.rows[0], (str, Path))
        if several or isinstance(self.rows, (str, Path)):
            object.__setattr__(self, "rows", open_rows(self.rows, streaming=True))

    def __iter__(self) -> Iterator[Row]:
        """The prepared rows of one epoch, in the order of the data."""
        for rows, _ in self._buffers(_FIRST, seed=0, shuffle=False, workers=NO_WORKERS, epochs=1):
            yield from rows

    def rows_from(
        self, position: Position | None, *, seed: int, shuffle: bool, workers: Workers
    ) -> Iterator[tuple[Row, Position]]:
        """Yield prepared rows, indefinitely, each with the position after it.

        Args:
            position: where to begin; None: at the beginning.
            seed: shuffle seed.
            shuffle: shuffle the rows of each buffer, and indexable data as a whole in each epoch.
            workers: processes that prepare buffers ahead.

        Raises:
            InvalidInputError: a row is in an unknown format, which is named; or an epoch has no rows.
        """
        start = position or _FIRST
        found, epoch = start["buffer"] + start["row"], start["epoch"]
        for rows, at in self._buffers(start, seed=seed, shuffle=shuffle, workers=workers):
            if at["epoch"] != epoch and not found:
                raise _without_rows(epoch, "None has anything to learn within max_length.")
            if at["epoch"] != epoch:
                found, epoch = 0, at["epoch"]
            skip = start["row"] if (at["epoch"], at["buffer"]) == (start["epoch"], start["buffer"]) else 0
            found += len(rows)
            for number, row in enumerate(rows[skip:], start=skip + 1):
                yield row, {**at, "row": number}

    # Buffers

    def _buffers(
        self, start: Position, *, seed: int, shuffle: bool, workers: Workers, epochs: int | None = None
    ) -> Iterator[tuple[list[Row], Position]]:
        """Prepared rows of each buffer, with its position, of some epochs or indefinitely."""
        source = self._source()
        prepare = self.prepare or functools.partial(
            tokenize_examples,
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            packing_strategy=self.packing_strategy if self.packing else None,
        )

        def items() -> Iterator[tuple[Position, tuple[Any, tuple[int, ...] | None]]]:
            for epoch in itertools.islice(itertools.count(start["epoch"]), epochs):
                first = start if epoch == start["epoch"] else {**_FIRST, "epoch": epoch}
                number = first["buffer"]
                found = self._of_iterable(first) if source is None else self._of_index(source, first, seed, shuffle)
                for where, state in found:
                    position = {"epoch": epoch, "buffer": number, "row": 0, "source": state}
                    yield position, (where, (seed, epoch, number) if shuffle else None)
                    number += 1
                if not number:
                    raise _without_rows(
                        epoch, "Iterables are iterated once per epoch; a generator yields its rows only once."
                    )

        prepared = _Buffer(Given() if source is None else source.reader, prepare)
        for position, rows in in_order_with(prepared, items(), workers):
            yield rows, position

    def _source(self) -> JsonLines | Indexed | None:
        """The rows by their index; None: they have none."""
        if isinstance(self.rows, JsonLines):
            return self.rows
        return Indexed(self.rows) if is_indexable(self.rows) else None

    def _of_index(
        self, source: JsonLines | Indexed, first: Position, seed: int, shuffle: bool
    ) -> Iterator[tuple[Any, None]]:
        """Where the rows of an epoch's buffers are."""
        order = np.arange(len(source))
        if shuffle:
            order = np.random.default_rng([seed, first["epoch"]]).permutation(order)
        for begin in range(first["buffer"] * self.buffer_size, len(order), self.buffer_size):
            yield source.locate(order[begin : begin + self.buffer_size]), None

    def _of_iterable(self, first: Position) -> Iterator[tuple[list[Row], Any]]:
        """The rows of an epoch's buffers, with the state of the iterable before them."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(first["epoch"])
        skip, state = first["buffer"] * self.buffer_size, first["source"]
        if state is not None:
            self.rows.load_state_dict(state)
            skip = 0
        rows = itertools.islice(self.rows, skip, None)
        while buffer := list(itertools.islice(rows, self.buffer_size)):
            yield buffer, state
            state = _state_of(self.rows)


class StreamOrder:
    """The rows of each step of a run on a `StreamingDataset`.

    Args:
        dataset: the data.
        rows_per_step: rows per step.
        seed: shuffle seed.
        shuffle: see `StreamingDataset.rows_from`.
        workers: processes that prepare rows ahead.
    """

    steps_per_epoch = None

    def __init__(
        self, dataset: StreamingDataset, rows_per_step: int, seed: int, shuffle: bool, workers: Workers
    ) -> None:
        self._dataset, self._rows = dataset, rows_per_step
        self._seed, self._shuffle, self._workers = seed, shuffle, workers
        self.position: Position | None = None
        """After the last step that was yielded; None: before the first."""

    def after(self, steps: int, position: Position | None = None) -> Iterator[tuple[int, list[Row]]]:
        """Yield epoch and rows of each step after the first `steps`, indefinitely.

        Args:
            steps: number of steps done.
            position: the data's after them; None: not known, so that their rows are prepared again.

        Raises:
            InvalidInputError: see `StreamingDataset.rows_from`.
        """
        self.position = position
        options: dict[str, Any] = {"seed": self._seed, "shuffle": self._shuffle, "workers": self._workers}
        found = self._dataset.rows_from(position, **options)
        if position is None:
            found = itertools.islice(found, steps * self._rows, None)
        while True:
            rows, positions = zip(*itertools.islice(found, self._rows), strict=True)
            self.position = positions[-1]
            yield positions[-1]["epoch"], list(rows)


def make_order(dataset: Any, rows_per_step: int, args: Any) -> BatchOrder | StreamOrder:
    """The order in which a run uses the rows of a data set.

    Args:
        dataset: a `StreamingDataset`, an indexable data set, or any re-iterable, whose rows keep their order.
        rows_per_step: rows per step.
        args: the `TrainingArguments`.

    Raises:
        InvalidInputError: fewer rows than one step needs, or rows to group that have no length.
    """
    workers = Workers(args.dataloader_num_workers, args.dataloader_prefetch_factor or NO_WORKERS.prefetch)
    if is_indexable(dataset) or args.group_by_length:
        return BatchOrder(
            dataset, rows_per_step, args.seed, args.shuffle, group_by_length=args.group_by_length, workers=workers
        )
    if isinstance(dataset, StreamingDataset):
        return StreamOrder(dataset, rows_per_step, args.seed, args.shuffle, workers)
    as_it_is = StreamingDataset(dataset, prepare=list, buffer_size=rows_per_step)
    return StreamOrder(as_it_is, rows_per_step, args.seed, shuffle=False, workers=NO_WORKERS)


class _Buffer:
    """Reads and prepares the rows of a buffer, in any process."""

    def __init__(self, read: Reader, prepare: Prepare) -> None:
        self._read, self._prepare = read, prepare

    def __call__(self, item: tuple[Any, tuple[int, ...] | None]) -> list[Row]:
        where, seed = item
        rows = self._read(where)
        try:
            found = self._prepare(rows)
        except NothingToLearnError:
            return []
        except InvalidInputError:
            self._name_the_row(rows, where)
            raise
        if seed is not None:
            found = [found[i] for i in np.random.default_rng(seed).permutation(len(found))]
        return [_compact(row) for row in found]

    def _name_the_row(self, rows: list[Row], where: Any) -> None:
        """Raise the error of the first row that has one."""
        for number, row in enumerate(rows):
            try:
                self._prepare([row])
            except NothingToLearnError:
                continue
            except HfaxError as error:
                name = self._read.name(where, number)
                raise type(error)(
                    f"{name}: {error.what.replace('Row 1 ', 'The row ')}", error.why, error.fix
                ) from error


def _compact(row: Any) -> Any:
    """Lists of token ids as int32 arrays: a tenth of the memory, and of what is sent between processes."""
    if not isinstance(row, Mapping):
        return row
    return {name: np.array(v, np.int32) if _is_ids(v) else v for name, v in row.items()}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _state_of(rows: Any) -> Any:
    """The state of an iterable that can resume (of `datasets`, torchdata); None: it cannot, or has one that JSON does not hold."""
    if not (hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")):
        return None
    try:
        state = rows.state_dict()
        return state if json.loads(json.dumps(state)) == state else None
    except (TypeError, ValueError):
        return None


def _without_rows(epoch: int, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The data yielded no rows in epoch {epoch}.",
        why,
        "Pass a list, a data set, or a re-iterable; or raise max_length.",
    )
