"""Passes the grids of packed images to modelling code as arguments of the program, and finds the models for which that works."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hfax.patches.packed_images import PackedFeatures, PackedGrids, attending_within_segments
from hfax.tracing.geometry import GRIDS, ORDER
from hfax.tracing.torchax import constant

logger = logging.getLogger(__name__)


class _TextModelReached(Exception):
    pass


@contextlib.contextmanager
def packed(module: torch.nn.Module, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Within the block, the arguments of a forward with traced grids as `PackedGrids`, or with an order of features.

    Args:
        module: the model, within a trace.
        arguments: tensors of the trace by name. Without grids or an order among them, nothing changes.
    """
    found = dict(arguments)
    for patches, grids in GRIDS.items():
        if grids in arguments:
            number = len(arguments[patches])
            found[grids] = PackedGrids(arguments[grids], constant(lambda n=number: torch.tensor([n])))
    if ORDER in arguments:
        found[ORDER] = PackedFeatures(arguments[ORDER], len(arguments["pixel_values"]))
    with attending_within_segments(module) if set(GRIDS.values()) & set(found) else contextlib.nullcontext():
        yield found


def takes_packed(module: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether modelling code needs no more of images' sizes than `packed` gives, up to the call of its text model.

    Args:
        module: the model, within a trace.
        arguments: tensors of the trace by name, grids or an order of features among them.
    """
    if not hasattr(module, "get_decoder") or (text := module.get_decoder()) in (None, module):
        return False

    def reached(*args: Any, **kwargs: Any) -> None:
        raise _TextModelReached

    before = text.__dict__.get("forward")
    text.forward = reached
    grids: list[PackedGrids] = []
    try:
        with packed(module, arguments) as given:
            grids += [value for value in given.values() if isinstance(value, PackedGrids)]
            module(**given)
    except _TextModelReached:
        return all(any(segments.is_used for segments in grid.segments) for grid in grids)
    except Exception as error:  # whatever the code does with sizes: it then has a program for each mix of sizes
        logger.debug("%s: image grids stay constants of programs: %r", type(module).__name__, error)
    finally:
        del text.forward
        if before is not None:
            text.forward = before
    return False
