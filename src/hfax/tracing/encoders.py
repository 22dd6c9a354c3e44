"""Runs the encoder of an encoder-decoder once, and wraps its output in the classes that decoders expect. For every backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.tracing.forward_arguments import is_known, known_arguments


class EncoderOutputs(BaseModelOutputWithPooling, BaseModelOutput):
    """An encoder output with its tensors by name; missing fields are None.

    Inherits from both classes, since models check for one or the other and otherwise unpack by position.
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
    """The encoder output and the remaining decoder inputs, as in transformers' generate.

    Supports classes with custom encoder inputs (Florence-2 inserts image features into the text first).

    Raises:
        InvalidInputError: neither the encoder nor the decoder takes an input.
        UnsupportedModelError: the class prepares its encoder inputs in an unsupported way.
    """
    left = {n: v for n, v in inputs.items() if n.startswith("decoder_") or n == "attention_mask"}
    if _feeds_encoder_itself(module):
        given = {n: v for n, v in inputs.items() if not n.startswith("decoder_")}
        main = given.pop(module.main_input_name)
        prepared = module._maybe_prepare_encoder_kwargs_for_generation(
            main, given, module.main_input_name, GenerationConfig(output_attentions=False, output_hidden_states=False)
        )
        return prepared["encoder_outputs"], left
    encoder = module.get_encoder()
    known = known_arguments(encoder)
    own = {n: v for n, v in inputs.items() if not n.startswith("decoder_") and is_known(n, known)}
    unread = sorted(set(inputs) - set(own) - set(left))
    if module.main_input_name in unread:
        raise UnsupportedModelError(
            f"generate() does not support {type(module).__name__} with a {type(encoder).__name__}.",
            f"The class overrides generate() to pass {module.main_input_name} to its encoder.",
            "Call the model directly, or generate with plain transformers.",
        )
    if unread:
        raise InvalidInputError(
            f"generate() of {type(module).__name__} does not use {', '.join(unread)}.",
            f"{type(encoder).__name__} does not take it, and the decoder gets only the encoder's output.",
            "Remove it.",
        )
    return encoder(**own, return_dict=True), left


def _feeds_encoder_itself(module: Any) -> bool:
    name = "_maybe_prepare_encoder_kwargs_for_generation"
    return getattr(type(module), name, None) not in (None, getattr(GenerationMixin, name))
