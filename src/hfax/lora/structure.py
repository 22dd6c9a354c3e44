"""Which of a model's weights an adapter adds to or stores, and which of them it cannot. Knows names and shapes, not values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hfax.errors import UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.lora import initial
from hfax.lora.config import LoraConfig, is_pattern_of
from hfax.lora.experts import to_peft
from hfax.lora.targets import Target, target_of

_log = logging.getLogger(__name__)


class Structure:
    """A model's weights as adapters see them.

    Args:
        module: the model, without weights.
        tied: alias to name, for weights that share an array.
    """

    def __init__(self, module: torch.nn.Module, tied: Mapping[str, str]) -> None:
        self._module = module
        self._tied = tied

    def targets(self, config: LoraConfig, params: Mapping[str, Any]) -> list[Target]:
        """What an adapter changes.

        Raises:
            InvalidInputError: nothing matches.
            UnsupportedOptionError: a parameter of its own is quantized, or a layer's type has no adapters.
        """
        targets = [target_of(self._module, path) for path in config.targets(self._module)]
        self.reject_quantized([t.weight for t in targets if t.is_parameter], params)
        return targets

    def expected_shapes(self, config: LoraConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of an adapter's arrays, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in config.targets(self._module):
            parts = target_of(self._module, path).shapes(config.rank(path), use_dora=config.use_dora)
            shapes |= {f"{path}.{part}": shape for part, shape in parts.items()}
        weights = dict(self._module.named_parameters(remove_duplicate=False))
        return shapes | {n: tuple(weights[n].shape) for n in self.saved_weights(config)}

    def trained(self, config: LoraConfig, params: Mapping[str, Any]) -> set[str]:
        """Names of the weights that an adapter trains."""
        is_mica = initial.kind_of(config) == "mica"  # its lora_B stays as it is
        frozen = {f"{t.path}.{t.parts[1]}" for t in self.targets(config, params)} if is_mica else set[str]()
        return set(self.expected_shapes(config)) - frozen

    def saved_weights(self, config: LoraConfig) -> list[str]:
        """Weights that an adapter stores in full (`modules_to_save` and `bias`).

        Raises:
            UnsupportedOptionError: a weight is tied.
        """
        names = [
            n
            for path in config.saved_modules(self._module)
            for n, _ in self._module.get_submodule(path).named_parameters(prefix=path)
        ]
        biases = [n for n, _ in self._module.named_parameters(remove_duplicate=False) if n.endswith(".bias")]
        if config.bias == "all":
            names += biases
        elif config.bias == "lora_only":
            layers = {f"{path}.bias" for path in config.target_layers(self._module)}
            names += [n for n in biases if n in layers]
        for name in names:
            if self.tied_to(self.own_name(name)):
                raise UnsupportedOptionError(
                    f"The adapter trains {name} in full (modules_to_save or bias), but it is tied to another weight.",
                    "An adapter would change both.",
                    "Remove it from modules_to_save, or load a checkpoint with untied weights.",
                )
        return list(dict.fromkeys(names))

    def in_peft(self, config: LoraConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """An adapter's arrays as PEFT names them."""
        targets = [target_of(self._module, path) for path in config.targets(self._module)]
        found = to_peft(arrays, targets)
        for target in targets:
            if (bias := f"{target.path}.bias") in found and not target.is_parameter:
                found[f"{target.path}.base_layer.bias"] = found.pop(bias)
        return found

    def warn_of_what_is_left_out(self, config: LoraConfig, targets: list[Target]) -> None:
        """Patterns of no layer, and the experts of some architectures, which PEFT's "all-linear" leaves out without a word."""
        unused = [
            key
            for key in (*config.rank_pattern, *config.alpha_pattern)
            if not any(is_pattern_of(key, t.path) for t in targets)
        ]
        if unused:
            _log.warning("rank_pattern and alpha_pattern match no adapted layer, as in PEFT: %s", ", ".join(unused))
        stacks = [n for n, p in self._module.named_parameters() if p.ndim == 3 and ".experts." in n]
        if config.targets_all_linear and stacks:
            _log.warning(
                "target_modules='all-linear' adapts no experts, as in PEFT: %s is no linear layer. Name it in target_parameters.",
                stacks[0],
            )

    def tied_to(self, own: str) -> set[str]:
        """All names of a weight that has several; `own` is the one in the weights."""
        names = {alias for alias, name in self._tied.items() if name == own}
        return names | {own} if names else set()

    def reject_quantized(self, names: list[str], params: Mapping[str, Any]) -> None:
        """Raise if a weight that an adapter changes itself is quantized.

        Raises:
            UnsupportedOptionError: one is.
        """
        if wrong := [n for n in names if isinstance(params.get(self.own_name(n)), QuantizedArray)]:
            raise UnsupportedOptionError(
                f"The adapter changes {wrong[0]} itself, which is quantized.",
                "Only adapters of layers are computed beside quantized weights.",
                "Load the model without quantization, or leave it out of the adapter.",
            )

    def own_name(self, name: str) -> str:
        """The name under which a weight is stored, which may be tied."""
        return self._tied.get(name, name)
