"""Loading rules shared by all backends: a weight's dtype, its shape, and its initial value if the checkpoint lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hfax.errors import CheckpointCorruptError
from hfax.load.conversion import ConversionStep
from hfax.load.packed import PackedTensor
from hfax.load.skeleton import Skeleton


def check_shape(name: str, tensor: torch.Tensor | PackedTensor, expected: torch.Tensor, step: ConversionStep) -> None:
    """Raise `CheckpointCorruptError` if a stored tensor does not have the weight's shape."""
    if tensor.shape != expected.shape:
        raise CheckpointCorruptError(
            f"{name!r} has shape {tuple(tensor.shape)} in the checkpoint; the model expects {tuple(expected.shape)}.",
            f"config.json does not match the weights (stored as {step.sources[0][0]!r}).",
            "Use the config.json that was saved with these weights.",
        )


def dtype_rule(module: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.dtype]:
    """A function that gives each weight's dtype, by transformers' rules: the class's float32 exceptions take precedence."""
    from transformers.core_model_loading import build_glob_alternation

    plan = module._get_dtype_plan(dtype)
    if not plan:
        return lambda name, meta: meta.dtype
    search, groups, _ = build_glob_alternation(list(plan))

    def rule(name: str, meta: torch.Tensor) -> torch.dtype:
        match = search.search(name)
        return plan[groups[match.lastgroup]] if match and match.lastgroup else meta.dtype

    return rule


def draw_missing(skeleton: Skeleton, names: list[str]) -> dict[str, torch.Tensor]:
    """Initialise weights missing from the checkpoint as transformers does (torch's seed)."""
    if not names:
        return {}
    wanted = set(names)
    materialised: dict[str, torch.Tensor] = {}
    for prefix, module in skeleton.module.named_modules():
        own = [n for n in module._parameters if f"{prefix}.{n}".lstrip(".") in wanted]
        if not own:
            continue
        meta: dict[str, Any] = {n: module._parameters[n] for n in own}
        for name in own:
            module._parameters[name] = torch.nn.Parameter(
                torch.empty_like(meta[name], device="cpu"), requires_grad=False
            )
        owner = _owning_model(skeleton.module, prefix)
        owner._init_weights(module)
        for name in own:
            materialised[f"{prefix}.{name}".lstrip(".")] = module.get_parameter(name).detach()
            module._parameters[name] = meta[name]
    return materialised


def _owning_model(root: PreTrainedModel, prefix: str) -> PreTrainedModel:
    """The innermost PreTrainedModel that contains a submodule; its `_init_weights` applies."""
    owner, module = root, root
    for part in prefix.split(".") if prefix else []:
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
