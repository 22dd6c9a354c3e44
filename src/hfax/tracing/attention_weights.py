"""`output_attentions` for every model: transformers' "sdpa" leaves the weights out, with a warning that is easily missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def are_asked_for(config: Any, given: Mapping[str, Any]) -> bool:
    """Whether a forward call returns attention weights, by its arguments or by the config."""
    asked = given.get("output_attentions")
    return bool(getattr(config, "output_attentions", False) if asked is None else asked)


@contextlib.contextmanager
def attention_weights(module: torch.nn.Module, given: Mapping[str, Any]) -> Iterator[None]:
    """Within a trace whose call asks for attention weights, parts that would run "sdpa" run "eager", which returns them.

    hfax's own attention, whose name is a subclass of str, always returns them; a program that does not use them does not compute
    them.

    Args:
        module: the model.
        given: arguments of its forward, by name.
    """
    if not are_asked_for(module.config, given):
        yield
        return
    parts = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]
    chosen = {id(config): (config, config._attn_implementation_internal) for config in parts}
    plain = [(config, name) for config, name in chosen.values() if type(name) is str and name == "sdpa"]
    for config, _ in plain:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, name in plain:
            config._attn_implementation_internal = name
