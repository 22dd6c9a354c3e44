"""The encoder of an encoder-decoder, run once, and its result in the classes that decoders look for. For every backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.tracing.forward_arguments import is_known, known_arguments


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
    """The encoder's result, and the inputs left for the decoder; as transformers' own generate does it.

    A class that has a way of its own to feed its encoder (Florence-2 puts images' features into the text first) is followed in it.

    Raises:
        InvalidInputError: an input that neither the encoder nor the decoder takes.
        UnsupportedModelError: the class feeds its encoder in a way that is not followed.
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
            f"The class feeds {module.main_input_name} to it in a generate of its own.",
            "Call the model itself, or generate with plain transformers.",
        )
    if unread:
        raise InvalidInputError(
            f"generate() of {type(module).__name__} does not read {', '.join(unread)}.",
            f"{type(encoder).__name__} does not take it, and the decoder gets the encoder's output alone.",
            "Leave it out.",
        )
    return encoder(**own, return_dict=True), left


def _feeds_encoder_itself(module: Any) -> bool:
    name = "_maybe_prepare_encoder_kwargs_for_generation"
    return getattr(type(module), name, None) not in (None, getattr(GenerationMixin, name))
