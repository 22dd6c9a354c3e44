"""Small inputs for the parameters of transformers' forward methods: token ids, pixels, audio, time series, boxes.

Turns a model and a parameter name into a tensor drawn from a fixed seed. Shapes follow the config; tables list the model types that
need another layout. `inputs` chooses the parameters of a case.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from hfax.synthetic.images import LAYOUTS, SIZES, draw, image_inputs, vision_config

LENGTH = 20
"""Text length, in tokens."""
ROWS = 2
STEPS = 6
"""Length of short sequences, such as decoder ids, embeddings and trajectories."""
_TEXT, _SHORTER = 8, 2
_SAMPLES = 4000
_MONO = (
    "dac",
    "encodec",
    "mimi",
    "pe_audio",
    "vibevoice_acoustic",
    "xcodec",
    "pocket_tts",
    "neucodec",
    "wavtokenizer",
    "higgs_audio_v2",
    "omniasr",
)
"""Model type prefixes of audio models that take [rows, channels, samples]."""


def make_field(model: Any, name: str) -> Any:
    """Make the input for a parameter of forward.

    Raises:
        NotImplementedError: no rule for this name.
    """
    if name not in _MAKERS:
        raise NotImplementedError(f"no inputs for {name}")
    return _MAKERS[name](model)


def find(config: Any, *names: str) -> Any:
    """The first of these fields that is set in a config, else in one of its sub-configs; None if none is."""
    parts = [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in names:
            if part is not None and (value := getattr(part, name, None)) is not None:
                return value
    return None


# Text


def vocabulary(model: Any) -> int:
    """Vocabulary size of the model's text part; 199 if the config has none."""
    config = model.config.get_text_config(decoder=True)
    size = (
        getattr(config, "vocab_size", None)
        or getattr(model.config, "vocab_size", None)
        or find(model.config, "vocab_size")
    )
    return int(size or 199)


def special_ids(config: Any) -> set[int]:
    """All special token ids of a config and its sub-configs."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if hasattr(value, "sub_configs"):
            found |= special_ids(value)
        elif name.endswith(("_token_id", "_token_index")):
            found |= set(value if isinstance(value, (list, tuple)) else [value]) - {None}
    return found


def token_ids(model: Any, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Ordinary token ids, [rows, length] int64, distinct within a row: repeated tokens would tie in top-k selections."""
    avoided = special_ids(model.config) | {0, 1, 2, 3}
    ordinary = torch.tensor([i for i in range(vocabulary(model)) if i not in avoided])
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[:length]] for _ in range(rows)])


def _decoder_ids(model: Any) -> torch.Tensor:
    """Decoder ids, [rows, 6] int64; [rows, 6, channels] for a decoder of audio codes."""
    ids = token_ids(model, length=getattr(model.config, "canvas_length", None) or STEPS, seed=1)
    if model.config.model_type == "dia":
        return ids[..., None].repeat(1, 1, model.config.decoder_config.num_channels)
    return ids


def _boxes(model: Any) -> torch.Tensor:
    """Boxes, [rows, length, 4] (left, top, right, bottom): int64 for models with embedding tables, else float32 in [0, 1)."""
    corners = torch.rand((ROWS, LENGTH, 2, 2), generator=torch.Generator().manual_seed(0)).sort(dim=2).values.flatten(2)
    table = getattr(model.config, "max_2d_position_embeddings", None)
    return (corners * (table // 2)).long() if table and model.config.model_type != "udop" else corners


def _text_with_end(model: Any) -> torch.Tensor:
    """Token ids, [rows, 8] int64, with the end token that text towers look for: at the end, in the first row two tokens earlier."""
    ids = token_ids(model, length=_TEXT)
    end = find(model.config, "eos_token_id")
    if isinstance(end, int):
        ids[0, -1 - _SHORTER] = ids[1, -1] = end
    return ids


def text_mask(ids: torch.Tensor) -> torch.Tensor:
    """Attention mask, [rows, length] int64: 0 after the first row's end token."""
    mask = torch.ones_like(ids)
    mask[0, ids.shape[1] - _SHORTER :] = 0
    return mask


# Images and videos


def _pixels(model: Any) -> Any:
    """Pixels, [rows, channels, height, width]; with a frame axis, or as patches, for models that take those."""
    config = model.config
    names = set(_parameters(model))
    is_own = config.model_type.removesuffix("_vision") in LAYOUTS
    if is_own or names & {"grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes"}:
        return image_inputs(model)["pixel_values"]
    channels = find(config, "num_channels", "in_channels") or 3
    return draw(ROWS, *_frames(config), channels, *_height_and_width(config))


def _num_patches(config: Any) -> int:
    """Number of units that a masked autoencoder may mask: patches, or groups of patches in hierarchical models."""
    patch = getattr(config, "patch_stride", None) or config.patch_size
    sides = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    unit = math.prod(getattr(config, "masked_unit_size", None) or (1, 1))
    return math.prod(size // side for size, side in zip(_height_and_width(config), sides, strict=True)) // unit


def _frames(config: Any) -> tuple[int, ...]:
    """The axis of frames in pixels, or of the two images that a model matches; () if pixels have none."""
    if config.model_type in ("efficientloftr", "lightglue", "superglue"):
        return (2,)
    if config.model_type in ("timesformer", "videomae", "vivit", "xclip", "tvp", "instructblipvideo"):
        frames = find(config, "num_frames")
        return (frames,) if frames else ()
    return ()


def _height_and_width(config: Any) -> tuple[int, int]:
    if config.model_type == "seggpt":  # an image stands above its prompt
        height, width = config.image_size
        return height // 2, width
    if ratios := getattr(config, "scaled_images_ratios", None):  # the smallest copy of an image has one patch
        side = int(config.patch_size / min(ratios))
        return side, side
    size = (
        find(config, "image_size", "input_size", "img_size", "crop_size")
        or find(vision_config(config), "image_size")
        or 64
    )
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _video(model: Any) -> torch.Tensor:
    """Video pixels, [rows, frames, channels, height, width]."""
    frames = find(model.config, "num_frames", "frames_per_clip") or 4
    return draw(ROWS, frames, find(model.config, "num_channels", "in_chans") or 3, *_height_and_width(model.config))


def _patches(model: Any) -> torch.Tensor:
    """Patches of two images, [patches, values], as described by the grids."""
    return image_inputs(model)["pixel_values"]


def _grid(model: Any) -> torch.Tensor:
    found = image_inputs(model)
    return found.get("image_grid_thw", found.get("image_grid_hw"))  # type: ignore[return-value]


# Audio


def _wave(model: Any) -> torch.Tensor:
    """Audio, [rows, samples]; [rows, channels, samples] for codecs; [rows, frames, mel bins] for models of spectrograms."""
    config = model.config
    if (length := getattr(config, "max_length", None)) and (bins := getattr(config, "num_mel_bins", None)):
        return draw(ROWS, length, bins)
    if config.model_type.startswith(_MONO):
        return draw(ROWS, getattr(config, "audio_channels", None) or 1, _SAMPLES)
    if config.model_type == "muse_spark_audio":
        return draw(ROWS, 2 * 1920)
    if config.model_type == "speecht5" and "decoder_input_values" in _parameters(model):  # takes prenet outputs
        return draw(ROWS, STEPS, config.hidden_size)
    is_for_vectors = hasattr(model, "tdnn")  # convolutions over time, which need more frames
    return draw(ROWS, 2 * _SAMPLES if is_for_vectors else _SAMPLES)


_FEATURE_WIDTHS = (
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "num_mel_bins",
    "feature_size",
    "input_feat_size",
    "input_dim",
)


def _features(model: Any) -> torch.Tensor:
    """Audio features: [rows, mel bins, frames] for Whisper-like models, [rows, frames, features] for the others."""
    config = model.config
    width = find(config, *_FEATURE_WIDTHS)
    if config.model_type.startswith("clap"):
        return draw(ROWS, 1, 80, width)
    if (
        (positions := find(config, "max_source_positions"))
        and find(config, "num_mel_bins")
        and not find(config, "conv_kernel_sizes")
    ):
        return draw(ROWS, width, 2 * positions)
    if config.model_type in _BINS_FIRST:
        return draw(ROWS, width, 80)
    width = _OWN_WIDTHS.get(config.model_type, lambda _: width)(config)
    if width is None:
        raise NotImplementedError("the width of the features is not in the config")
    return draw(ROWS, 80, width)


_OWN_WIDTHS: dict[str, Callable[[Any], Any]] = {
    "gemma4_audio": lambda config: 128,
    "pop2piano": lambda config: config.d_model,
    "fun_asr_nano_encoder": lambda config: config.input_size,
    "granite_speech5_encoder": lambda config: 4 * config.num_mel_bins,
    "granite_speech5_ctc": lambda config: 4 * config.encoder_config.num_mel_bins,
}
"""Model type to the width of its features, where it is not one of `_FEATURE_WIDTHS`."""
_BINS_FIRST = ("glmasr_encoder", "voxtral_realtime_encoder", "qwen3_asr_encoder", "audioflamingo3_encoder")


def _latents(model: Any) -> torch.Tensor:
    """Codec latents, [rows, channels, frames]."""
    return draw(ROWS, find(model.config, "hidden_size", "latent_dim", "vae_dim") or 64, 10)


# Time series


def _series(model: Any) -> torch.Tensor:
    config = model.config
    length = getattr(config, "context_length", None) or 32
    if lags := getattr(config, "lags_sequence", None):
        return draw(ROWS, length + max(lags))
    channels = getattr(config, "num_input_channels", None)
    return draw(ROWS, length, *((channels,) if channels else ()))


def _like_series(model: Any, fill: float, features: str | None = None) -> torch.Tensor:
    past = _series(model)
    return torch.full((*past.shape, getattr(model.config, features)) if features else past.shape, fill)


def _future(model: Any, features: str | None = None) -> torch.Tensor:
    width = (getattr(model.config, features),) if features else ()
    return draw(ROWS, model.config.prediction_length, *width)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "input_ids": _text_with_end,
    "decoder_input_ids": lambda model: _decoder_ids(model),
    "qformer_input_ids": lambda model: token_ids(model, length=STEPS, seed=1) % 100,
    "task_inputs": lambda model: token_ids(model, length=model.config.task_seq_len) % 77,
    "bbox": _boxes,
    "visual_feats": lambda model: draw(ROWS, 3, model.config.visual_feat_dim),
    "visual_pos": lambda model: draw(ROWS, 3, model.config.visual_pos_dim).sigmoid(),
    "query_embeds": lambda model: draw(ROWS, 3, model.config.hidden_size),
    "encoder_hidden_states": lambda model: draw(ROWS, 5, model.config.encoder_hidden_size),
    "noise_embeds": lambda model: draw(ROWS, STEPS, model.config.hidden_size),
    "context_hidden_states": lambda model: draw(ROWS, LENGTH, model.config.hidden_size),
    "inputs_embeds": lambda model: draw(ROWS, STEPS, model.config.hidden_size),
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "prompt_pixel_values": lambda model: draw(ROWS, 3, *_height_and_width(model.config)),
    "prompt_masks": lambda model: draw(ROWS, 3, *_height_and_width(model.config)),
    "pixel_attention_mask": lambda model: image_inputs(model)["pixel_attention_mask"],
    "spatial_shapes": lambda model: image_inputs(model)["spatial_shapes"],
    "target_sizes": lambda model: image_inputs(model)["target_sizes"],
    "hidden_states": lambda model: _patches(model) if "grid_thw" in _parameters(model) else _latents(model),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": lambda model: torch.tensor([1, 2]),
    "noise": lambda model: draw(ROWS, _num_patches(model.config)),
    "noise_sequence": lambda model: draw(ROWS, 80, model.config.model_in_channels),
    "input_values": _wave,
    "input_features": _features,
    "input_features_mask": lambda model: _features_mask(model),
    "audio_mel": lambda model: draw(ROWS, 48, model.config.input_feat_size),
    "audio_mel_mask": lambda model: torch.zeros(ROWS, 48, dtype=torch.bool),
    "latents": _latents,
    "states": lambda model: draw(ROWS, STEPS, model.config.state_dim),
    "actions": lambda model: draw(ROWS, STEPS, model.config.act_dim),
    "rewards": lambda model: draw(ROWS, STEPS, 1),
    "returns_to_go": lambda model: draw(ROWS, STEPS, 1),
    "timesteps": lambda model: torch.arange(STEPS)[None].repeat(ROWS, 1),
    "past_values": _series,
    "past_values_padding": lambda model: _like_series(model, 0).long(),
    "past_observed_mask": lambda model: _like_series(model, 1.0),
    "past_time_features": lambda model: _like_series(model, 0.5, "num_time_features"),
    "future_values": _future,
    "future_time_features": lambda model: _future(model, "num_time_features"),
    "inputs": lambda model: _byte_inputs(model),
    "pixel_position_ids": lambda model: LAYOUTS["gemma4"](model, SIZES)["image_position_ids"],
    "freq": lambda model: torch.zeros(ROWS, 1, dtype=torch.long),
    "flattened_patches": lambda model: LAYOUTS["pix2struct"](model, SIZES)["flattened_patches"],
}


def _features_mask(model: Any) -> torch.Tensor:
    shape = _features(model).shape
    is_bins_first = shape[1] != 80 or model.config.model_type in _BINS_FIRST
    return torch.ones(ROWS, shape[-1 if is_bins_first else 1], dtype=torch.long)


def _byte_inputs(model: Any) -> torch.Tensor:
    """Input of a Perceiver: token ids or pixels, depending on its preprocessor; vectors if it has none."""
    preprocessor = getattr(getattr(model, "perceiver", model), "input_preprocessor", None)
    name = type(preprocessor).__name__
    if "Text" in name:
        return token_ids(model)
    return _pixels(model) if "Image" in name else draw(ROWS, LENGTH, model.config.d_model)


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters
