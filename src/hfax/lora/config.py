"""What an adapter is: peft's `adapter_config.json`, and the layers of a model that it names.

Names and meanings are peft's (https://huggingface.co/docs/peft/package_reference/lora). Options that change what is computed and
that hfax does not have are refused, never ignored.
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
"""Where adapters go if a config names nothing, as peft's table has it for most architectures."""
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
"""Options that hfax does not have, and what leaves them out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """An adapter's shape.

    Args:
        r: rank.
        lora_alpha: outputs are scaled by `lora_alpha / r`.
        lora_dropout: of the adapter's inputs, in training.
        target_modules: names of layers, or their ends behind a dot; a text is a regular expression for whole names, or "all-linear"
            for every linear layer but the output head; None: queries and values.
        exclude_modules: likewise, left out.
        layers_to_transform: numbers of the layers; None: all.
        layers_pattern: what stands before such a number in a name.
        rank_pattern: ranks of some layers, by the ends of their names or regular expressions of them.
        alpha_pattern: the same for `lora_alpha`.
        use_rslora: outputs are scaled by `lora_alpha / sqrt(r)`.
        use_dora: a magnitude of its own for each output (DoRA).
        modules_to_save: names of modules that are trained whole.
        base_model_name_or_path: of the model that it belongs to; written down, not looked at.
        task_type: peft's, "CAUSAL_LM" for instance; likewise.
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
                "Ranks are positive whole numbers, dropout is at least 0 and less than 1.",
                "Change those values.",
            )

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """From a folder that peft wrote.

        Raises:
            CheckpointCorruptError: the file is missing or no such config.
            UnsupportedOptionError: another kind of adapter, or an option that hfax does not have.
        """
        path = folder / CONFIG_NAME
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            kind = given["peft_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointCorruptError(
                f"{path} is no config of an adapter.",
                f"{type(error).__name__}: {error}",
                "Pass a folder that peft or hfax saved an adapter to.",
            ) from error
        if kind != "LORA":
            raise UnsupportedOptionError(
                f"{path} is of an adapter of the kind {kind}.",
                "hfax computes LoRA, with DoRA and rank-stabilised scaling.",
                "Merge it into its base model with peft and save that.",
            )
        wrong = {n: given[n] for n, fine in _NEUTRAL.items() if n in given and given[n] not in fine}
        if wrong:
            raise UnsupportedOptionError(
                f"{path} sets {', '.join(f'{n}={v!r}' for n, v in wrong.items())}.",
                "hfax does not compute that.",
                "Merge the adapter into its base model with peft and save that.",
            )
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    def to_dict(self) -> dict[str, Any]:
        """As peft's file has it."""
        as_lists = {n: list(v) if isinstance(v, tuple) else v for n, v in vars(self).items()}
        as_lists |= {"rank_pattern": dict(self.rank_pattern), "alpha_pattern": dict(self.alpha_pattern)}
        return {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "inference_mode": True, **as_lists}

    def rank(self, layer: str) -> int:
        """Of the layer of that name."""
        return self.rank_pattern.get(_key(self.rank_pattern, layer), self.r)

    def scaling(self, layer: str) -> float:
        """What the outputs of its adapter are multiplied with."""
        alpha, rank = self.alpha_pattern.get(_key(self.alpha_pattern, layer), self.lora_alpha), self.rank(layer)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: torch.nn.Module) -> list[str]:
        """Names of the layers of a model that get an adapter.

        Raises:
            InvalidInputError: there are none.
            UnsupportedOptionError: one is of a kind that hfax has no adapters for.
        """
        parts = dict(module.named_modules())
        found = [name for name in parts if name and self._is_target(name, parts[name], module)]
        if not found:
            linear = sorted({n.rpartition(".")[2] for n, part in parts.items() if _is_linear(part)})
            raise InvalidInputError(
                f"target_modules={self.target_modules!r} matches no layer of {type(module).__name__}.",
                "The adapter is of another architecture, or the names are misspelt.",
                f"The linear layers are named {', '.join(linear)}.",
            )
        for name in found:
            if not _is_linear(parts[name]) and not isinstance(parts[name], torch.nn.Embedding):
                raise UnsupportedOptionError(
                    f"{name} is a {type(parts[name]).__name__}.",
                    "hfax has adapters for linear layers and embeddings.",
                    "Name other layers in target_modules.",
                )
        return found

    def saved_modules(self, module: torch.nn.Module) -> list[str]:
        """Names of the modules that are trained whole.

        Raises:
            InvalidInputError: one names nothing.
        """
        found: list[str] = []
        for wanted in self.modules_to_save or ():
            own = [
                n for n, _ in module.named_modules() if n.endswith(wanted)
            ]  # so does peft: "norm" is also "…layernorm"
            if not own:
                raise InvalidInputError(
                    f"modules_to_save names {wanted!r}, which {type(module).__name__} does not have.",
                    "The adapter is of another architecture, or of another head.",
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
