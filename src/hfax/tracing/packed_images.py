"""Passes the grids of packed images to modelling code as arguments of the program, and finds the models for which that works."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hfax.patches.control_flow import collecting_checks
from hfax.patches.packed_images import PackedFeatures, PackedGrids, attending_within_segments
from hfax.tracing.constants import is_host
from hfax.tracing.geometry import GRIDS, ORDER
from hfax.tracing.operands import is_tensor
from hfax.tracing.torchax import constant

logger = logging.getLogger(__name__)


_COUNTING = ("get_placeholder_mask", "_deepstack_process")
"""Methods of modelling code that compare the number of features with that of tokens for them."""


class _TextModelReached(Exception):
    pass


@contextlib.contextmanager
def packed(
    module: torch.nn.Module, arguments: Mapping[str, Any], *, leaves_features: bool = False
) -> Iterator[dict[str, Any]]:
    """Within the block, the arguments of a forward with traced grids as `PackedGrids`, or with an order of features.

    Args:
        module: the model, within a trace.
        arguments: tensors of the trace by name. Without traced grids or an order among them, nothing changes.
        leaves_features: features of a black image are left over. The caller has compared the number of the others with that of
            tokens for them, as the model then does not.
    """
    found = dict(arguments)
    traced = {patches: grids for patches, grids in GRIDS.items() if _is_traced(arguments.get(grids))}
    for patches, grids in traced.items():
        number = len(arguments[patches])
        found[grids] = PackedGrids(arguments[grids], constant(lambda n=number: torch.tensor([n])))
    order: Any = arguments.get(ORDER)
    if _is_traced(order) and order.ndim == 1:
        found[ORDER] = PackedFeatures(order, len(arguments["pixel_values"]))
    with contextlib.ExitStack() as stack:
        if traced:
            stack.enter_context(attending_within_segments(module))
        if traced and leaves_features:
            stack.enter_context(_leaving_features(module))
        yield found


def _is_traced(value: Any) -> bool:
    return is_tensor(value) and not is_host(value)


@contextlib.contextmanager
def _leaving_features(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, the model does not check that it has as many features as tokens for them."""
    parts = [(part, name) for part in module.modules() for name in _COUNTING if hasattr(part, name)]

    def unchecked(method: Any, *args: Any, **kwargs: Any) -> Any:
        with collecting_checks({}):
            return method(*args, **kwargs)

    for part, name in parts:
        setattr(part, name, functools.partial(unchecked, getattr(part, name)))
    try:
        yield
    finally:
        for part, name in parts:
            delattr(part, name)


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
