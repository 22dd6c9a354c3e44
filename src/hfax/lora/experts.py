"""Adapters of experts: which parameters old layer names mean, and how PEFT's files name and stack an adapter's arrays.

transformers 4 had one linear layer per expert and projection, and a linear router; transformers 5 has stacked parameters. As PEFT
does (`peft.utils.transformers_weight_conversion`), names of the old layers select the parameters that replaced them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

from hfax.errors import InvalidInputError
from hfax.lora.targets import Target
from hfax.tracing.adapters import LORA_A, LORA_B

if TYPE_CHECKING:
    from hfax.lora.config import LoraConfig

_PARAMETER_OF = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
"""PEFT's table: old layer name to parameter, by transformers' pattern for the architecture."""
_FUSED = "gate_up_proj"
_ONE_EXPERT = re.compile(r"(?P<box>.*\.experts)\.(?P<expert>\d+)\.(?P<layer>\w+)\.(?P<part>lora_[AB]\.weight)$")


def with_parameters(config: LoraConfig, module: torch.nn.Module) -> LoraConfig:
    """The config with `target_parameters` in place of layers that transformers 5 stacked, as in PEFT.

    Raises:
        InvalidInputError: only one of the two projections that are stacked together is a target.
    """
    table = _table_of(module)
    if not table or config.target_modules is None:
        return config
    wanted = config.target_modules
    names = _named_by(wanted, config, module, table) if isinstance(wanted, str) else list(wanted)
    old = {n: next((o for o in table if n == o or n.endswith(f".{o}")), None) for n in names}
    if isinstance(wanted, str) and not any(old.values()):  # PEFT would forget what else the expression says
        return config
    fused = {o for o in old.values() if o is not None and table[o] == _FUSED}
    both = sorted(o for o, new in table.items() if new == _FUSED)
    if len(fused) == 1:
        raise InvalidInputError(
            f"target_modules names {fused.pop()} without the other of {', '.join(both)}.",
            f"{type(module).__name__} stacks both in {_FUSED}.",
            "Name both or none.",
        )
    parameters = {*(config.target_parameters or ()), *(table[o] for o in old.values() if o is not None)}
    changes: dict[str, Any] = {"target_modules": sorted(n for n in names if old[n] is None)}
    if fused:  # the rank of both, with the scaling of one
        key = rf".*\.{_FUSED}"
        changes["rank_pattern"] = {**config.rank_pattern, key: config.r * 2}
        changes["alpha_pattern"] = {**config.alpha_pattern, key: config.lora_alpha * 2}
    return dataclasses.replace(config, target_parameters=sorted(parameters), **changes)


def _named_by(wanted: str, config: LoraConfig, module: Any, table: Mapping[str, str]) -> list[str]:
    """Last parts of the names that a string selects, with those of layers that are parameters now."""
    parameters = [name for name, _ in module.named_parameters()]
    if config.targets_all_linear:
        return sorted({n.rpartition(".")[2] for n in config.target_layers(module)} | set(table))
    names = [*(name for name, _ in module.named_modules() if name), *parameters]
    found = {n.rpartition(".")[2] for n in names if config.selects(n)}
    for old, new in table.items():
        boxes = {n.rpartition(".")[0] for n in parameters if n.rpartition(".")[2] == new}
        if any(config.selects(f"{box}.{old}") for box in boxes):
            found.add(old)
    return sorted(found)


def _table_of(module: Any) -> Mapping[str, str]:
    kind = getattr(module.config, "model_type", None)
    pattern = "mixtral" if kind == "mixtral" else _MODEL_TO_CONVERSION_PATTERN.get(str(kind))
    return _PARAMETER_OF.get(str(pattern), {})


# Names in PEFT's files


def from_peft(stored: Mapping[str, torch.Tensor], module: torch.nn.Module, targets: Iterable[Target]) -> dict[str, Any]:
    """A file's tensors under the names of the layers and parameters that they adapt, experts in front."""
    found = _stacked(stored, module)
    renamed: dict[str, tuple[str, Target]] = {n: (own, t) for own, (n, t) in _names_in_peft(targets).items()}
    for name in [n for n in found if n in renamed]:
        own, target = renamed[name]
        tensor = found.pop(name)
        count = target.experts
        if count is not None and own.endswith(LORA_A) and tensor.shape[0] % count == 0:
            tensor = tensor.unflatten(0, (count, -1))
        elif count is not None and own.endswith(LORA_B) and tensor.shape[1] % count == 0:
            tensor = tensor.unflatten(1, (-1, count)).permute(2, 0, 1)
        found[own] = tensor
    return found


def to_peft(arrays: Mapping[str, Any], targets: Iterable[Target]) -> dict[str, Any]:
    """Undo `from_peft`: arrays as PEFT's files name and lay them out."""
    names = _names_in_peft(targets)
    found: dict[str, Any] = {}
    for own, array in arrays.items():
        name, target = names.get(own, (own, None))
        if target is not None and target.experts is not None:
            rows = array if own.endswith(LORA_A) else array.transpose(1, 2, 0)
            array = rows.reshape(-1, rows.shape[-1]) if own.endswith(LORA_A) else rows.reshape(rows.shape[0], -1)
        found[name] = array
    return found


def _names_in_peft(targets: Iterable[Target]) -> dict[str, tuple[str, Target]]:
    """PEFT wraps a module once for each of its parameters, the first one innermost."""
    by_owner: dict[str, list[Target]] = {}
    for target in targets:
        if target.is_parameter:
            by_owner.setdefault(target.path.rpartition(".")[0], []).append(target)
    found: dict[str, tuple[str, Target]] = {}
    for owner, own in by_owner.items():
        for depth, target in enumerate(reversed(own)):
            for part in (LORA_A, LORA_B):
                found[f"{target.path}.{part}"] = (f"{owner}{'.base_layer' * depth}.{part}", target)
    return found


def _stacked(stored: Mapping[str, torch.Tensor], module: torch.nn.Module) -> dict[str, Any]:
    """Adapters of single experts, from transformers 4, as those of the stacked parameters."""
    table = _table_of(module)
    found: dict[str, Any] = {}
    single: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in stored.items():
        own = name.replace(".block_sparse_moe.", ".mlp.")
        match = _ONE_EXPERT.match(own)
        if match and match["layer"] in table:
            key = f"{match['box']}.{table[match['layer']]}.{match['part']}"
            single.setdefault(key, {}).setdefault(match["layer"], {})[int(match["expert"])] = tensor
        else:
            found[own] = tensor
    for key, layers in single.items():
        ordered = [layers[n] for n in table if n in layers]
        stacks = [torch.stack([experts[i] for i in sorted(experts)]) for experts in ordered]
        found[key] = torch.cat(stacks, 1) if key.endswith(LORA_A) else _block_diagonal(stacks)
    return found


def _block_diagonal(stacks: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.block_diag(*each) for each in zip(*stacks, strict=True)])
