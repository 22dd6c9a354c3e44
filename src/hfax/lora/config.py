"""LoRA configuration: PEFT's `adapter_config.json`, and the model layers it targets.

Names and meanings are those of PEFT (https://huggingface.co/docs/peft/package_reference/lora). Unsupported options that change the
computation are rejected, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from hfax.errors import CheckpointCorruptError, InvalidInputError, UnsupportedOptionError

CONFIG_NAME = "adapter_config.json"
_ALL_LINEAR = "all-linear"
_USUAL = re.compile(
    r"(^|\.)(q_proj|v_proj|q|v|query|value|query_proj|value_proj|c_attn|query_key_value|qkv_proj|Wqkv)$"
)
"""Default target modules, as in PEFT's table for most architectures."""
_LAYER_INDEX = r".*?\.[^.]*\.(?P<idx>\d+)\."
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
"""Options that hfax does not support, and the values that disable them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA configuration.

    Args:
        r: rank.
        lora_alpha: outputs are scaled by `lora_alpha / r`.
        lora_dropout: dropout rate of the adapter's inputs during training.
        target_modules: layer names or name suffixes after a dot; a string is a regular expression for full names, or "all-linear"
            for every linear layer except the output head; None: query and value projections.
        exclude_modules: layers to exclude; same format as `target_modules`.
        layers_to_transform: layer indices to adapt; None: all.
        layers_pattern: name component before the layer index.
        rank_pattern: per-layer ranks, keyed by name suffix or regular expression.
        alpha_pattern: per-layer `lora_alpha`, keyed like `rank_pattern`.
        use_rslora: scale outputs by `lora_alpha / sqrt(r)`.
        use_dora: learn a magnitude per output (DoRA).
        modules_to_save: modules to train in full.
        base_model_name_or_path: base model name; saved but not checked.
        task_type: PEFT task type such as "CAUSAL_LM"; saved but not checked.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | list[str] | str | None = None
    exclude_modules: tuple[str, ...] | list[str] | str | None = None
    layers_to_transform: tuple[int, ...] | list[int] | int | None = None
    layers_pattern: tuple[str, ...] | list[str] | str | None = None
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] | list[str] | None = None
    base_model_name_or_path: str | None = None
    task_type: str | None = None

    def __post_init__(self) -> None:
        ranks = [self.r, *self.rank_pattern.values()]
        if any(not isinstance(r, int) or r < 1 for r in ranks) or not 0 <= self.lora_dropout < 1:
            raise InvalidInputError(
                f"An adapter cannot have r={self.r}, rank_pattern={dict(self.rank_pattern)}, lora_dropout={self.lora_dropout}.",
                "Ranks are positive integers; dropout is at least 0 and less than 1.",
                "Correct these values.",
            )

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Read the config from an adapter folder.

        Raises:
            CheckpointCorruptError: the file is missing or not an adapter config.
            UnsupportedOptionError: not a LoRA adapter, or an unsupported option.
        """
        path = folder / CONFIG_NAME
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            kind = given["peft_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointCorruptError(
                f"{path} is not an adapter config.",
                f"{type(error).__name__}: {error}",
                "Pass an adapter folder saved by PEFT or hfax.",
            ) from error
        if kind != "LORA":
            raise UnsupportedOptionError(
                f"{path} has peft_type {kind}.",
                "hfax supports LoRA, including DoRA and rank-stabilised scaling.",
                "Merge it into its base model with PEFT and load the merged model.",
            )
        wrong = {n: given[n] for n, fine in _NEUTRAL.items() if n in given and given[n] not in fine}
        if wrong:
            raise UnsupportedOptionError(
                f"{path} sets {', '.join(f'{n}={v!r}' for n, v in wrong.items())}.",
                "hfax does not support this option.",
                "Merge the adapter into its base model with PEFT and load the merged model.",
            )
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    def to_dict(self) -> dict[str, Any]:
        """The config as in PEFT's adapter_config.json."""
        as_lists = {n: list(v) if isinstance(v, tuple) else v for n, v in vars(self).items()}
        as_lists |= {"rank_pattern": dict(self.rank_pattern), "alpha_pattern": dict(self.alpha_pattern)}
        return {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "inference_mode": True, **as_lists}

    def rank(self, layer: str) -> int:
        """Rank of the named layer's adapter."""
        return self.rank_pattern.get(_key(self.rank_pattern, layer), self.r)

    def scaling(self, layer: str) -> float:
        """Scaling factor of the named layer's adapter."""
        alpha, rank = self.alpha_pattern.get(_key(self.alpha_pattern, layer), self.lora_alpha), self.rank(layer)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: torch.nn.Module) -> list[str]:
        """Names of the model's layers that get an adapter.

        Raises:
            InvalidInputError: no layer matches.
            UnsupportedOptionError: a layer type that does not support adapters.
        """
        parts = dict(module.named_modules())
        found = [name for name in parts if name and self._is_target(name, parts[name], module)]
        if not found:
            linear = sorted({n.rpartition(".")[2] for n, part in parts.items() if _is_linear(part)})
            raise InvalidInputError(
                f"target_modules={self.target_modules!r} matches no layer of {type(module).__name__}.",
                "The adapter is for another architecture, or the names are misspelled.",
                f"Use the model's linear layers: {', '.join(linear)}.",
            )
        for name in found:
            if not _is_linear(parts[name]) and not isinstance(parts[name], torch.nn.Embedding):
                raise UnsupportedOptionError(
                    f"{name} is a {type(parts[name]).__name__}.",
                    "hfax supports adapters on linear layers and embeddings.",
                    "Remove it from target_modules.",
                )
        return found

    def saved_modules(self, module: torch.nn.Module) -> list[str]:
        """Names of the modules that are trained in full.

        Raises:
            InvalidInputError: a name matches no module.
        """
        found: list[str] = []
        for wanted in self.modules_to_save or ():
            own = [
                n for n, _ in module.named_modules() if n.endswith(wanted)
            ]  # as in PEFT: "norm" also matches "…layernorm"
            if not own:
                raise InvalidInputError(
                    f"modules_to_save names {wanted!r}, which {type(module).__name__} does not have.",
                    "The adapter is for another architecture or another head.",
                    "Load the model for the task that the adapter was trained for (task=…).",
                )
            found += own
        return found

    def _is_target(self, name: str, part: torch.nn.Module, module: Any) -> bool:
        if _matches(self.exclude_modules, name):
            return False
        if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in self.modules_to_save or ()):
            return False
        if self.target_modules is None:
            return _is_linear(part) and _USUAL.search(name) is not None
        if self.target_modules == _ALL_LINEAR:
            return _is_linear(part) and part is not module.get_output_embeddings()
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        if name in self.target_modules:
            return True
        return _matches(self.target_modules, name) and self._is_in_layers(name)

    def _is_in_layers(self, name: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern or ()
        forms = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns] or [_LAYER_INDEX]
        match = next((m for form in forms if (m := re.match(form, name))), None)
        return match is not None and int(match["idx"]) in ((wanted,) if isinstance(wanted, int) else wanted)


def _matches(patterns: Any, name: str) -> bool:
    if not patterns:
        return False
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") for p in patterns)


def _key(patterns: Mapping[str, Any], layer: str) -> str:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", layer)), layer)


def _is_linear(part: torch.nn.Module) -> bool:
    return isinstance(part, (torch.nn.Linear, Conv1D))
