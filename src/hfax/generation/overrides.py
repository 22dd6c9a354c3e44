"""Classes that override `generate` around transformers' general one: Whisper's segments, languages and timestamps.

Such a method is plain Python over host tensors, and calls `super().generate` for every run of the model. It runs unchanged, on an
object of the same class with hfax's loop as `super().generate` and hfax's compiled forward, so its options mean the same as in
transformers. Nothing in transformers is replaced.
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
from transformers.generation.logits_process import WhisperNoSpeechDetection

from hfax.errors import UnsupportedModelError, UnsupportedOptionError

GenerateFunction = Callable[..., Any]
"""`loop(inputs, generation_config, options)`: the general `generate`, torch tensors in and out."""

GENERAL_ALL_THE_SAME = {
    "Blip2ForConditionalGeneration": "it runs its language model on the prompt with features, as forward does",
    "InstructBlipForConditionalGeneration": "the same",
    "InstructBlipVideoForConditionalGeneration": "the same",
    "Kosmos2ForConditionalGeneration": "it encodes the image first, as forward does",
}
"""Classes with a `generate` override that yields the same tokens as hfax's loop over their forward, and what it does besides."""


def has_own_generate(module: Any) -> bool:
    """Whether the class overrides `generate` with a method that hfax runs on the host.

    Raises:
        UnsupportedModelError: its override does not call transformers' general `generate`.
    """
    cls = type(module)
    holder = next((c for c in cls.__mro__ if "generate" in vars(c)), GenerationMixin)
    if holder is GenerationMixin or cls.__name__ in GENERAL_ALL_THE_SAME:
        return False
    functions = (inspect.unwrap(f) for f in vars(holder).values() if inspect.isfunction(f))
    codes = [f.__code__ for f in functions]
    if not any("__class__" in c.co_freevars and "generate" in c.co_names for c in codes):
        raise UnsupportedModelError(
            f"{cls.__name__} uses a custom generation loop.",
            "Its generate() does not call transformers' general generate(), which is the part that hfax compiles.",
            "Call the model directly, or generate with plain transformers.",
        )
    return True


def run_own_generate(
    module: Any,
    prompt: Any,
    options: Mapping[str, Any],
    *,
    generation_config: GenerationConfig,
    forward: Callable[..., Any],
    loop: GenerateFunction,
) -> Any:
    """Run the class's `generate` override.

    Args:
        module: the skeleton; its weights are never read.
        prompt: the first input, or None.
        options: all other arguments, by name; tensors are torch tensors.
        generation_config: the model's defaults.
        forward: takes forward arguments by name.
        loop: the general generation, a `GenerateFunction`.

    Returns:
        The result of the class's method.
    """
    attention = module.config._attn_implementation

    def with_own_attention(function: Callable[..., Any]) -> Callable[..., Any]:
        """Whisper sets "eager" for word-level timestamps; hfax's programs return the weights with any implementation."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if module.config._attn_implementation != attention:
                module.config._attn_implementation = attention
            return function(*args, **kwargs)

        return call

    host = object.__new__(_host_class(type(module)))
    host.__dict__.update(module.__dict__)
    host.__dict__.update(
        generation_config=generation_config,
        _hfax_forward=with_own_attention(forward),
        _hfax_loop=with_own_attention(loop),
    )
    with torch.no_grad():
        return host.generate(*(() if prompt is None else (prompt,)), **options)


@functools.lru_cache(maxsize=64)
def _host_class(cls: type) -> type:
    """A subclass in which `super().generate` in every transformers class is `_GeneralGeneration.generate`."""

    @functools.wraps(cls.forward)  # type: ignore[attr-defined]
    def forward(self: Any, **inputs: Any) -> Any:
        return self._hfax_forward(**inputs)

    members = {"forward": forward, "device": property(lambda self: torch.device("cpu")), "__module__": cls.__module__}
    return type(cls.__name__, (cls, _GeneralGeneration), members)


class _GeneralGeneration(GenerationMixin):
    """Precedes `GenerationMixin` in the method resolution order."""

    _hfax_loop: GenerateFunction

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
        """transformers' general `generate`, implemented by hfax's loop."""
        given = {n: options.pop(n, None) for n in ("assistant_model", "streamer", "custom_generate")}
        if wrong := [n for n, v in given.items() if v is not None]:
            raise UnsupportedOptionError(
                f"{', '.join(wrong)} cannot be used with {type(self).__name__}.",
                "It generates several times in a call.",
                "Remove it, or generate with plain transformers.",
            )
        processors = list(logits_processor or ())
        for detector in [p for p in processors if isinstance(p, WhisperNoSpeechDetection)]:
            self._hfax_detect(detector, options.get("decoder_input_ids"))
            processors.remove(detector)
        options |= {
            "logits_processor": processors,
            "stopping_criteria": list(stopping_criteria or ()),
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        }
        return self._hfax_loop(inputs, generation_config, options)

    def _hfax_detect(self, detector: WhisperNoSpeechDetection, ids: Any) -> None:
        """Let the detector store the probability of silence, all that it does, from a forward pass."""
        scores: Any = None
        if detector.start_of_trans_offset <= 1:
            scores = self._hfax_forward(**(detector.inputs or {})).logits[:, -1]  # type: ignore[attr-defined]
        detector(ids, scores)


logger = logging.getLogger(__name__)

_METHOD = "prepare_inputs_for_generation"


def without_dropped(module: Any, ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of decoder prompts, without those that transformers' `generate` would not pass to forward.

    Only per-token inputs are checked: images and audio may be encoded earlier, and are then left out.

    Args:
        module: the model.
        ids: the prompts, [batch, length].
        inputs: inputs other than ids, by name.
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
            cache=DynamicCache(),
            use_cache=True,
            is_first_iteration=True,
            **given,
        )
    except Exception as error:  # a method that needs more than a prompt does not decide these
        logger.debug("%s: prepare_inputs_for_generation failed, all inputs are kept: %s", type(module).__name__, error)
        return dict(inputs)
    return {n: a for n, a in inputs.items() if n not in asked or kept.get(n) is not None}
