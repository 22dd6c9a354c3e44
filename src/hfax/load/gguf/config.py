"""A GGUF file's metadata as the config of a transformers model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS, get_gguf_config

from hfax.errors import CheckpointCorruptError, UnsupportedModelError
from hfax.load.gguf.architectures import ARCHITECTURES, MIXTRAL, check_architecture
from hfax.load.gguf.model import GgufModel

_LARGEST = 1 << 24
"""Of any size in a config; what is larger is damage, and would be allocated."""
_REQUIRED = ("embedding_length", "block_count", "attention.head_count")
_ENDS = ("eos", "eot", "eom")
"""llama.cpp ends a text at any of these tokens."""


def read_config(model: GgufModel) -> dict[str, Any]:
    """The fields of the config, with `model_type` and `architectures`.

    Raises:
        UnsupportedModelError: the architecture, or its rotary embedding, has no counterpart in transformers.
        CheckpointCorruptError: fields are missing or impossible.
    """
    check_architecture(model.architecture)
    _check_sizes(model)
    if model.architecture not in ARCHITECTURES:
        return _known_to_transformers(model)
    values = _values(model)
    architecture = (
        MIXTRAL if values.get("expert_count") and model.architecture == "llama" else ARCHITECTURES[model.architecture]
    )
    found = {field: values[key] for key, field in architecture.fields.items() if key in values}
    if differing := [key for key in architecture.fields if isinstance(values.get(key), np.ndarray)]:
        raise UnsupportedModelError(
            f"The layers of {model.files[0].path} differ in {', '.join(differing)}.",
            f"transformers' {architecture.model_class} has the same for all layers.",
            "Use the model's safetensors.",
        )
    vocab_size, width = model.shape("token_embd.weight")
    found |= {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in model.names,
        **architecture.fixed,
        **{f"{kind}_token_id": _token(model, kind) for kind in ("bos", "eos")},
        "pad_token_id": _token(model, "padding"),
    }
    if (rope := _rope(model, values, width)) is not None:
        found["rope_parameters"] = rope
        found.pop("rope_theta", None)
    if model.architecture.startswith("gemma"):
        found["query_pre_attn_scalar"] = _attention_scale(values, width)
    if found.get("sliding_window") == 0:  # so are Phi-3 files without one marked
        found["sliding_window"] = None
    return found


def read_generation_config(model: GgufModel) -> dict[str, Any]:
    """The fields of generation_config.json: the tokens that begin, end and pad a text."""
    ends = dict.fromkeys(token for kind in _ENDS if (token := _token(model, kind)) is not None)
    return {
        "bos_token_id": _token(model, "bos"),
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": _token(model, "padding"),
    }


def _values(model: GgufModel) -> dict[str, Any]:
    """The architecture's metadata, without its name; one number for an array, one for each layer, of equal ones."""
    prefix = f"{model.architecture}."
    found = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
    same = {key: value for key, value in found.items() if isinstance(value, np.ndarray) and len({*value.tolist()}) == 1}
    return found | {key: value[0].item() for key, value in same.items()}


def _check_sizes(model: GgufModel) -> None:
    """Check what the model is built from, before it is: sizes that a file of this size cannot hold would take all memory."""
    values = _values(model)
    wrong = {
        key: value
        for key, value in values.items()
        if (isinstance(value, bool | int) and not 0 <= value <= _LARGEST)
        or (isinstance(value, float) and not math.isfinite(value))
    }
    wrong |= {key: values.get(key) for key in _REQUIRED if not isinstance(values.get(key), int) or values[key] < 1}
    has_table = "token_embd.weight" in model.names and len(model.shape("token_embd.weight")) == 2
    limits = {
        "block_count": len(model.names),
        "attention.head_count": model.shape("token_embd.weight")[1] if has_table else 0,
    }
    wrong |= {
        key: values[key] for key, most in limits.items() if isinstance(values.get(key), int) and values[key] > most
    }
    if wrong or not has_table:
        listed = ", ".join(f"{key}={value!r}" for key, value in sorted(wrong.items())) or "no token_embd.weight"
        raise CheckpointCorruptError(
            f"{model.files[0].path} does not describe a model: {listed}.",
            f"A {model.architecture} with {len(model.names)} tensors cannot have these metadata.",
            "Download the file again, or make it again with llama.cpp's convert_hf_to_gguf.py.",
        )


def _known_to_transformers(model: GgufModel) -> dict[str, Any]:
    assert model.architecture in GGUF_CONFIG_ARCHS
    # transformers' own reader leaves lists of strings as their lengths, and arrays as lists.
    plain = {
        key: len(value) if isinstance(value, list) else value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in model.metadata.items()
    }
    try:
        return get_gguf_config(plain, model.names)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointCorruptError(
            f"{model.files[0].path} does not describe a model of the architecture {model.architecture!r}.",
            f"{type(error).__name__}: {error}",
            "Make the file again with llama.cpp's convert_hf_to_gguf.py.",
        ) from error


def _token(model: GgufModel, kind: str) -> int | None:
    found = model.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return found if isinstance(found, int) else None


def _attention_scale(values: dict[str, Any], width: int) -> int:
    """Gemma's divisor of scores before its square root, which files leave out; llama.cpp tells large models by their layers."""
    heads = values["attention.head_count"]
    largest = values["block_count"] in (46, 62)
    return width // heads if largest else values.get("attention.key_length", width // heads)


def _rope(model: GgufModel, values: dict[str, Any], width: int) -> dict[str, Any] | None:
    """The rotary embedding's scaling in transformers' terms; None: the plain one.

    Raises:
        UnsupportedModelError: a kind that transformers does not have.
    """
    theta = values.get("rope.freq_base", 10000.0)
    size = values.get("rope.dimension_count") or width // values["attention.head_count"]
    if model.architecture == "gemma3":
        return _gemma3_rope(values, theta)
    if model.architecture == "phi3":
        return _phi3_rope(model, values, theta, width)
    if "rope_freqs.weight" in model.names:
        return _llama3_rope(model, theta, size)
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor")
    if kind == "none" or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    if kind == "yarn":
        length = values.get("rope.scaling.original_context_length")
        own = {"rope_type": "yarn", "factor": factor, "rope_theta": theta, "original_max_position_embeddings": length}
        betas = {name: values.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return own | {name: value for name, value in betas.items() if value is not None}
    raise _unknown_rope(model, f"its scaling is {kind!r}")


def _gemma3_rope(values: dict[str, Any], theta: float) -> dict[str, Any]:
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if values.get("rope.scaling.type") == "linear" and values.get("rope.scaling.factor"):
        whole |= {"rope_type": "linear", "factor": values["rope.scaling.factor"]}
    local = {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", 10000.0)}
    return {"full_attention": whole, "sliding_attention": local}


def _phi3_rope(model: GgufModel, values: dict[str, Any], theta: float, width: int) -> dict[str, Any]:
    size = width // values["attention.head_count"]
    own = {"rope_theta": theta, "partial_rotary_factor": values.get("rope.dimension_count", size) / size}
    if "rope_factors_long.weight" not in model.names:
        return {"rope_type": "default", **own}
    long, short = (model.read(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short"))
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **own}


def _llama3_rope(model: GgufModel, theta: float, size: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling. The file has the factor of each frequency only; the rule's other numbers are those of all its models."""
    stored = model.read("rope_freqs.weight").double()
    factor, low, high, length = round(stored.max().item(), 3), 1.0, 4.0, 8192
    waves = 2 * math.pi * theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-4):
        raise _unknown_rope(model, "the factors of its frequencies are not those of Llama 3")
    if factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
        "rope_theta": theta,
    }


def _unknown_rope(model: GgufModel, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The rotary position embedding of {model.files[0].path} has no counterpart in transformers: {found}.",
        "hfax reads the plain one, linear and YaRN scaling, and those of Llama 3, Gemma 3 and Phi-3.",
        "Use the model's safetensors.",
    )
