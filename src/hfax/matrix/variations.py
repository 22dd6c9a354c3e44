"""Random configurations and prompt lengths, to cover more than the small configs of the matrix.

Turns a small config and a seed into a `Variation`: changed config fields and prompts. Fields are changed by the meaning of their
names; plain transformers determines whether the changed model can be built and run. It builds no models.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.resources
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from hfax.synthetic.fields import token_ids
from hfax.synthetic.images import AROUND, feature_counts, image_token, prompts_with_images
from hfax.synthetic.inputs import GENERATING, CaseInputs

_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh", "sigmoid")
_SWITCH = re.compile(r"(^|_)(bias|norm|residual|rescale|scale|parallel|post|qk|clip|alibi|embeddings?)(_|$)")
_NO_SWITCH = re.compile(r"cache|decoder|return|output|torch|dropout|training|gradient|vision|image|audio|quant|prenorm")
_LENGTHS = (1, 2, 5, 9, 17, 20, 33)
_NEW_TOKENS = (1, 2, 6, 16, 16, 40)
_SIDES = (1, 2, 3, 4, 6)
_MOST_CHANGES = 6
_HOLES = 5
"""One of this many tokens is masked in a mask with holes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variation:
    """The changes of a random case.

    Args:
        changes: config field ("sliding_window", "text_config.vocab_size") to value.
        lengths: non-padding tokens per text row; (): keep the case's inputs.
        padding: forward pass padding: "left", "right" or "holes" (left, with some middle tokens masked); generation always uses
            left padding.
        new_tokens: number of greedy tokens to generate.
        seed: seed of weights and prompts.
        image_sizes: sizes of the two images, as `ImageSizes`; (): keep the case's sizes.
        around: tokens of text before and after each image.
    """

    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    padding: str = "left"
    new_tokens: int = 16
    seed: int = 0
    image_sizes: tuple[tuple[int, int], ...] = ()
    around: tuple[int, int] = AROUND


def draw(config: PretrainedConfig, mapping: str, seed: int) -> Variation:
    """A random variation of a small config, deterministic in the seed."""
    rng = random.Random(f"{config.model_type} {mapping} {seed}")
    possible = list(_possible_changes(config, rng))
    count = rng.randint(1, _MOST_CHANGES)
    changes: dict[str, Any] = {}
    for some in rng.sample(possible, min(count, len(possible))):
        changes |= some
    changes |= _extra_layers(config, changes, rng.choice((0, 0, 0, 1, 2)))
    writes = mapping in GENERATING
    lengths = tuple(rng.choice(_LENGTHS) for _ in range(rng.choice((1, 2, 3))))
    with_images = mapping == "image-text-to-text"
    image_sizes = tuple((rng.choice(_SIDES), rng.choice(_SIDES)) for _ in range(2)) if with_images else ()
    around = (rng.choice((1, 3, 9)), rng.choice((2, 5, 14))) if with_images else AROUND
    return Variation(
        changes=changes,
        lengths=lengths if writes and not with_images else (),
        padding=rng.choice(("left", "left", "right", "holes")),
        new_tokens=rng.choice(_NEW_TOKENS) if rng.random() > 0.05 else 300,
        seed=rng.randrange(1 << 16),
        image_sizes=image_sizes,
        around=around,
    )


def apply_changes(config: Any, changes: dict[str, Any]) -> None:
    """Apply a variation's values to a config."""
    for path, value in changes.items():
        *parts, name = path.split(".")
        holder = config
        for part in parts:
            holder = getattr(holder, part)
        object.__setattr__(holder, name, copy.deepcopy(value))  # transformers changes dicts in place


def vary_inputs(model: Any, inputs: CaseInputs, variation: Variation) -> CaseInputs:
    """The case's inputs with the variation's text lengths or image sizes; other inputs are unchanged."""
    if variation.image_sizes and "pixel_values" in inputs.forward and not model.config.is_encoder_decoder:
        text = token_ids(model, rows=2, length=sum(variation.around), seed=variation.seed)
        one, two = variation.image_sizes
        left = prompts_with_images(model, text, feature_counts, (one, two), variation.around)
        forward = _with_padding(left, variation.padding, image_token(model.config))
        return CaseInputs(forward=forward, generate=dict(left), mask=forward["attention_mask"].bool())
    if not variation.lengths or set(inputs.forward) - {
        "input_ids",
        "attention_mask",
        "position_ids",
        "decoder_input_ids",
    }:
        return inputs
    width = max(variation.lengths)
    rows = len(variation.lengths)
    ids = token_ids(model, rows=rows, length=width, seed=variation.seed)
    real = torch.tensor(variation.lengths)[:, None]
    place = torch.arange(width)[None]
    left = (place >= width - real).long()
    if model.config.is_encoder_decoder:
        mask = (place < real).long()
        forward = {"input_ids": ids, "attention_mask": mask}
        forward["decoder_input_ids"] = token_ids(model, rows=rows, length=min(width, 7), seed=variation.seed + 1)
        return CaseInputs(forward=forward, generate={"input_ids": ids, "attention_mask": mask}, mask=None)
    mask = (place < real).long() if variation.padding == "right" else left
    if variation.padding == "holes":
        mask = mask * ((place - width) % _HOLES != 2).long()
        mask[:, -1] = 1
    forward = {n: v for n, v in (("input_ids", ids * mask), ("attention_mask", mask)) if n in inputs.forward}
    if "attention_mask" not in forward:  # the model cannot distinguish padding from text
        forward, left, mask = {"input_ids": ids}, torch.ones_like(left), torch.ones_like(mask)
    if "position_ids" in inputs.forward:
        forward["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    generate = {"input_ids": ids * left, "attention_mask": left}
    return CaseInputs(forward=forward, generate=generate, mask=mask.bool())


def _with_padding(left: dict[str, Any], padding: str, token: int | None) -> dict[str, Any]:
    """Left-padded prompts with images, padded on the right or with some text tokens masked."""
    ids, mask = left["input_ids"], left["attention_mask"]
    rows, length = ids.shape
    if padding == "right":
        by_token = {n: v for n, v in left.items() if v.shape[:2] == (rows, length)}
        shifts = (mask == 0).sum(1).tolist()
        return left | {n: torch.stack([v[i].roll(-shifts[i], 0) for i in range(rows)]) for n, v in by_token.items()}
    if padding == "holes":
        is_hole = ((torch.arange(length) - length) % _HOLES == 2)[None] & (
            ids != token if token is not None else ids > 0
        )
        is_hole[:, -1] = False
        return left | {"input_ids": ids.masked_fill(is_hole, 0), "attention_mask": mask.masked_fill(is_hole, 0)}
    return left


def _possible_changes(config: PretrainedConfig, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Possible changes, each of one field or several related fields."""
    if "tie_word_embeddings" in vars(config):
        yield {"tie_word_embeddings": not config.tie_word_embeddings}
    text, prefix = _text_config(config)
    if prefix is None:
        return
    for change in (*_heads(text, rng), *_rope(text, rng), *_layers(text, rng)):
        yield {prefix + name: value for name, value in change.items()}
    for name, value in vars(text).items():
        if (choose := _RULES.get(name)) is not None and type(value) in (int, float):
            yield {prefix + name: choose(value, rng)}
        elif name.endswith(("activation", "hidden_act", "activation_function")) and value in _ACTIVATIONS:
            yield {prefix + name: rng.choice(_ACTIVATIONS)}
        elif (
            isinstance(value, bool)
            and _SWITCH.search(name)
            and not _NO_SWITCH.search(name)
            and name != "tie_word_embeddings"
        ):
            yield {prefix + name: not value}


def _text_config(config: PretrainedConfig) -> tuple[Any, str | None]:
    """The decoder's config, and the prefix of its fields; None if no field holds it."""
    text: Any = config.get_text_config(decoder=True)
    if text is config:
        return text, ""
    return text, next((f"{n}." for n in config.sub_configs if getattr(config, n, None) is text), None)


def _extra_layers(config: PretrainedConfig, changes: dict[str, Any], more: int) -> dict[str, Any]:
    """Decoder layers added at the end; lists with an entry for each layer go on as they began."""
    text, prefix = _text_config(config)
    field = next((n for n in ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers") if n in vars(text)), None)
    if prefix is None or field is None or not more:
        return {}
    count = vars(text)[field]
    drawn = {name: changes.get(prefix + name, value) for name, value in vars(text).items()}
    lists = {n: v for n, v in drawn.items() if isinstance(v, list) and len(v) == count}
    longer = {prefix + n: [v[i % count] for i in range(count + more)] for n, v in lists.items()}
    return {prefix + field: count + more} | longer


def _near(value: Any, rng: random.Random) -> int:
    return max(1, int(value) + rng.choice((-3, -1, 1, 5)))


def _one_of(*values: Any) -> Callable[[Any, random.Random], Any]:
    return lambda value, rng: rng.choice(values)


def _a_bit_more(value: Any, rng: random.Random) -> int:
    return int(value) + rng.choice((0, 1, int(value)))


_EPSILON = _one_of(1e-12, 1e-3, 0.1)
_RULES: dict[str, Callable[[Any, random.Random], Any]] = {
    name: choose
    for choose, names in (
        (
            _one_of(1, 2, 3, 7, 19, 64),
            ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"),
        ),
        (_near, ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size")),
        (_EPSILON, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")),
        (_one_of(None, 1.0, 5.0), ("final_logit_softcapping", "attn_logit_softcapping")),
        (_one_of(0.5, 1.0, 3.0), ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier")),
        (_a_bit_more, ("num_experts", "num_local_experts", "n_routed_experts", "vocab_size")),
        (_one_of(1, 2), ("num_experts_per_tok", "top_k_experts", "moe_top_k")),
        (_one_of(2, 3, 4), ("conv_kernel", "d_conv", "mamba_d_conv", "conv_L_cache", "linear_conv_kernel_dim")),
        (_one_of(3, 8, 16), ("state_size", "mamba_d_state", "d_state")),
        (_one_of(1, 3, 8, 32), ("chunk_size", "mamba_chunk_size", "relative_attention_num_buckets")),
        (_one_of(6, 20, 128), ("relative_attention_max_distance",)),
        (_one_of(400, 1000), ("max_position_embeddings",)),
        (_one_of(1, 3, 8), ("index_topk", "index_topk_blocks")),
        (_one_of(2, 4), ("index_block_size",)),
    )
    for name in names
}


def _heads(text: Any, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Vary head counts: one head, many groups, odd counts if head_dim is a separate field."""
    heads, groups = getattr(text, "num_attention_heads", None), vars(text).get("num_key_value_heads")
    if not isinstance(heads, int):
        return
    has_own_width = isinstance(vars(text).get("head_dim"), int)
    wanted = rng.choice((1, 2, 3, 5, 6) if has_own_width else (1, 2, 4, 8))
    change = {"num_attention_heads": wanted}
    if groups is not None:
        divisors = [n for n in range(1, wanted + 1) if wanted % n == 0]
        change["num_key_value_heads"] = rng.choice(divisors)
    yield change
    if has_own_width and "mrope" not in str(vars(text).get("rope_parameters")):
        yield {"head_dim": rng.choice((8, 24, 32))}


def _rope(text: Any, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Other RoPE scaling types, for sequences shorter and longer than the original maximum."""
    rope = vars(text).get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "mrope_section" in rope:
        return
    plain = {n: rope[n] for n in ("rope_theta", "partial_rotary_factor") if n in rope}
    original = {"original_max_position_embeddings": 16}
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, **original},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    ]
    yield {"rope_parameters": plain | rng.choice(kinds)}
    yield {"rope_parameters": rope | {"rope_theta": rng.choice((10.0, 500000.0))}}


def _layers(text: Any, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Another order of the layer types, with those that the modelling code knows besides.

    Defaults of a config class hide kinds of layers that its published checkpoints have (MiniMax-M3's sparse ones).
    """
    kinds = vars(text).get("layer_types")
    if not isinstance(kinds, list):
        return
    known = sorted({*kinds, *_kinds_in_code(type(text))})
    if len(known) > 1:
        drawn = [rng.choice(known) for _ in kinds]
        window = {"sliding_window": 7} if not vars(text).get("sliding_window") else {}
        if "sliding_attention" in drawn and "use_sliding_window" in vars(text):
            window["use_sliding_window"] = True
        yield {"layer_types": drawn} | (window if "sliding_attention" in drawn else {})


@functools.cache
def _kinds_in_code(config_class: type) -> frozenset[str]:
    """The layer types that the modelling code of a config class names, besides recurrent ones, whose sizes it may not have."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    source = importlib.resources.files(config_class.__module__.rpartition(".")[0])
    code = "".join(file.read_text(encoding="utf-8") for file in source.iterdir() if file.name.startswith("modeling_"))
    attention = (kind for kind in ALLOWED_ATTN_LAYER_TYPES if "attention" in kind or "sparse" in kind)
    return frozenset(kind for kind in attention if f'"{kind}"' in code and kind != "linear_attention")
