"""The encoder of an encoder-decoder, run once, and its result in the classes that decoders look for. For every backend."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling


class EncoderOutputs(BaseModelOutputWithPooling, BaseModelOutput):
    """An encoder's result with whatever tensors it had, under their names; what it had not is None.

    Of both classes, since models ask for one or the other and else take the result apart by its order.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(last_hidden_state=tensors["last_hidden_state"])
        for name, tensor in tensors.items():
            object.__setattr__(self, name, tensor)
            OrderedDict.__setitem__(self, name, tensor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def run_encoder(module: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The encoder's result, and the inputs left for the decoder; as transformers' own generate does it."""
    encoder = module.get_encoder()
    names = inspect.signature(encoder.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
    own = {n: v for n, v in inputs.items() if not n.startswith("decoder_") and (n in names or takes_all)}
    outputs = encoder(**own, return_dict=True)
    left = {n: v for n, v in inputs.items() if n.startswith("decoder_") or n == "attention_mask"}
    return outputs, left
