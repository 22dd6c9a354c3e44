"""Adapters of other PEFT types whose updates are low-rank pairs: they are read as LoRA, exactly.

AdaLoRA (https://arxiv.org/abs/2303.10512), VeRA (https://arxiv.org/abs/2310.11454), LoHa and LoKr (https://arxiv.org/abs/2108.06098,
https://arxiv.org/abs/2309.14859) as PEFT 0.21 stores and computes them. What is saved afterwards, and what is trained, is LoRA.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.lora.config import CONFIG_NAME, LoraConfig, read_config
from hfax.lora.files import read_adapter
from hfax.lora.options import INERT, is_off
from hfax.lora.targets import target_of

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
"""`lora_A` [rank, in] and `lora_B` [out, rank], with a scaling of 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """What a layer's pair is made of.

    Args:
        own: its arrays, by the ends of their names.
        shared: all arrays of the file.
        config: fields of the adapter's config.
        scaling: `alpha` over the rank, for this layer.
        into: its input width.
    """

    own: Tensors
    shared: Tensors
    config: Mapping[str, Any]
    scaling: float
    into: int


def _of_adalora(layer: _Layer) -> Pair:
    """`lora_B @ (lora_A * lora_E)`, scaled by `lora_alpha` over the initial rank."""
    first, own = layer.config["init_r"], layer.own
    alpha = layer.config["lora_alpha"] if layer.config["lora_alpha"] > 0 else float(first)
    return own["lora_A"] * own["lora_E"], own["lora_B"] * (alpha / (first + 1e-5))


def _of_vera(layer: _Layer) -> Pair:
    """`lambda_b * B @ (lambda_d * A)`, with slices of the random matrices that all layers share."""
    down, up = (layer.shared.get(f"base_model.vera_{part}") for part in "AB")
    if down is None or up is None:
        raise UnsupportedOptionError(
            "The VeRA adapter has no random matrices (save_projection=False).",
            "PEFT would draw them again from a seed, which gives other numbers on other machines.",
            "Save it with save_projection=True.",
        )
    scale_up, scale_down = layer.own["vera_lambda_b"], layer.own["vera_lambda_d"]
    return down[:, : layer.into] * scale_down[:, None], up[: len(scale_up)] * scale_up[:, None]


def _of_loha(layer: _Layer) -> Pair:
    """The product, number by number, of two low-rank matrices: a matrix whose rank is the product of theirs."""
    own = layer.own
    up = _columns(own["hada_w1_a"], own["hada_w2_a"])
    return _columns(own["hada_w1_b"].T, own["hada_w2_b"].T).T, up * layer.scaling


def _columns(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Products of each column of one matrix with each of the other: [n, a · b] of [n, a] and [n, b]."""
    return (one[:, :, None] * other[:, None, :]).flatten(1)


def _of_lokr(layer: _Layer) -> Pair:
    """The Kronecker product of two matrices, which is the product of those of their factors."""
    (up_1, down_1), (up_2, down_2) = (_factors(layer.own, f"lokr_{part}") for part in ("w1", "w2"))
    return torch.kron(down_1, down_2), torch.kron(up_1, up_2) * layer.scaling


def _factors(own: Tensors, name: str) -> Pair:
    """Two matrices whose product is the named one: those stored, or it and an identity."""
    if f"{name}_a" in own:
        return own[f"{name}_a"], own[f"{name}_b"]
    whole = own[name]
    if whole.shape[0] <= whole.shape[1]:
        return torch.eye(whole.shape[0]), whole
    return whole, torch.eye(whole.shape[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """A type of adapter.

    Args:
        marks: ends of the names of arrays one of which every adapted layer has.
        fields: fields of its config that its pairs depend on, or that only matter in training.
        pair: makes a layer's pair.
    """

    marks: tuple[str, ...]
    fields: frozenset[str]
    pair: Callable[[_Layer], Pair]


_OF_ALL = frozenset({
    "peft_type", "base_model_name_or_path", "task_type", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "init_weights", *INERT,
})  # fmt: skip
"""Fields of any type that are read, or change no numbers; which layers have an adapter, the file's arrays say."""
_LYCORIS = frozenset({
    "r", "alpha", "rank_pattern", "alpha_pattern", "use_effective_conv2d", "rank_dropout", "module_dropout", "rank_dropout_scale",
})  # fmt: skip
_KINDS: dict[str, _Kind] = {
    "ADALORA": _Kind(
        marks=("lora_E",),
        fields=frozenset({
            "r", "lora_alpha", "lora_dropout", "rank_pattern", "init_lora_weights", "target_r", "init_r", "tinit", "tfinal",
            "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
        }),
        pair=_of_adalora,
    ),
    "VERA": _Kind(
        marks=("vera_lambda_b",),
        fields=frozenset({"r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial"}),
        pair=_of_vera,
    ),
    "LOHA": _Kind(marks=("hada_w1_a",), fields=_LYCORIS, pair=_of_loha),
    "LOKR": _Kind(
        marks=("lokr_w1", "lokr_w1_a"), fields=_LYCORIS | {"decompose_both", "decompose_factor"}, pair=_of_lokr
    ),
}  # fmt: skip
CONVERTED = tuple(_KINDS)
"""Values of `peft_type` that are read as LoRA."""


def read_as_lora(folder: Path, module: torch.nn.Module) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """An adapter's config, and its tensors by the model's layer names.

    Args:
        folder: saved by PEFT or hfax.
        module: the model that it is for.

    Raises:
        CheckpointCorruptError: files are unreadable, missing, or for another model.
        UnsupportedOptionError: another adapter type, or an option that hfax does not support.
    """
    given = read_config(folder)
    if (kind := _KINDS.get(given["peft_type"])) is None:
        return LoraConfig.from_fields(given, str(folder / CONFIG_NAME)), read_adapter(folder)
    _check(given, kind, folder)
    stored = {name: tensor.float() for name, tensor in read_adapter(folder).items()}
    paths = list(dict.fromkeys(n.rpartition(".")[0] for n in stored if n.rpartition(".")[2] in kind.marks))
    known = {name for name, _ in module.named_modules()}
    if not paths or not known.issuperset(paths):
        raise CheckpointCorruptError(
            f"The adapter in {folder} does not fit {type(module).__name__}, which has no layer "
            f"{next((path for path in paths if path not in known), 'of its arrays')}.",
            f"Its peft_type is {given['peft_type']}, and it was trained on "
            f"{given.get('base_model_name_or_path') or 'another model'}.",
            "Load it into its base model.",
        )
    is_lycoris = "alpha" in kind.fields
    scales = LoraConfig(
        r=given.get("r") or 1,
        lora_alpha=given["alpha"] if is_lycoris else given.get("r") or 1,
        rank_pattern=(given.get("rank_pattern") if is_lycoris else None) or {},
        alpha_pattern=(given.get("alpha_pattern") if is_lycoris else None) or {},
    )
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for path in paths:
        target = target_of(module, path)
        own = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.rpartition(".")[0] == path}
        layer = _Layer(own=own, shared=stored, config=given, scaling=scales.scaling(path), into=target.into)
        pair = kind.pair(layer)
        if not pair[0].shape[0]:  # AdaLoRA has pruned all of the layer's rank
            continue
        tensors |= {f"{path}.{part}": array.contiguous() for part, array in zip(target.parts, pair, strict=True)}
        ranks[path] = pair[0].shape[0]
    rank = max(ranks.values(), default=1)
    others = {path: own for path, own in ranks.items() if own != rank}
    logger.info("the %s adapter in %s is read as LoRA of rank %d", given["peft_type"], folder, rank)
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=tuple(ranks),
        rank_pattern=others,
        alpha_pattern={path: float(own) for path, own in others.items()},
        base_model_name_or_path=given.get("base_model_name_or_path"),
        task_type=given.get("task_type"),
    )
    return config, tensors


def _check(given: Mapping[str, Any], kind: _Kind, folder: Path) -> None:
    """Raise for fields that may change what the adapter computes, and are not read."""
    known = kind.fields | _OF_ALL
    wrong = {n: v for n, v in given.items() if n not in known and not is_off(v) and (n, v) != ("bias", "none")}
    if wrong:
        raise UnsupportedOptionError(
            f"The {given['peft_type']} adapter in {folder} sets {', '.join(f'{n}={v!r}' for n, v in sorted(wrong.items()))}.",
            "hfax reads the low-rank updates of such adapters alone.",
            "Merge the adapter into its base model with PEFT and load the merged model.",
        )
