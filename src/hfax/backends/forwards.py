"""Other forwards for some modules, on the instances, as long as a block lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def forwards_replaced(replaced: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """For the block, each module's `forward` is the function given for it; then what it was before."""
    given = list(replaced)
    before = [module.__dict__.get("forward") for module, _ in given]
    try:
        for module, forward in given:
            module.__dict__["forward"] = forward
        yield
    finally:
        for (module, _), forward in zip(given, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
