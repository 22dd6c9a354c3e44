"""Which fields of PEFT's `LoraConfig` hfax honours, which change no numbers, and which it refuses.

Knows names and values, no models. A field that is in no table is from another version of PEFT: it is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hfax.errors import InvalidInputError, UnsupportedOptionError

_OFF = (None, False, [], {})
INERT = {
    "auto_mapping": "how PEFT finds the base model's class",
    "peft_version": "",
    "revision": "of the base model",
    "inference_mode": "whether PEFT's arrays require gradients",
    "fan_in_fan_out": "PEFT and hfax decide by the layer's type",
    "megatron_core": "only read with megatron_config",
    "qalora_group_size": "only read with use_qalora",
    "loftq_config": "only read with init_lora_weights='loftq'",
    "eva_config": "only read with init_lora_weights='eva', before training",
    "corda_config": "only read with init_lora_weights='corda'",
    "lora_ga_config": "only read with init_lora_weights='lora_ga'",
    "runtime_config": "where PEFT computes",
    "merge_weights": "of the first versions of PEFT: when weights are merged",
}
"""Fields that change no numbers, and why."""
REFUSED = (
    "lora_bias",
    "use_qalora",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "use_bdlora",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
    "ensure_weight_tying",
)
"""Fields that hfax does not implement: only values that turn them off are accepted."""


def is_off(value: Any) -> bool:
    """Whether a field's value turns it off."""
    return any(value is off or value == off for off in _OFF)


def supported(given: Mapping[str, Any], honoured: Collection[str], source: str) -> dict[str, Any]:
    """The honoured fields of a PEFT config that have values.

    Args:
        given: fields as in PEFT's `adapter_config.json`.
        honoured: names of the fields that hfax honours.
        source: what has these fields, for errors.

    Raises:
        InvalidInputError: fields of no PEFT config.
        UnsupportedOptionError: not a LoRA adapter, or a field that hfax does not honour.
    """
    kind = _plain(given.get("peft_type"))
    if kind is None:
        raise InvalidInputError(
            f"{source} is not a PEFT config.", "It has no peft_type.", "Pass a LoraConfig of hfax or peft."
        )
    if kind != "LORA":
        raise UnsupportedOptionError(
            f"{source} has peft_type {kind}.",
            "hfax supports LoRA, including DoRA and rank-stabilised scaling, and loads AdaLoRA, VeRA, LoHa and LoKr as LoRA.",
            "Merge it into its base model with PEFT and load the merged model.",
        )
    known = {*honoured, *INERT, *REFUSED, "peft_type"}
    wrong = {n: v for n, v in given.items() if (n in REFUSED and v not in _OFF) or (n not in known and v is not None)}
    if wrong:
        unknown = sorted(set(wrong) - set(REFUSED))
        raise UnsupportedOptionError(
            f"{source} sets {', '.join(f'{n}={v!r}' for n, v in sorted(wrong.items()))}.",
            f"hfax does not know {', '.join(unknown)}, which may change what the adapter computes."
            if unknown
            else "hfax does not support this option.",
            "Merge the adapter into its base model with PEFT and load the merged model.",
        )
    return {n: _plain(given[n]) for n in honoured if given.get(n) is not None}


def _plain(value: Any) -> Any:
    """Without enums and sets, which PEFT's objects have and its files do not."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", value)
