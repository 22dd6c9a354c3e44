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
from hfax.lora.options import supported

CONFIG_NAME = "adapter_config.json"
_ALL_LINEAR = "all-linear"
_USUAL = re.compile(
    r"(^|\.)(q_proj|v_proj|q|v|query|value|query_proj|value_proj|c_attn|query_key_value|qkv_proj|Wqkv)$"
)
"""Default target modules, as in PEFT's table for most architectures."""
_LAYER_INDEX = r".*?\.[^.]*\.(?P<idx>\d+)\."
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Heads that PEFT trains in full, by task type; a model has only some of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA configuration.

    Args:
        r: rank.
        lora_alpha: outputs are scaled by `lora_alpha / r`.
        lora_dropout: dropout rate of the adapter's inputs during training.
        target_modules: layer names or name suffixes after a dot; a string is a regular expression for full names, or "all-linear"
            for every linear layer except the output head; None: query and value projections, or none with `target_parameters`.
        target_parameters: parameters to adapt, such as a stack of experts ("mlp.experts.down_proj"): full names or suffixes.
        exclude_modules: layers to exclude; same format as `target_modules`.
        layers_to_transform: layer indices to adapt; None: all.
        layers_pattern: name component before the layer index.
        rank_pattern: per-layer ranks, keyed by name suffix or regular expression.
        alpha_pattern: per-layer `lora_alpha`, keyed like `rank_pattern`.
        use_rslora: scale outputs by `lora_alpha / sqrt(r)`.
        use_dora: learn a magnitude per output (DoRA).
        init_lora_weights: first values, as in PEFT: True: `lora_B` is zero; False: neither; "gaussian", "orthogonal", "pissa",
            "olora" or "mica".
        modules_to_save: modules to train in full; for the task types SEQ_CLS, TOKEN_CLS and QUESTION_ANS also the model's head.
        bias: biases to train: "none", "all", or "lora_only" for those of the adapted layers.
        base_model_name_or_path: base model name; saved but not checked.
        task_type: PEFT task type such as "CAUSAL_LM".
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | list[str] | str | None = None
    target_parameters: tuple[str, ...] | list[str] | None = None
    exclude_modules: tuple[str, ...] | list[str] | str | None = None
    layers_to_transform: tuple[int, ...] | list[int] | int | None = None
    layers_pattern: tuple[str, ...] | list[str] | str | None = None
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: bool | str = True
    modules_to_save: tuple[str, ...] | list[str] | None = None
    bias: str = "none"
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
        if self.bias not in ("none", "all", "lora_only"):
            raise InvalidInputError(
                f"bias={self.bias!r} is not an option.",
                "PEFT trains all biases or some.",
                "Use none, all or lora_only.",
            )
        if isinstance(self.target_parameters, str):
            raise InvalidInputError(
                f"target_parameters={self.target_parameters!r} is a string.",
                "It is a list of names.",
                "Put it in a list.",
            )
        if self.target_parameters and (self.lora_dropout or self.use_dora):
            raise InvalidInputError(
                "target_parameters does not go with lora_dropout or use_dora.",
                "A parameter's adapter is added to the weight, which does not see the layer's input.",
                "Use lora_dropout=0 and use_dora=False.",
            )

    @classmethod
    def of(cls, given: Any) -> LoraConfig:
        """A config from hfax's or peft's `LoraConfig`.

        Raises:
            InvalidInputError: not a config, or several.
            UnsupportedOptionError: another adapter type, or an unsupported option.
        """
        if isinstance(given, LoraConfig):
            return given
        if not hasattr(given, "peft_type") or not hasattr(given, "to_dict"):
            raise InvalidInputError(
                f"A {type(given).__name__} is not an adapter config.",
                "A model takes one LoraConfig of hfax or peft per adapter.",
                "Pass LoraConfig(…); call add_adapter once for each of several adapters.",
            )
        source = f"The {type(given).__name__}"
        if getattr(given, "_custom_modules", None):
            raise UnsupportedOptionError(
                f"{source} has custom modules.", "They are torch code of PEFT's layers.", "Use layers that PEFT has."
            )
        return cls.from_fields(given.to_dict(), source)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], source: str) -> LoraConfig:
        """A config from the fields of a PEFT config.

        Args:
            given: as in `adapter_config.json`.
            source: what has them, for errors.

        Raises:
            InvalidInputError: fields of no PEFT config.
            UnsupportedOptionError: not a LoRA adapter, or an unsupported option.
        """
        return cls(**supported(given, [f.name for f in dataclasses.fields(cls)], source))

    def to_dict(self) -> dict[str, Any]:
        """The config as in PEFT's adapter_config.json."""
        as_lists = {n: list(v) if isinstance(v, (tuple, set)) else v for n, v in vars(self).items()}
        as_lists |= {"rank_pattern": dict(self.rank_pattern), "alpha_pattern": dict(self.alpha_pattern)}
        return {"peft_type": "LORA", "fan_in_fan_out": False, "inference_mode": True, **as_lists}

    def rank(self, layer: str) -> int:
        """Rank of the named layer's adapter."""
        return self.rank_pattern.get(_key(self.rank_pattern, layer), self.r)

    def scaling(self, layer: str) -> float:
        """Scaling factor of the named layer's adapter."""
        alpha, rank = self.alpha_pattern.get(_key(self.alpha_pattern, layer), self.lora_alpha), self.rank(layer)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: torch.nn.Module) -> list[str]:
        """Names of the model's layers and parameters that get an adapter.

        Raises:
            InvalidInputError: no layer matches.
            UnsupportedOptionError: a layer type that does not support adapters.
        """
        parts = dict(module.named_modules())
        layers, parameters = self.target_layers(module), self._target_parameters(module)
        if not layers and not parameters:
            linear = sorted({n.rpartition(".")[2] for n, part in parts.items() if _is_linear(part)})
            raise InvalidInputError(
                f"target_modules={self.target_modules!r} matches no layer of {type(module).__name__}.",
                "The adapter is for another architecture, or the names are misspelled.",
                f"Use the model's linear layers: {', '.join(linear)}.",
            )
        for name in layers:
            is_table = isinstance(parts[name], torch.nn.Embedding)
            if not (_is_linear(parts[name]) or (is_table and not self.use_dora)):
                raise UnsupportedOptionError(
                    f"{name} is a {type(parts[name]).__name__}.",
                    "hfax supports adapters on linear layers, and without use_dora on embeddings.",
                    "Remove it from target_modules.",
                )
        return [*layers, *parameters]

    def target_layers(self, module: torch.nn.Module) -> list[str]:
        """Names of the layers that `target_modules` selects."""
        return [name for name, part in module.named_modules() if name and self._is_target(name, part, module)]

    def saved_modules(self, module: torch.nn.Module) -> list[str]:
        """Names of the modules that are trained in full.

        Raises:
            InvalidInputError: a name matches no module.
        """
        names = [n for n, _ in module.named_modules()]
        heads = _HEADS.get(self.task_type or "", ())
        # As in PEFT: "norm" also matches "…layernorm".
        own = {wanted: [n for n in names if n.endswith(wanted)] for wanted in (*(self.modules_to_save or ()), *heads)}
        has_head = any(own.get(head) for head in heads)
        for wanted, found in own.items():
            if not found and wanted in (self.modules_to_save or ()) and not (wanted in heads and has_head):
                raise InvalidInputError(
                    f"modules_to_save names {wanted!r}, which {type(module).__name__} does not have.",
                    "The adapter is for another architecture or another head.",
                    "Load the model for the task that the adapter was trained for (task=…).",
                )
        return list(dict.fromkeys(name for found in own.values() for name in found))

    @property
    def targets_all_linear(self) -> bool:
        """Whether `target_modules` is "all-linear"."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == _ALL_LINEAR

    def selects(self, name: str) -> bool:
        """Whether a name is a target, by itself: not for None and "all-linear", which depend on the layers."""
        if _matches(self.exclude_modules, name):
            return False
        whole = (*(self.modules_to_save or ()), *_HEADS.get(self.task_type or "", ()))
        if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in whole):
            return False
        if isinstance(self.target_modules, str):
            return self.targets_all_linear or re.fullmatch(self.target_modules, name) is not None
        if self.target_modules is None or name in self.target_modules:
            return True
        return _matches(self.target_modules, name) and self._is_in_layers(name)

    def _is_target(self, name: str, part: torch.nn.Module, module: Any) -> bool:
        if not self.selects(name):
            return False
        if self.target_modules is None:
            return not self.target_parameters and _is_linear(part) and _USUAL.search(name) is not None
        return not self.targets_all_linear or (_is_linear(part) and part is not module.get_output_embeddings())

    def require_parameters(self, module: torch.nn.Module) -> None:
        """Raise unless each of `target_parameters` is there: PEFT leaves out the others.

        Raises:
            InvalidInputError: a name matches no parameter.
        """
        names = [n for n, _ in module.named_parameters()]
        if missing := [w for w in self.target_parameters or () if not any(_matches([w], n) for n in names)]:
            raise InvalidInputError(
                f"target_parameters names {missing[0]!r}, which {type(module).__name__} does not have.",
                "Names are full, or suffixes after a dot.",
                f"Use names like {', '.join(names[:3])}.",
            )

    def _target_parameters(self, module: torch.nn.Module) -> list[str]:
        """Names of the parameters that `target_parameters` selects.

        Raises:
            UnsupportedOptionError: a parameter that cannot be adapted.
        """
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        wanted = self.target_parameters or ()
        found = [n for n in shapes if _matches(wanted, n)]
        layers = set(self.target_layers(module)) if found else set()
        for name in found:
            if len(shapes[name]) not in (2, 3) or name.rpartition(".")[0] in ("", *layers):
                raise UnsupportedOptionError(
                    f"target_parameters names {name}, of shape {shapes[name]}.",
                    "Parameters with adapters have two or three axes, and are of a module that has no adapter itself.",
                    "Remove it from target_parameters, or its module from target_modules.",
                )
        return found

    def _is_in_layers(self, name: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern or ()
        forms = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns] or [_LAYER_INDEX]
        match = next((m for form in forms if (m := re.match(form, name))), None)
        return match is not None and int(match["idx"]) in ((wanted,) if isinstance(wanted, int) else wanted)


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of an adapter folder's config, of any type.

    Raises:
        CheckpointCorruptError: the file is missing or not an adapter config.
    """
    path = folder / CONFIG_NAME
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        given["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(
            f"{path} is not an adapter config.",
            f"{type(error).__name__}: {error}",
            "Pass an adapter folder saved by PEFT or hfax.",
        ) from error
    return given


def _matches(patterns: Any, name: str) -> bool:
    if not patterns:
        return False
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") for p in patterns)


def _key(patterns: Mapping[str, Any], layer: str) -> str:
    return next((key for key in patterns if is_pattern_of(key, layer)), layer)


def is_pattern_of(key: str, layer: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` is for this layer."""
    return re.match(rf"(.*\.)?({key})$", layer) is not None


def _is_linear(part: torch.nn.Module) -> bool:
    return isinstance(part, (torch.nn.Linear, Conv1D))
