"""Inputs for a small model of any mapping: left-padded prompts, or the other inputs that its forward takes.

Turns a model and the name of its mapping into arguments of forward and of generate. Runs no models, except vision towers to count
the features of an image.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from hfax.synthetic.fields import LENGTH, make_field, text_mask, token_ids
from hfax.synthetic.images import CountFeatures, feature_counts, image_token, prompts_with_images

GENERATING = ("causal-lm", "image-text-to-text", "seq2seq-lm", "speech-seq2seq")
"""Mappings of classes that generate text."""
_SPEAKING = ("text-to-spectrogram", "text-to-waveform")
"""Mappings of classes that generate speech."""
PADDING = 7
"""Number of left-padding tokens in the first of two prompts."""
_TOGETHER = (
    ("visual_feats", "visual_pos"),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    ("pixel_values", "spatial_shapes", "pixel_attention_mask"),
    ("pixel_values", "target_sizes"),
    ("query_embeds", "encoder_hidden_states"),
    ("audio_mel", "audio_mel_mask"),
    ("input_features", "input_features_mask"),
)
"""Groups of inputs: if the first of a group is given, so are the others that forward takes."""
_ALWAYS = ("bbox", "visual_feats", "qformer_input_ids", "noise_sequence", "task_inputs")
"""Inputs that models require although their signatures declare them optional."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseInputs:
    """The inputs of a case.

    Args:
        forward: arguments of forward.
        generate: arguments of generate.
        mask: positions to compare, [batch, length] bool; None: all.
    """

    forward: dict[str, Any]
    generate: dict[str, Any]
    mask: torch.Tensor | None


def make_inputs(model: Any, mapping: str, count_features: CountFeatures = feature_counts) -> CaseInputs:
    """Make inputs for a model of a mapping; `count_features` as for `prompts_with_images`.

    Raises:
        NotImplementedError: no rule fits the model's inputs.
    """
    names = inspect.signature(model.forward).parameters
    if mapping in ("image-text-to-text", "base") and "pixel_values" in names and _writes_beside_images(model, mapping):
        return _with_images(model, count_features)
    if mapping in GENERATING and not model.config.is_encoder_decoder and model.main_input_name == "input_ids":
        return _decoder(model, set(names))
    wanted = _wanted(model, mapping, names)
    if wanted <= {"input_ids", "bbox", "decoder_input_ids"}:
        inputs = _encoder(model, set(names), mapping, extra=wanted - {"input_ids", "decoder_input_ids"})
        return _choices(inputs) if mapping == "multiple-choice" else inputs
    forward = {name: make_field(model, name) for name in names if name in wanted}
    mask = None
    if "input_ids" in forward and "attention_mask" in names:
        mask = text_mask(forward["input_ids"])
        forward["attention_mask"] = mask
        if "bbox" in forward:
            forward["bbox"] = forward["bbox"][:, : mask.shape[1]]
    generate = {n: v for n, v in forward.items() if n != "decoder_input_ids"}
    return CaseInputs(forward=forward, generate=generate, mask=None if mask is None else mask.bool())


def _choices(inputs: CaseInputs) -> CaseInputs:
    """Two choices for each row: its text, and another row's; [rows, choices, …]."""
    forward = {name: torch.stack([value, value.flip(0)], dim=1) for name, value in inputs.forward.items()}
    return CaseInputs(forward=forward, generate={}, mask=None)


def _writes_beside_images(model: Any, mapping: str) -> bool:
    """Whether images are part of the prompt that the model continues."""
    if model.config.model_type == "florence2":
        return True
    if model.config.is_encoder_decoder or mapping == "image-text-to-text":
        return not model.config.is_encoder_decoder
    if getattr(model.config, "vision_config", model) is None:
        return False
    if model.config.model_type in ("mllama", "idefics"):  # cross-attention to images, under a mask
        return True
    try:
        return image_token(model.config) is not None and hasattr(model, "get_image_features")
    except NotImplementedError:
        return False


def _wanted(model: Any, mapping: str, names: Any) -> set[str]:
    """Names of the inputs to make."""
    required = {
        n for n, p in names.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    main = model.main_input_name
    wanted = required | ({main} if isinstance(main, str) else set(main)) & set(names)
    wanted |= {n for n in _ALWAYS if n in names}
    with_images = mapping in ("base", "visual-question-answering") or "zero-shot" in mapping
    if "pixel_values" in names and "input_ids" in names and with_images:
        has_images = getattr(model.config, "vision_config", model) is not None  # else the vision tower is optional
        wanted |= {"pixel_values", "input_ids"} if has_images else {"input_ids"}
    if "input_features" in names and "input_ids" in names and model.config.model_type in ("clap", "clvp", "pop2piano"):
        wanted |= {"input_features"} if model.config.model_type == "pop2piano" else {"input_features", "input_ids"}
    for first, *others in _TOGETHER:
        if first in wanted:
            wanted |= {n for n in others if n in names}
    has_decoder = model.config.is_encoder_decoder or mapping == "visual-question-answering"
    if has_decoder and "decoder_input_ids" in names:
        wanted.add("decoder_input_ids")
    if wanted & {"pixel_values"} and "noise" in names:
        wanted.add("noise")
    return wanted or {"input_ids"}


def _with_images(model: Any, count_features: CountFeatures) -> CaseInputs:
    forward = prompts_with_images(model, token_ids(model), count_features)
    if model.config.is_encoder_decoder:
        return CaseInputs(
            forward=forward | {"decoder_input_ids": make_field(model, "decoder_input_ids")}, generate=forward, mask=None
        )
    return CaseInputs(forward=forward, generate=dict(forward), mask=forward["attention_mask"].bool())


def _left_padded(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids(model)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    ids[0, :PADDING] = 0
    return ids, mask


def _decoder(model: Any, names: set[str]) -> CaseInputs:
    ids, mask = _left_padded(model)
    forward: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" not in names:  # it would read padding as text, which hfax refuses
        mask = torch.ones_like(mask)
    else:
        forward["attention_mask"] = mask
    if "position_ids" in names:
        forward["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=mask.bool())


def _encoder(model: Any, names: set[str], mapping: str, extra: set[str]) -> CaseInputs:
    ids, mask = _left_padded(model)
    ids, mask = ids.flip(1), mask.flip(1)
    forward: dict[str, Any] = {"input_ids": ids} | {name: make_field(model, name) for name in extra}
    if "attention_mask" in names:
        forward["attention_mask"] = mask
    if model.config.model_type == "longformer" and mapping == "question-answering":
        # tokens before the first of three separators have global attention
        ids[:, [5, 6, LENGTH - PADDING - 1]] = model.config.sep_token_id
    elif "global_attention_mask" in names:
        forward["global_attention_mask"] = torch.zeros_like(ids).index_fill(1, torch.tensor([0]), 1)
    if mapping not in (*GENERATING, "base", *_SPEAKING) and model.config.is_encoder_decoder:
        # classifiers read the last end-of-sequence token, and every row must have the same number of them
        end = getattr(model.config.get_text_config(), "eos_token_id", None)
        ids[:, LENGTH - PADDING - 1] = end if isinstance(end, int) else ids[:, 0]
        return CaseInputs(forward=forward, generate={}, mask=None)
    is_canvas = hasattr(model.config, "canvas_length")  # of a diffusion model, else drawn at random
    if "decoder_input_ids" in names and (model.config.is_encoder_decoder or is_canvas):
        forward["decoder_input_ids"] = make_field(model, "decoder_input_ids")
        given = {n: v for n, v in forward.items() if n in ("global_attention_mask", "bbox")}
        return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask} | given, mask=None)
    return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=mask.bool())
