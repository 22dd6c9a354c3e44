"""What a model's forward takes and caches, from its signature and config; and the model types that need special handling.

For every backend; imports none.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What a module's forward takes, from its signature and config.

    Args:
        is_encoder_decoder: the model has an encoder and a decoder that attends to its output.
        cache_argument: name of forward's cache argument, or of its own list of states ("state"); None if there is none.
        takes_position_ids: forward has `position_ids`.
        takes_attention_mask: forward has `attention_mask`.
        takes_decoder_mask: forward has `decoder_attention_mask`.
        takes_logits_to_keep: forward can compute logits for only the last positions.
        has_recurrent_layers: some layers keep a recurrent state instead of keys and values.
        counts_padding: the model computes positions itself, or its states read padding, so prompts must not be padded further.
        has_usable_cache: decoding caches keys and values; otherwise every step reruns the whole sequence.
        repeated_inputs: per-token inputs that new tokens copy from the last one.
        main_input: name of the main input.
        traced_geometry: inputs named like geometry that forward computes with, but does not read.
    """

    is_encoder_decoder: bool
    cache_argument: str | None
    takes_position_ids: bool
    takes_attention_mask: bool
    takes_decoder_mask: bool
    takes_logits_to_keep: bool
    has_recurrent_layers: bool
    counts_padding: bool
    has_usable_cache: bool
    repeated_inputs: tuple[str, ...]
    main_input: str
    traced_geometry: tuple[str, ...] = ()


def read_traits(module: torch.nn.Module) -> ModelTraits:
    """The traits of a transformers model."""
    names = set(inspect.signature(module.forward).parameters)
    if _passes_on(module):
        names |= {*CACHE_ARGUMENTS, "position_ids"} & set(inspect.signature(module.language_model.forward).parameters)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    config: Any = module.config
    if config.model_type in OWN_POSITIONS:
        names.discard("position_ids")
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    cache_argument = next((n for n in (*CACHE_ARGUMENTS, "state") if n in names), None)
    return ModelTraits(
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        cache_argument=cache_argument,
        takes_position_ids="position_ids" in names,
        takes_attention_mask="attention_mask" in names,
        takes_decoder_mask="decoder_attention_mask" in names,
        takes_logits_to_keep="logits_to_keep" in names,
        has_recurrent_layers=config.model_type == "xlstm"
        or any(t in ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba") for t in layer_types),
        counts_padding=_is_among(config, COUNTS_PADDING)
        # prompts with bidirectional attention use it only if nothing is padding
        or getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True
        or ("position_ids" not in names and (cache_argument in (None, "state") or _counts_positions(module)))
        or _padding_reaches_states(module),
        has_usable_cache=cache_argument is not None and not _is_among(config, {**WITHOUT_CACHE, **APPENDS_MASK}),
        # with pixels, token types mark the images, and new tokens are text
        repeated_inputs=IMAGE_MASKS if "pixel_values" in names else ("token_type_ids",),
        main_input=getattr(module, "main_input_name", "input_ids"),
        traced_geometry=TRACED_GEOMETRY.get(config.model_type, ()),
    )


def _is_among(config: Any, names: Mapping[str, str]) -> bool:
    """Whether the model type, or the type of one of the layers, is in a table."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return not names.keys().isdisjoint((config.model_type, *kinds))


CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names that forward gives the KV cache: transformers', and that of models whose code comes with their checkpoint."""


IMAGE_MASKS = ("cross_attention_mask", "image_attention_mask")
"""Per-token inputs that say which images a token attends to."""


TRACED_GEOMETRY = {
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), ("pixel_attention_mask",)),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), ("pixel_attention_mask", "spatial_shapes")),
}
"""Geometry that transformers' code for these model types does not read, so that images of all sizes share a program."""


OWN_POSITIONS = {
    "kosmos-2": "transformers' own generate leaves position_ids out, and the model counts cached padding",
    "kosmos-2.5": "transformers' own generate leaves position_ids out, and the model counts cached padding",
}
"""Model types with position_ids in forward that transformers' generate does not pass, and why."""


WITHOUT_CACHE = {
    "blt": "the next byte may change how the text is divided into patches, and transformers cannot make its cache",
    "deepseek_v4": "its compressed attention keeps caches of its own kinds",
    "minimax": "its forward accepts only a cache class of its own",
    "minimax_m3_sparse": "its sparse layers cache the keys of their indexers in a class of their own",
}
"""Model types, and layer types, that rerun the whole sequence for every token, and why."""


APPENDS_MASK = {
    "xlm": "it predicts the token that stands at a mask after the text",
    "flaubert": "it predicts the token that stands at a mask after the text",
}
"""Model types that predict at an appended mask token, without a cache, and why."""


WRITES_OTHERWISE = {
    "xlnet": "it writes at a place that its permutation mask hides",
    "cpmant": "its forward takes the whole text and a table of its own at every step",
}
"""Model types or classes that transformers does not decode token by token through forward, and how they differ."""

LOOP = (
    *("_sample", "_prefill", "_get_logits_processor", "_get_stopping_criteria", "_has_unfinished_sequences"),
    *("_prepare_generation_config", "_prepare_generated_length", "_prepare_model_inputs"),
    *("_prepare_decoder_input_ids_for_generation", "_maybe_initialize_input_ids_for_generation"),
    *("_prepare_attention_mask_for_generation", "_update_model_kwargs_for_generation"),
)
"""Methods of transformers' generation loop that hfax's loop stands for. Those that it leaves out here prepare caches, positions,
encoders and repeated rows, which hfax does in its own way for every class."""

SAME_LOOP = {
    "MllamaForConditionalGeneration": "it repeats cross_attention_mask for new tokens, as hfax does",
    "IdeficsForVisionText2Text": "it repeats image_attention_mask for new tokens, and the images' features, as hfax does",
    "RwkvForCausalLM": "it keeps the states that forward returns, as hfax does",
    "PaliGemmaForConditionalGeneration": "new tokens have token type 1, as hfax gives them",
}
"""Classes that override a method of the loop without effect on hfax's, and why."""


def unlike_general_loop(module: torch.nn.Module) -> str | None:
    """Why a model's text is not that of hfax's loop over its forward; None if it is."""
    from transformers import GenerationMixin

    cls, config = type(module), cast(Any, module.config)
    names = (cls.__name__, config.model_type)
    if (kind := next((n for n in names if n in WRITES_OTHERWISE), None)) is not None:
        return f"{kind}: {WRITES_OTHERWISE[kind]}."
    if getattr(config.get_text_config(decoder=True), "recurrent_kv_cache_mode", None) == "last_loop":
        return "With recurrent_kv_cache_mode='last_loop', its earlier loops read the past that the last loop wrote."
    for name in LOOP:
        holder = next((c for c in cls.__mro__ if name in vars(c)), GenerationMixin)
        if holder is not GenerationMixin and holder.__name__ not in SAME_LOOP:
            return f"It overrides {name}, a part of transformers' generation loop that hfax replaces."
    return None


def why_not_pages(module: torch.nn.Module, traits: ModelTraits) -> str | None:
    """Why the engine's pages do not support a model, as far as that shows without a trace; None if nothing speaks against it."""
    scaling = {str((p or {}).get("rope_type")) for p in _rope_parameters(module.config)}
    reasons = {
        "it is an encoder-decoder": traits.is_encoder_decoder,
        "it has recurrent state": traits.has_recurrent_layers or traits.cache_argument not in CACHE_ARGUMENTS,
        "it has no KV cache": not traits.has_usable_cache,
        "it computes positions itself": not traits.takes_position_ids or traits.counts_padding,
        "it reads more than tokens": bool(set(traits.repeated_inputs) & set(IMAGE_MASKS)),
        "it does not generate token by token": unlike_general_loop(module) is not None,
        "its rotary embedding depends on the longest sequence in the batch": bool(scaling & {"dynamic", "longrope"}),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    return reason and f"{type(module).__name__} does not support paged attention: {reason}."


def _rope_parameters(config: Any) -> list[dict[str, Any] | None]:
    """The rotary embedding parameters, one entry per kind of layer if they differ."""
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return list(found.values()) if found and all(isinstance(v, dict) for v in found.values()) else [found]


COUNTS_PADDING = {
    "blt": "its hashes and patches read padding like any byte",
    "deepseek_v4": "its compressed keys stand for windows counted from the first token",
    "minimax_m3_sparse": "its blocks of keys are counted from the first token",
    "xlm": "transformers reads prompts without their mask, padding like text",
    "flaubert": "transformers reads prompts without their mask, padding like text",
    "git": "transformers attends to the padding of prompts without an image",
    "recurrent_gemma": "its convolution reads the padding before a prompt",
}
"""Model types, and layer types, that take position ids but still depend on the amount of padding, and why."""


def _passes_on(module: torch.nn.Module) -> bool:
    """Whether forward passes unknown arguments, including a cache, to a language model."""
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())
    return takes_all and hasattr(module, "language_model")


def _counts_positions(module: torch.nn.Module) -> bool:
    """Whether the model has a position table, or reads padding like any token."""
    takes_mask = "attention_mask" in inspect.signature(module.forward).parameters
    names = (type(part).__name__ for part in module.modules())
    return not takes_mask or any("Position" in name and "Embedding" in name for name in names)


def _padding_reaches_states(module: torch.nn.Module) -> bool:
    """Whether a convolution over the text reads a projection with a bias.

    Modelling code zeroes padding before such a projection and after the convolution; a bias in between makes the first tokens
    read padding as text. Configs can enable one (`mamba_proj_bias`, `conv_bias` of LFM2).
    """
    import torch

    mixers = (m for m in module.modules() if any(isinstance(c, torch.nn.Conv1d) for c in m.children()))
    return any(
        isinstance(part, torch.nn.Linear) and part.bias is not None and _INTO_CONVOLUTION.match(name)
        for mixer in mixers
        for name, part in mixer.named_children()
    )


_INTO_CONVOLUTION = re.compile(r"in_proj|linear_[xy]$|[qkv]_proj$|qkv")
