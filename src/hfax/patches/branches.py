"""Code that computes on the places of a mask alone, as a computation of all places and a choice between the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hfax.patches.patch import ForwardPatch, FunctionPatch, Patch


def _spline_with_tails(original: Callable[..., Any]) -> Callable[..., Any]:
    within: Any = original.__globals__["_rational_quadratic_spline"]

    def unconstrained(
        inputs: Any,
        unnormalized_widths: Any,
        unnormalized_heights: Any,
        unnormalized_derivatives: Any,
        reverse: bool = False,
        tail_bound: float = 5.0,
        min_bin_width: float = 1e-3,
        min_bin_height: float = 1e-3,
        min_derivative: float = 1e-3,
    ) -> tuple[Any, Any]:
        """VITS's spline between the bounds, and the inputs themselves outside of them."""
        ends = float(np.log(np.exp(1 - min_derivative) - 1))
        is_inside = (inputs >= -tail_bound) & (inputs <= tail_bound)
        outputs, log_abs_det = within(
            inputs=torch.where(is_inside, inputs, 0.0),
            unnormalized_widths=unnormalized_widths,
            unnormalized_heights=unnormalized_heights,
            unnormalized_derivatives=torch.nn.functional.pad(unnormalized_derivatives, pad=(1, 1), value=ends),
            reverse=reverse,
            tail_bound=tail_bound,
            min_bin_width=min_bin_width,
            min_bin_height=min_bin_height,
            min_derivative=min_derivative,
        )
        return torch.where(is_inside, outputs, inputs), torch.where(is_inside, log_abs_det, 0.0)

    return unconstrained


def _both_kinds_of_tokens(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Higgs Audio's layer, [batch, length, width], with norms and feed-forward networks of its own for audio tokens."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        options = given.pop("kwargs", {})
        hidden, is_audio = given.pop("hidden_states"), given.pop("audio_token_mask", None)
        if is_audio is None:
            return original(hidden, audio_token_mask=None, **given, **options)
        is_audio = is_audio[..., None]
        normed = torch.where(is_audio, module.audio_input_layernorm(hidden), module.input_layernorm(hidden))
        hidden = hidden + module.self_attn(hidden_states=normed, **given, **options)[0]
        of_text = module.mlp(module.post_attention_layernorm(hidden))
        of_audio = module.audio_mlp(module.audio_post_attention_layernorm(hidden))
        return hidden + torch.where(is_audio, of_audio, of_text)

    return forward


PATCHES: list[Patch] = [
    FunctionPatch(
        name="spline-with-tails",
        why="VITS evaluates its spline at the places inside of its bounds, whose number depends on the values",
        target="transformers.models.vits.modeling_vits:_unconstrained_rational_quadratic_spline",
        make=_spline_with_tails,
        model_types=("vits",),
    ),
    ForwardPatch(
        name="text-and-audio-tokens",
        why="Higgs Audio v2 gives each of a layer's two feed-forward networks its tokens, whose number depends on their values",
        classes=("transformers.models.higgs_audio_v2.modeling_higgs_audio_v2:HiggsAudioV2DecoderLayer",),
        make=_both_kinds_of_tokens,
    ),
]
