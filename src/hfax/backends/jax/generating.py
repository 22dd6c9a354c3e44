"""A call of `generate` once it is read: its drafts, its run, and classes whose own `generate` surrounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from transformers import GenerationConfig

from hfax.backends.base_model import Request
from hfax.backends.jax.results import give
from hfax.generation import generation_request as requests
from hfax.generation.beam_config import num_beams
from hfax.generation.generate import GenerationLoop, open_loop, run_loop
from hfax.generation.host_loop import Streamer
from hfax.generation.layer_outputs import layer_outputs
from hfax.generation.outputs import as_sequences
from hfax.generation.overrides import GenerateFunction, run_own_generate
from hfax.generation.speculation import Speculation
from hfax.load.host_arrays import from_numpy
from hfax.programs.buckets import Buckets
from hfax.programs.model_parts import ModelParts
from hfax.tracing.structure import flatten, has_torch, is_array, unflatten
from hfax.tracing.traits import ModelTraits

_ASSISTANT_TOKENS = 5
"""Default number of draft tokens per round of an assistant model."""
_MAX_NGRAM = 3
"""Default maximum n-gram size that prompt lookup matches at the end of the text."""


def with_drafts(request: Request, model: ModelParts, assistant: ModelParts | None) -> Request:
    """A request with its speculative decoding, if it asks for any.

    Args:
        request: the request.
        model: the model's parts.
        assistant: the draft model's parts.

    Raises:
        UnsupportedOptionError: the call does not support speculative decoding.
    """
    speculation = _speculation(request.options, request.prompts, model, assistant)
    draft = None if assistant is None else (assistant.traced, assistant.weights)
    return dataclasses.replace(
        request, options=dataclasses.replace(request.options, speculation=speculation, draft=draft)
    )


def _speculation(
    options: requests.GenerationOptions, prompts: requests.Prompts, model: ModelParts, assistant: ModelParts | None
) -> Speculation | None:
    config = options.config
    lookup: int | None = config.prompt_lookup_num_tokens
    if lookup is None and assistant is None:
        return None
    vocabularies = None if assistant is None else (model.num_logits(), assistant.num_logits())
    requests.check_speculation(
        [model.traced.traits, *([assistant.traced.traits] if assistant is not None else [])],
        sequences=len(prompts.given) * (config.num_return_sequences or 1),
        inputs=set(prompts.inputs) | set(prompts.static),
        vocabularies=vocabularies,
        is_both=lookup is not None and assistant is not None,
        has_beams=num_beams(config) > 1,
        waits_for_host=options.custom.waits_for_host,
        is_guided=options.negative is not None,
    )
    if assistant is not None:
        return Speculation(num_tokens=config.num_assistant_tokens or _ASSISTANT_TOKENS, max_ngram=0)
    assert lookup is not None
    return Speculation(num_tokens=lookup, max_ngram=config.max_matching_ngram_size or _MAX_NGRAM)


def open_request(model: ModelParts, request: Request, buckets: Buckets) -> tuple[GenerationLoop, dict[str, jax.Array]]:
    """The loop of a request before its first step, and the inputs of its `start`.

    Args:
        model: the model's parts.
        request: the request.
        buckets: how sizes are rounded up.
    """
    return open_loop(
        model.traced,
        model.programs,
        model.weights,
        model.layout,
        request.prompts,
        request.options,
        static=request.static,
        vocab_size=model.num_logits(),
        buckets=buckets,
    )


def run_request(
    loop: GenerationLoop,
    inputs: dict[str, jax.Array],
    request: Request,
    *,
    streamer: Streamer | None,
    tokenizer: Any,
    traits: ModelTraits,
    forward: Callable[..., Any],
    to_torch: bool,
) -> Any:
    """The result of `generate`: run the loop of a request to its end.

    Args:
        loop: from `open_loop`.
        inputs: from `open_loop`.
        request: the request.
        streamer: gets the tokens as they are generated.
        tokenizer: required with `stop_strings`.
        traits: of the model; they select transformers' output class.
        forward: the compiled forward pass, for outputs of layers.
        to_torch: return torch tensors instead of jax arrays.
    """
    config = request.options.config
    generated = run_loop(loop, inputs, request.prompts, request.options, streamer=streamer, tokenizer=tokenizer)
    result = as_sequences(
        generated,
        request.prompts.given,
        num_return_sequences=config.num_return_sequences or 1,
        is_encoder_decoder=traits.is_encoder_decoder,
        as_dict=bool(config.return_dict_in_generate) or bool(request.options.keep),
        give=lambda array: give(array, to_torch),
    )
    if config.return_dict_in_generate:
        layers = layer_outputs(
            forward,
            request.prompts,
            request.options,
            np.asarray(result.sequences),
            traits,
            static=request.static,
            given=request.given,
            to_torch=to_torch,
        )
        for name, value in layers.items():
            result[name] = value
        if not traits.is_encoder_decoder and (cache := loop.keep(generated, request.prompts)):
            result["cache"] = cache
    return result


def call_own_generate(
    module: torch.nn.Module,
    prompt: Any,
    options: dict[str, Any],
    *,
    generation_config: GenerationConfig,
    forward: Callable[..., Any],
    loop: GenerateFunction,
    as_host: Callable[[str, Any], np.ndarray],
    put: Callable[[np.ndarray], jax.Array],
) -> Any:
    """Run the class's `generate` override, which takes torch tensors, whatever the input type.

    Args:
        module: the model.
        prompt: prompts, of any array type.
        options: options and further inputs.
        generation_config: defaults of the options.
        forward: the compiled forward pass.
        loop: hfax's loop, in place of transformers' general `generate`.
        as_host: converts an array with a name to a host array.
        put: places a host array on the device.

    Returns:
        torch tensors if any input was one, else jax arrays.
    """
    to_torch = has_torch([prompt, options])
    arrays, structure = flatten((prompt, options), is_array)
    prompt, options = unflatten(structure, [from_numpy(as_host("inputs", a)) for a in arrays])
    outputs = run_own_generate(module, prompt, options, generation_config=generation_config, forward=forward, loop=loop)
    if to_torch:
        return outputs
    arrays, structure = flatten(outputs, is_array)
    return unflatten(structure, [put(as_host("outputs", a)) for a in arrays])
