"""Loads checkpoint tensors into the module on a torch_xla device, one at a time, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hfax.load.conversion import check_complete, plan_conversion, run_step
from hfax.load.rules import check_shape, draw_missing, dtype_rule
from hfax.load.skeleton import Skeleton
from hfax.load.store import TensorStore


def load_weights(
    skeleton: Skeleton,
    store: TensorStore,
    device: torch.device,
    *,
    strict: bool,
    placed: Callable[[str, torch.Tensor], None] | None = None,
) -> None:
    """Read, convert, cast and place every weight.

    Args:
        skeleton: the meta parameters of its module become parameters on the device.
        store: the checkpoint tensors.
        device: the target device.
        strict: raise on missing and unexpected tensors.
        placed: called with every weight once it is on the device, to shard it over several.

    Raises:
        CheckpointCorruptError: tensors are missing, unexpected, misshapen or cannot be merged.
    """
    plan = plan_conversion(skeleton, store.names, store.rules)
    expected = {**skeleton.shapes, **{alias: skeleton.shapes[name] for alias, name in skeleton.tied.items()}}
    rule, there = dtype_rule(skeleton.module, skeleton.dtype), {}
    for step in plan.steps:
        for name, tensor in run_step(step, store.read, skeleton.module):
            check_shape(name, tensor, expected[name], step)
            wanted = rule(name, expected[name]) if tensor.is_floating_point() else tensor.dtype
            there[name] = tensor.to(wanted).to(device)
            if placed is not None:
                placed(skeleton.tied.get(name, name), there[name])
    tied = {}
    for alias, name in skeleton.tied.items():
        if alias in there and name not in there:
            there[name] = there.pop(alias)
        elif alias in there and not torch.equal(there[alias].cpu(), there[name].cpu()):
            continue  # stored with different values: not tied
        there.pop(alias, None)
        tied[alias] = name
    missing = check_complete(skeleton, set(there), plan.unexpected, strict=strict)
    there |= {name: tensor.to(device) for name, tensor in draw_missing(skeleton, missing).items()}
    put_in(skeleton, there, tied, device)


def put_in(skeleton: Skeleton, placed: dict[str, torch.Tensor], tied: dict[str, str], device: torch.device) -> None:
    """Set tensors as the module's parameters and buffers, tied ones as the same object; moves non-persistent buffers too."""
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in placed.items()}
    for name in [*placed, *tied]:
        path, _, own = name.rpartition(".")
        part = skeleton.module.get_submodule(path)
        source = tied.get(name, name)
        if own in part._buffers:
            part._buffers[own] = placed[source]
        else:
            part._parameters[own] = parameters[source]
    for name, buffer in skeleton.buffers.items():
        if buffer.ndim or buffer.is_floating_point():  # scalars that modelling code reads stay on the host
            path, _, own = name.rpartition(".")
            skeleton.module.get_submodule(path)._buffers[own] = buffer.to(device)
