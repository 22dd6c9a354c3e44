"""Computes items ahead of the loop that uses them, in worker processes, in their order."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hfax.errors import HfaxError


class Workers(NamedTuple):
    """How many processes compute ahead, and how far.

    Args:
        number: of processes; 0: none, items are computed when they are asked for.
        prefetch: items that each computes ahead.
    """

    number: int = 0
    prefetch: int = 2


NO_WORKERS = Workers()


def in_order(function: Callable[[Any], Any], items: Iterable[Any], workers: Workers) -> Iterator[Any]:
    """Yield the function's results for some items, in their order.

    Args:
        function: sent to each process once; it, the items and the results must be picklable, if there are processes.
        items: taken in this process, a few ahead of what is yielded.
        workers: the processes, of torch's DataLoader: they end with the iterator, and with this process.

    Raises:
        HfaxError: the function raised it, or another exception, which it names; or a process was killed.
    """
    if not workers.number:
        yield from map(function, items)
        return
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        _Computed(function),  # pyright: ignore[reportArgumentType]
        batch_size=None,
        sampler=items,
        collate_fn=_unchanged,
        num_workers=workers.number,
        prefetch_factor=workers.prefetch,
        multiprocessing_context="spawn",  # a fork would copy JAX's threads in an unknown state
    )
    results = iter(loader)
    while True:
        try:
            result = next(results, _END)
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            raise HfaxError(
                "A process that prepares data ended.",
                str(error).splitlines()[0],
                'Check the memory of the machine, and that a script that trains does so under `if __name__ == "__main__":`.',
            ) from error
        if result is _END:
            return
        if isinstance(result, _Failure):
            raise result.error()
        yield result


def in_order_with(
    function: Callable[[Any], Any], items: Iterable[tuple[Any, Any]], workers: Workers
) -> Iterator[tuple[Any, Any]]:
    """Like `in_order`, for items that each come after something that stays in this process, which is yielded with the result."""
    kept = deque[Any]()

    def bare() -> Iterator[Any]:
        for own, item in items:
            kept.append(own)
            yield item

    for result in in_order(function, bare(), workers):
        yield kept.popleft(), result


_END = object()


class _Computed:
    """What DataLoader calls a data set: its items are computed from those of the sampler."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._function(item)
        except HfaxError as error:  # DataLoader would make another exception of it, without its parts
            return _Failure(type(error), error.args, "")
        except Exception as error:
            return _Failure(HfaxError, (type(error).__name__, str(error)), traceback.format_exc())


class _Failure(NamedTuple):
    kind: type[HfaxError]
    parts: tuple[Any, ...]
    trace: str

    def error(self) -> HfaxError:
        if not self.trace:
            return self.kind(*self.parts)
        name, message = self.parts
        found = HfaxError(
            f"A process that prepares data failed: {name}: {message}",
            "A row, or the code that reads it, raised this.",
            "Set dataloader_num_workers=0, which raises it where it occurs.",
        )
        found.add_note(self.trace)
        return found


def _unchanged(value: Any) -> Any:
    return value
