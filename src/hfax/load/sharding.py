"""How weights are split over a mesh whose axis "tensor" shares out heads and inner widths, read off the model's own plan.

Turns a module and a mesh into a `PartitionSpec` for each weight. transformers' configs carry plans for tensor parallelism
(`base_model_tp_plan`); embedding tables and heads are split by vocabulary. What has no plan, or does not divide, is on every
device.
"""

from __future__ import annotations

import re

import jax
import torch
from jax.sharding import PartitionSpec as P
from transformers import PreTrainedModel

AXIS = "tensor"


def tensor_parallel_specs(
    module: PreTrainedModel, shapes: dict[str, torch.Tensor], mesh: jax.sharding.Mesh
) -> dict[str, P]:
    """A spec for every weight.

    Args:
        module: a skeleton's module.
        shapes: its weights, by name.
        mesh: with an axis "tensor".
    """
    plan = {name: style for name, style in (module.tp_plan or {}).items() if isinstance(style, str)}
    tables = {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, (torch.nn.Embedding,))} | {
        f"{path}.weight" for path, part in module.named_modules() if part is module.get_output_embeddings()
    }
    size = mesh.shape[AXIS]
    specs = {}
    for name, shape in shapes.items():
        axis = 0 if name in tables and shape.ndim == 2 else _axis(_style(plan, name), name, shape.ndim)
        divides = axis is not None and shape.shape[axis] % size == 0
        specs[name] = P(*(AXIS if i == axis and divides else None for i in range(shape.ndim)))
    return specs


def _style(plan: dict[str, str], name: str) -> str | None:
    """The plan's entry for a weight or for the layer that it belongs to."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    for key in (general, general.rpartition(".")[0]):
        if key in plan:
            return plan[key]
    return None


def _axis(style: str | None, name: str, ndim: int) -> int | None:
    """Which axis a style splits; experts' weights have one more in front."""
    if style is None or (name.endswith("bias") and "rowwise" in style):
        return None
    if "packed" in style and ndim == 3:
        # gate and up behind each other: split between the two, either would have to be moved. Split by what they both read.
        return 2
    if "colwise" in style:
        return max(ndim - 2, 0)
    return ndim - 1 if "rowwise" in style else None
