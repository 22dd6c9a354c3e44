"""Inputs for a small model of any mapping: token ids with padding on the left, pixels, sound.

Turns a model and the name of its mapping into the arguments of its forward and of its generate. Everything is drawn from a fixed
seed. It does not run models.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from hfax.matrix.architectures import GENERATING
from hfax.matrix.images import prompts_with_images

LENGTH = 20
PADDING = 7
"""Tokens of padding on the left of the first of two prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseInputs:
    """What a case runs with.

    Args:
        forward: arguments of forward.
        generate: arguments of generate.
        mask: [batch, length] bool, the positions whose outputs count; None if all do.
    """

    forward: dict[str, Any]
    generate: dict[str, Any]
    mask: torch.Tensor | None


def make_inputs(model: Any, mapping: str) -> CaseInputs:
    """Inputs for a model of a mapping.

    Raises:
        NotImplementedError: no rule fits the model's main input.
    """
    names = set(inspect.signature(model.forward).parameters)
    if mapping == "image-text-to-text" and not model.config.is_encoder_decoder and "pixel_values" in names:
        return _with_images(model)
    if mapping in GENERATING and not model.config.is_encoder_decoder and model.main_input_name == "input_ids":
        return _decoder(model, names)
    if mapping == "zero-shot-image-classification":
        return _image_and_text(model, names)
    if model.main_input_name == "input_ids":
        return _encoder(model, names, mapping)
    main = _MAIN_INPUTS.get(model.main_input_name)
    if main is None:
        raise NotImplementedError(f"no inputs for {model.main_input_name}")
    forward: dict[str, Any] = {model.main_input_name: main(model, mapping)}
    if model.config.is_encoder_decoder and "decoder_input_ids" in names:
        forward["decoder_input_ids"] = token_ids(model, length=6, seed=1)
    generate = {n: v for n, v in forward.items() if n != "decoder_input_ids"}
    return CaseInputs(forward=forward, generate=generate, mask=None)


def _with_images(model: Any) -> CaseInputs:
    forward = prompts_with_images(model, token_ids(model))
    return CaseInputs(forward=forward, generate=dict(forward), mask=forward["attention_mask"].bool())


def _field(config: Any, *names: str) -> Any:
    """The first of the fields that the config or one of its parts has."""
    parts = [config, *(getattr(config, n, None) for n in config.sub_configs)]
    for part in parts:
        for name in names:
            if part is not None and (value := getattr(part, name, None)) is not None:
                return value
    return None


def _pixels(model: Any, mapping: str) -> torch.Tensor:
    """[2, channels, height, width], or [2, frames, channels, height, width] for video."""
    size = _field(model.config, "image_size", "input_size", "img_size") or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _field(model.config, "num_channels") or 3
    frames = (_field(model.config, "num_frames") or 8,) if mapping == "video-classification" else ()
    return torch.randn((2, *frames, channels, height, width), generator=torch.Generator().manual_seed(0))


def _wave(model: Any, mapping: str) -> torch.Tensor:
    """[2, samples], or [2, frames, mel bins] for models that read spectrograms under this name."""
    generator = torch.Generator().manual_seed(0)
    if (length := getattr(model.config, "max_length", None)) and (bins := getattr(model.config, "num_mel_bins", None)):
        return torch.randn((2, length, bins), generator=generator)
    return torch.randn((2, 4000), generator=generator)


def _features(model: Any, mapping: str) -> torch.Tensor:
    """[2, mel bins, frames] for Whisper's family, [2, frames, features] for the others."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    if (positions := getattr(config, "max_source_positions", None)) and config.model_type in ("whisper",):
        return torch.randn((2, config.num_mel_bins, 2 * positions), generator=generator)
    width = _field(config, "feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim")
    if width is None:
        raise NotImplementedError("the width of the features is not in the config")
    return torch.randn((2, 80, width), generator=generator)


_MAIN_INPUTS = {"pixel_values": _pixels, "input_values": _wave, "input_features": _features}


def _image_and_text(model: Any, names: set[str]) -> CaseInputs:
    ids = token_ids(model, length=8)
    end = _field(model.config, "eos_token_id")
    if isinstance(end, int):
        ids[:, -1] = end
    forward: dict[str, Any] = {"pixel_values": _pixels(model, ""), "input_ids": ids}
    if "attention_mask" in names:
        forward["attention_mask"] = torch.ones_like(ids)
    return CaseInputs(forward=forward, generate={}, mask=None)


def _vocabulary(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "vocab_size", None) or model.config.vocab_size)


def special_ids(config: Any) -> set[int]:
    """Every special token of a config and its parts."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if hasattr(value, "sub_configs"):
            found |= special_ids(value)
        elif name.endswith(("_token_id", "_token_index")):
            found |= set(value if isinstance(value, (list, tuple)) else [value]) - {None}
    return found


def token_ids(model: Any, rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """[rows, length] int64 ordinary tokens, each once in a row: equal tokens would tie where a model chooses the best of them."""
    avoided = special_ids(model.config) | {0, 1, 2, 3}
    ordinary = torch.tensor([i for i in range(_vocabulary(model)) if i not in avoided])
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[:length]] for _ in range(rows)])


def _left_padded(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids(model)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    ids[0, :PADDING] = 0
    return ids, mask


def _decoder(model: Any, names: set[str]) -> CaseInputs:
    ids, mask = _left_padded(model)
    forward: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in names:
        forward["attention_mask"] = mask
    if "position_ids" in names:
        forward["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=mask.bool())


def _encoder(model: Any, names: set[str], mapping: str) -> CaseInputs:
    ids, mask = _left_padded(model)
    ids, mask = ids.flip(1), mask.flip(1)
    forward: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in names:
        forward["attention_mask"] = mask
    if mapping not in (*GENERATING, "base") and model.config.is_encoder_decoder:
        # classifiers read the last end-of-sequence token, of which each row must have as many
        end = model.config.get_text_config().eos_token_id
        ids[:, LENGTH - PADDING - 1] = end if isinstance(end, int) else ids[:, 0]
        return CaseInputs(forward=forward, generate={}, mask=None)
    if model.config.is_encoder_decoder and "decoder_input_ids" in names:
        forward["decoder_input_ids"] = token_ids(model, length=6, seed=1)
        return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=None)
    return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=mask.bool())
