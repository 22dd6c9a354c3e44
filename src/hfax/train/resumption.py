"""What shapes a run's losses, as JSON beside each checkpoint, and whether it is still the same when the run is resumed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.train.sources import is_indexable
from hfax.train.streaming import StreamingDataset

logger = logging.getLogger(__name__)

Shape = dict[str, Any]
_SAMPLED = 256
"""Rows of a data set whose contents are compared. Reading all of a large or lazily computed one would take as long as an epoch."""
_MEANINGS = {
    "rows_per_step": " (per_device_train_batch_size, gradient_accumulation_steps and data-parallel shards multiplied)",
    "max_steps": " (the learning rate falls towards the last step)",
}


def check_unchanged(then: Shape, now: Shape, accepted: Collection[str]) -> None:
    """Compare what shaped a run with what would shape it now.

    Args:
        then: stored with the checkpoint.
        now: of the run that resumes it.
        accepted: fields whose change is accepted; it is logged.

    Raises:
        InvalidInputError: other fields differ, which are named with both values, or `accepted` names no field.
    """
    if unknown := sorted(set(accepted) - set(now)):
        raise InvalidInputError(
            f"accept_changes names {unknown[0]!r}.",
            "It is not compared when a run is resumed.",
            f"Name some of {', '.join(sorted(now))}.",
        )
    now = json.loads(json.dumps(now))
    changed = [name for name in now if then.get(name) != now[name]]
    for name in (name for name in changed if name in accepted):
        logger.warning("resuming with another %s: %s, now %s", name, _shown(then.get(name)), _shown(now[name]))
    if refused := [name for name in changed if name not in accepted]:
        differences = [
            f"{name}{_MEANINGS.get(name, '')} was {_shown(then.get(name))} and is now {_shown(now[name])}"
            for name in refused
        ]
        names = " ".join(f"--accept-change {name}" for name in refused)
        raise InvalidInputError(
            f"The run to resume was another one: {'; '.join(differences)}.",
            "Its losses would no longer be those of an uninterrupted run.",
            f"Restore the old value, use another output_dir, or accept the change: "
            f"trainer.resume(accept_changes={refused!r}), hfax train --resume {names}.",
        )


def described(value: Any) -> Any:
    """A function or object as JSON: its name, and the plain values that it was made with, such as the beta of a DPO loss."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, functools.partial):
        return [described(value.func), described(value.args), described(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": _name(type(value)), **fields}
    return _described_function(value) if hasattr(value, "__code__") else _name(value)


def fingerprint(dataset: Any, first: Any) -> Shape:
    """The number of rows of a data set and a hash of some, evenly spaced; of one without length, of its first row.

    Args:
        dataset: what rows are read from.
        first: its first row, as read before.
    """
    if isinstance(dataset, StreamingDataset):
        options = {
            name: getattr(dataset, name) for name in ("max_length", "packing", "packing_strategy", "buffer_size")
        }
        return {**fingerprint(dataset.rows, next(iter(dataset.rows), None)), "prepared": _hash([first]), **options}
    if not is_indexable(dataset):
        return {"hash": _hash([first])}
    count = len(dataset)
    indices = sorted({round(i * (count - 1) / max(_SAMPLED - 1, 1)) for i in range(min(_SAMPLED, count * 2))})
    indices = list(range(count)) if count <= _SAMPLED else indices
    if not count or _hash([dataset[0]]) != _hash([first]):  # rows that are drawn anew each time
        return {"rows": count}
    return {"rows": count, "hash": _hash(dataset[i] for i in indices)}


def _described_function(function: Any) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    made_with = {
        name: value
        for name, value in zip(function.__code__.co_freevars, cells, strict=False)
        if isinstance(value, (bool, int, float, str))
    }
    return {"name": _name(function), **({"with": made_with} if made_with else {})}


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _hash(rows: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in _parts(row):
            found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Any:
    """A row's contents as bytes, the same for lists, tuples and arrays of the same numbers."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            if str(name).startswith("ref_"):  # computed from the other columns, on devices that may round differently
                continue
            yield str(name).encode()
            yield from _parts(value[name])
        return
    array = np.asarray(value) if not isinstance(value, (str, bytes)) else None
    if array is not None and array.dtype.kind in "biuf":
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
        yield str(array.shape).encode()
        yield array.tobytes()
    else:
        yield str(value).encode()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
