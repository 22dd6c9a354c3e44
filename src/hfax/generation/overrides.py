"""Classes that bring a `generate` of their own, around transformers' general one: Whisper's segments, languages and timestamps.

Such a method is plain Python about tensors on the host, and calls `super().generate` for every run of the model. It is run as it
is, on an object of the same class whose `super().generate` is hfax's loop and whose forward is hfax's compiled one; so its options
mean what they mean in transformers. Nothing of transformers is replaced.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import logits_process

from hfax.errors import UnsupportedModelError, UnsupportedOptionError

Loop = Callable[..., Any]
"""`loop(inputs, generation_config, options, timestamps)`: the general generation, torch tensors in and out."""

GENERAL_ALL_THE_SAME = {
    "Blip2ForConditionalGeneration": "it runs its language model on the prompt with features, as forward does",
    "InstructBlipForConditionalGeneration": "the same",
    "Kosmos2ForConditionalGeneration": "it encodes the image first, as forward does",
}
"""Classes whose own `generate` writes what hfax's loop writes through their forward, and what it does beside."""


def has_own_generate(module: Any) -> bool:
    """Whether the class has a `generate` of its own that hfax runs on the host.

    Raises:
        UnsupportedModelError: it has one that does not go through transformers' general `generate`.
    """
    cls = type(module)
    holder = next((c for c in cls.__mro__ if "generate" in vars(c)), GenerationMixin)
    if holder is GenerationMixin or cls.__name__ in GENERAL_ALL_THE_SAME:
        return False
    functions = (inspect.unwrap(f) for f in vars(holder).values() if inspect.isfunction(f))
    codes = [f.__code__ for f in functions]
    if not any("__class__" in c.co_freevars and "generate" in c.co_names for c in codes):
        raise UnsupportedModelError(
            f"{cls.__name__} writes in a way of its own.",
            "Its generate() does not go through transformers' general one, which is the part that hfax compiles.",
            "Call the model itself, or generate with plain transformers.",
        )
    return True


def run_own_generate(
    module: Any,
    prompt: Any,
    options: Mapping[str, Any],
    *,
    generation_config: GenerationConfig,
    forward: Callable[..., Any],
    loop: Loop,
) -> Any:
    """Run the class's own `generate`.

    Args:
        module: the skeleton; its weights are never looked at.
        prompt: the first input, or None.
        options: everything else that was given, by name; tensors are torch's.
        generation_config: the model's defaults.
        forward: takes forward's arguments by name.
        loop: see `Loop`.

    Returns:
        What the class's method returns.
    """
    host = object.__new__(_host_class(type(module)))
    host.__dict__.update(module.__dict__)
    host.__dict__.update(generation_config=generation_config, _hfax_forward=forward, _hfax_loop=loop)
    with torch.no_grad():
        return host.generate(*(() if prompt is None else (prompt,)), **options)


@functools.cache
def _host_class(cls: type) -> type:
    """A subclass in which `super().generate` of every class of transformers is `_GeneralGeneration.generate`."""

    @functools.wraps(cls.forward)  # type: ignore[attr-defined]
    def forward(self: Any, **inputs: Any) -> Any:
        return self._hfax_forward(**inputs)

    members = {"forward": forward, "device": property(lambda self: torch.device("cpu")), "__module__": cls.__module__}
    return type(cls.__name__, (cls, _GeneralGeneration), members)


class _GeneralGeneration(GenerationMixin):
    """Stands before `GenerationMixin` in the order of base classes."""

    _hfax_loop: Loop

    def generate(  # type: ignore[override]
        self,
        inputs: Any = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: Any = None,
        **options: Any,
    ) -> Any:
        """transformers' general `generate`, by hfax's loop."""
        given = {"stopping_criteria": stopping_criteria, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn}
        given |= {n: options.pop(n, None) for n in ("assistant_model", "streamer", "custom_generate")}
        if wrong := [n for n, v in given.items() if v is not None and (n != "stopping_criteria" or len(v))]:
            raise UnsupportedOptionError(
                f"{', '.join(wrong)} cannot be used with {type(self).__name__}.",
                "Python code cannot run inside the compiled loop.",
                "Leave it out, or generate with plain transformers.",
            )
        asked = (options.get("output_attentions"), getattr(generation_config, "output_attentions", None))
        if any(asked):
            raise UnsupportedOptionError(
                f"{type(self).__name__} was asked for its attention weights while it writes.",
                "hfax's attention does not form them; Whisper needs them for timestamps of single words.",
                "Use return_timestamps=True, which times segments.",
            )
        timestamps = None
        for processor in logits_processor or ():
            found = self._hfax_option(processor, options.get("decoder_input_ids"))
            timestamps = found.pop("timestamps", timestamps)
            options.update(found)
        return self._hfax_loop(inputs, generation_config, options, timestamps)

    def _hfax_option(self, processor: Any, ids: Any) -> dict[str, Any]:
        """The option that says what one of transformers' processors does."""
        if isinstance(processor, logits_process.SuppressTokensLogitsProcessor):
            return {"suppress_tokens": processor.suppress_tokens.tolist()}
        if isinstance(processor, logits_process.SuppressTokensAtBeginLogitsProcessor):
            return {"begin_suppress_tokens": processor.begin_suppress_tokens.tolist()}
        if isinstance(processor, logits_process.WhisperTimeStampLogitsProcessor):
            most = processor.max_initial_timestamp_index
            return {
                "timestamps": {
                    "timestamp_begin": processor.timestamp_begin,
                    "timestamp_text_end": int(processor.eos_token_id),
                    "timestamp_max_initial": 1 << 30 if most is None else int(most),
                }
            }
        if isinstance(processor, logits_process.WhisperNoSpeechDetection):
            scores: Any = None
            if processor.start_of_trans_offset <= 1:
                scores = self._hfax_forward(**(processor.inputs or {})).logits[:, -1]  # type: ignore[attr-defined]
            processor(ids, scores)  # it only remembers a probability
            return {}
        raise UnsupportedOptionError(
            f"{type(self).__name__} uses {type(processor).__name__}.",
            "Python code cannot run inside the compiled loop.",
            "Generate with plain transformers.",
        )


logger = logging.getLogger(__name__)

_METHOD = "prepare_inputs_for_generation"


def without_dropped(module: Any, ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a decoder's prompts without those that transformers' `generate` would not hand to forward.

    Only inputs with a value for each token are asked about: images and sound may be encoded before, and are left out then.

    Args:
        module: the model.
        ids: the prompts, [batch, length].
        inputs: beside ids, by name.
    """
    prepare = getattr(type(module), _METHOD, None)
    ids = np.atleast_2d(ids)
    names = set(inputs) - {"attention_mask"}
    asked = {n: inputs[n] for n in names if inputs[n].shape[:2] == ids.shape and inputs[n].dtype.kind in "biu"}
    if not asked or prepare is None or prepare is getattr(GenerationMixin, _METHOD):
        return dict(inputs)
    given = {n: torch.from_numpy(np.array(a)).long() for n, a in asked.items()}
    prompt = torch.from_numpy(ids.copy()).long()
    try:
        kept = module.prepare_inputs_for_generation(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=DynamicCache(),
            use_cache=True,
            is_first_iteration=True,
            **given,
        )
    except Exception as error:  # a method that needs more than a prompt says nothing about these
        logger.debug("%s cannot be asked for its inputs: %s", type(module).__name__, error)
        return dict(inputs)
    return {n: a for n, a in inputs.items() if n not in asked or kept.get(n) is not None}
