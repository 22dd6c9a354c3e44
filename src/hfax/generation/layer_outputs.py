"""Hidden states and attention weights of generated texts, step by step, as transformers' `generate` returns them.

They come from one forward pass over the finished texts, which computes what all steps computed, within rounding: the loop's own
programs return what the next token needs, and attention kernels never write their weights out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from hfax.errors import UnsupportedOptionError
from hfax.generation.generation_request import EMBEDS, GenerationOptions, Prompts
from hfax.tracing.traits import ModelTraits

_NAMES = ("hidden_states", "attentions")


def asked_for(config: GenerationConfig) -> dict[str, bool]:
    """The options of forward that a call of `generate` asks for: like transformers, only with `return_dict_in_generate`."""
    if not config.return_dict_in_generate:
        return {}
    return {f"output_{name}": True for name in _NAMES if getattr(config, f"output_{name}", None)}


def check_layer_outputs(prompts: Prompts, options: GenerationOptions, static: Mapping[str, Any]) -> None:
    """Raise if a call asks for layers' outputs that are not there.

    Args:
        prompts: of the call.
        options: of the call.
        static: forward arguments that are not arrays.

    Raises:
        UnsupportedOptionError: beams, embeddings in place of ids, several sequences of an image, or a cache of an earlier call.
    """
    config = options.config
    if not (asked := asked_for(config)):
        return
    copies = config.num_return_sequences or 1
    beside = {
        "num_beams": (config.num_beams or 1) > 1,
        EMBEDS: EMBEDS in prompts.inputs,
        "past_key_values": prompts.kept is not None,
        "num_return_sequences beside images or audio": copies > 1 and bool(prompts.static or static),
    }
    if wrong := [name for name, is_given in beside.items() if is_given]:
        raise UnsupportedOptionError(
            f"{' and '.join(asked)} cannot be combined with {', '.join(wrong)}.",
            "Layers' outputs come from a forward pass over the finished text and the inputs of this call.",
            "Remove one of them, or call the model itself on the finished text.",
        )


def layer_outputs(
    forward: Callable[..., Any],
    prompts: Prompts,
    options: GenerationOptions,
    sequences: np.ndarray,
    traits: ModelTraits,
    *,
    static: Mapping[str, Any],
    given: Mapping[str, np.ndarray],
    to_torch: bool,
) -> dict[str, Any]:
    """The outputs of layers, by the names that they have in transformers' output classes of `generate`.

    Args:
        forward: the model, which takes arrays by name and returns transformers' output class.
        prompts: of the call, which `check_layer_outputs` has accepted.
        options: of the call.
        sequences: [sequences, prompt + new] int, the finished texts.
        traits: of the model.
        static: forward arguments that are not arrays.
        given: of an encoder-decoder, forward's arrays as the caller gave them.
        to_torch: return torch tensors instead of jax arrays.

    Returns:
        For each name a tuple over steps, of tuples over layers: the prompt's first, then one position each. Hidden states are
        [sequences, positions, width]; attention weights [sequences, heads, positions, keys], over all positions up to the step's
        own, zero outside of a layer's window. An encoder's have no steps.
    """
    if not (asked := asked_for(options.config)):
        return {}
    copies, start = options.config.num_return_sequences or 1, prompts.given.shape[1]
    if traits.is_encoder_decoder:
        inputs, offset = _of_encoder_decoder(given, sequences, copies), 0
    else:
        inputs, offset = _of_decoder(prompts, sequences, copies, traits), prompts.padded_length - start
    if to_torch:
        inputs = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    outputs = forward(**inputs, **static, **asked, use_cache=False)
    steps = [
        slice(offset, offset + start),
        *(slice(i, i + 1) for i in range(offset + start, offset + sequences.shape[1] - 1)),
    ]
    found: dict[str, Any] = {}
    for name, layers in outputs.items():
        if not name.endswith(_NAMES):
            continue
        if name.startswith("encoder_"):
            found[name] = layers
            continue
        # on the host: each slice of a jax array would be a program
        cuts = [_cuts(name, layer if to_torch else np.asarray(layer), steps, offset) for layer in layers]
        found[name] = tuple(zip(*cuts, strict=True)) if cuts else ((),) * len(steps)
    return found


def _cuts(name: str, array: Any, steps: list[slice], offset: int) -> list[Any]:
    """The positions of each step; of a decoder's attention to itself, the keys up to them."""
    if name.endswith("hidden_states"):
        cuts = [array[:, step] for step in steps]
    else:
        ends = [None if name == "cross_attentions" else step.stop for step in steps]
        cuts = [array[:, :, step, offset:end] for step, end in zip(steps, ends, strict=True)]
    if isinstance(array, torch.Tensor):
        return [cut.clone() for cut in cuts]
    import jax  # absent where torch_xla is, which asks this module only what a call wants

    return [jax.device_put(cut) for cut in cuts]


def _of_decoder(prompts: Prompts, sequences: np.ndarray, copies: int, traits: ModelTraits) -> dict[str, Any]:
    """Forward's inputs for a decoder's finished texts: the padded prompts, and the new tokens but the last."""
    new = sequences[:, prompts.given.shape[1] : -1]
    rows = slice(len(prompts.given) if prompts.num_padded_rows > len(prompts.given) else None)  # patches have no rows
    inputs = {name: array[rows] for name, array in prompts.inputs.items() if name != "position_ids"}
    inputs |= {name: geometry.array for name, geometry in prompts.static.items()}
    inputs = {name: np.repeat(array, copies, axis=0) if copies > 1 else array for name, array in inputs.items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for name in [n for n, a in inputs.items() if a.shape[:2] == ids.shape and n not in ("input_ids", "attention_mask")]:
        last = inputs[name][:, -1:] if name in traits.repeated_inputs else np.zeros_like(inputs[name][:, -1:])
        inputs[name] = np.concatenate([inputs[name], np.repeat(last, new.shape[1], axis=1)], axis=1)
    mask = np.concatenate([mask, np.ones_like(new, mask.dtype)], axis=1)
    inputs |= {"input_ids": np.concatenate([ids, new.astype(ids.dtype)], axis=1), "attention_mask": mask}
    of_prompts = prompts.inputs.get("position_ids")
    are_of_images = of_prompts is not None and of_prompts.ndim == 3  # forward computes them from the images' geometry
    if traits.takes_position_ids and not are_of_images:
        inputs["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    return inputs


def _of_encoder_decoder(given: Mapping[str, np.ndarray], sequences: np.ndarray, copies: int) -> dict[str, Any]:
    """Forward's inputs for a decoder's finished texts and the encoder's inputs as they were given."""
    inputs = {n: np.repeat(a, copies, axis=0) for n, a in given.items() if not n.startswith("decoder_")}
    decoder = {"decoder_input_ids": sequences[:, :-1].astype(np.int32)}
    mask = given.get("decoder_attention_mask")
    if mask is not None and not mask.all():
        more = np.ones((len(sequences), sequences.shape[1] - 1 - mask.shape[1]), mask.dtype)
        decoder["decoder_attention_mask"] = np.concatenate([np.repeat(mask, copies, axis=0), more], axis=1)
    return {**inputs, **decoder}
