"""Optimizers by transformers' names, or optax's, from the options of `TrainingArguments`.

AdamW, Adafactor and SGD compute what transformers' Trainer computes with torch's classes; Lion and Muon what their authors' do. The
8-bit ones follow bitsandbytes (`hfax.train.eight_bit`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.train.eight_bit import with_eight_bit_moments
from hfax.train.updates import ByWeight, choose_decay

Schedule = Callable[[Any], Any]
_ALIASES = {
    "adamw": "adamw_torch",
    "adamw_torch_fused": "adamw_torch",
    "lion_32bit": "lion",
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_torch_8bit": "adamw_bnb_8bit",
}
_ARGS: dict[str, tuple[str, ...]] = {
    "adamw_torch": (),
    "adafactor": ("decay_rate", "clip_threshold"),
    "adamw_bnb_8bit": (),
    "lion": (),
    "lion_8bit": (),
    "sgd": ("momentum", "nesterov"),
    "muon": ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
}
"""By name, the options of `optim_args`."""
_WITH_BETAS = ("adamw_torch", "adamw_bnb_8bit", "lion", "lion_8bit", "muon")
_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""By torch's name: the factor of a matrix's update."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """What optimizers ask about weights.

    Args:
        decays: whether weight decay applies to a weight of this name.
        is_hidden: whether it is in a hidden layer: neither an embedding nor in a head.
        is_embedding: whether it is an embedding's table.
    """

    decays: Callable[[str], bool]
    is_hidden: Callable[[str], bool]
    is_embedding: Callable[[str], bool]

    @staticmethod
    def of(module: torch.nn.Module) -> Weights:
        """The answers for the weights of a transformers model."""
        tables = {path for path, part in module.named_modules() if isinstance(part, torch.nn.Embedding)}
        prefix = str(getattr(module, "base_model_prefix", "") or "")
        inner = f"{prefix}." if prefix and hasattr(module, prefix) else ""

        def is_embedding(name: str) -> bool:
            return name.rpartition(".")[0] in tables

        return Weights(
            decays=choose_decay(module),
            is_hidden=lambda name: name.startswith(inner) and not is_embedding(name),
            is_embedding=is_embedding,
        )


def check_optimizer(args: Any) -> None:
    """Raise for an optimizer that does not exist, or options that it does not have.

    Raises:
        InvalidInputError: names what exists.
        UnsupportedOptionError: an optimizer of transformers that hfax lacks.
    """
    name, given = _name(args.optim), optim_args(args)
    of_optax = _of_optax(name)
    if name in _ARGS:
        takes = _ARGS[name]
    elif of_optax is not None:
        takes = tuple(inspect.signature(of_optax).parameters)[1:]
    else:
        raise _unknown(args.optim)
    if unknown := sorted(set(given) - set(takes)):
        raise InvalidInputError(
            f"optim_args has {unknown[0]!r}, which {args.optim} does not take.",
            "An argument is honoured or refused, never ignored.",
            f"It takes {', '.join(takes) or 'none'}.",
        )
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    unused = [] if name in _WITH_BETAS else ["adam_beta1", "adam_beta2", "adam_epsilon"]
    unused += ["adam_epsilon"] if name in ("lion", "lion_8bit") else []
    unused += [] if name in _ARGS else ["weight_decay"]
    for option in unused:
        if getattr(args, option) != defaults[option]:
            raise InvalidInputError(
                f"{option}={getattr(args, option)} has no effect on optim={args.optim!r}.",
                "An argument is honoured or refused, never ignored.",
                "Leave it out" + ("." if name in _ARGS else f"; options of optax.{name} are given in optim_args."),
            )
    if given.get("adjust_lr_fn", "original") not in _FACTORS:
        raise InvalidInputError(
            f"adjust_lr_fn={given['adjust_lr_fn']!r} is unknown.",
            "It has torch's names.",
            f"Use {', '.join(_FACTORS)}.",
        )


def optim_args(args: Any) -> dict[str, Any]:
    """`optim_args` as a mapping; as text it is "name=value, name=value", as in transformers.

    Raises:
        InvalidInputError: the text is no such list.
    """
    if args.optim_args is None or isinstance(args.optim_args, Mapping):
        return dict(args.optim_args or {})
    pairs = [part.partition("=") for part in args.optim_args.replace(" ", "").split(",") if part]
    try:
        return {name: _value(value) for name, _, value in pairs}
    except ValueError as error:
        raise InvalidInputError(
            f"optim_args={args.optim_args!r} could not be read.",
            str(error),
            'Pass {"momentum": 0.9}, or "momentum=0.9".',
        ) from error


def make_optimizer(args: Any, schedule: Schedule, weights: Weights) -> optax.GradientTransformation | ByWeight:
    """The optimizer that `args.optim` names, after gradient clipping.

    Args:
        args: `TrainingArguments`.
        schedule: learning rate of a step.
        weights: which weights decay, and which are hidden.
    """
    name, given = _name(args.optim), optim_args(args)
    betas: dict[str, Any] = {"b1": args.adam_beta1, "b2": args.adam_beta2}

    def mask(params: Any) -> Any:
        return {each: weights.decays(each) for each in params}

    clip = optax.identity() if args.max_grad_norm is None else optax.clip_by_global_norm(args.max_grad_norm)
    decay: dict[str, Any] = {"weight_decay": args.weight_decay, "mask": mask}
    adamw = optax.adamw(schedule, **betas, eps=args.adam_epsilon, **decay)
    match name:
        case "adamw_torch":
            made = adamw
        case "adamw_bnb_8bit" | "lion_8bit":
            scaled = (
                optax.scale_by_lion(**betas)
                if name == "lion_8bit"
                else optax.scale_by_adam(**betas, eps=args.adam_epsilon)
            )
            each = optax.chain(
                with_eight_bit_moments(scaled, weights.is_embedding),
                optax.add_decayed_weights(**decay),
                optax.scale_by_learning_rate(schedule),
            )
            return ByWeight(clip, each)
        case "lion":
            made = optax.lion(schedule, **betas, **decay)
        case "sgd":
            made = optax.chain(optax.add_decayed_weights(**decay), optax.sgd(schedule, **given))
        case "adafactor":
            made = optax.chain(
                optax.scale_by_factored_rms(decay_rate=-given.get("decay_rate", -0.8), min_dim_size_to_factor=1),
                optax.clip_by_block_rms(given.get("clip_threshold", 1.0)),
                optax.add_decayed_weights(**decay),
                optax.scale_by_learning_rate(schedule),
            )
        case "muon":
            muon = optax.chain(
                scale_by_muon(**given), optax.add_decayed_weights(**decay), optax.scale_by_learning_rate(schedule)
            )

            def label(params: Any) -> Any:
                return {n: "muon" if a.ndim == 2 and weights.is_hidden(n) else "adamw" for n, a in params.items()}

            made = optax.partition({"muon": muon, "adamw": adamw}, label)
        case _:
            made = _of_optax(name)(schedule, **given)  # pyright: ignore[reportOptionalCall]
    return made if args.max_grad_norm is None else optax.chain(clip, made)


def scale_by_muon(
    momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5, adjust_lr_fn: str = "match_rms_adamw"
) -> optax.GradientTransformation:
    """Orthogonalized momentum of matrices, as `torch.optim.Muon` but in float32 (https://kellerjordan.github.io/posts/muon/).

    Args:
        momentum: share of the momentum before.
        nesterov: look ahead by one gradient.
        ns_steps: steps of the Newton-Schulz iteration.
        adjust_lr_fn: "match_rms_adamw", with which one learning rate suits AdamW's weights too, or "original", torch's default.
    """

    def init(params: Any) -> Any:
        return optax.TraceState(trace=jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        kept = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.trace, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, kept, updates) if nesterov else kept
        found = jax.tree.map(lambda m: _FACTORS[adjust_lr_fn](*m.shape) * _orthogonalized(m, ns_steps), ahead)
        return found, optax.TraceState(trace=kept)

    return optax.GradientTransformation(init, update)


def _orthogonalized(matrix: jax.Array, steps: int) -> jax.Array:
    """Near the closest matrix with singular values of 1, by Newton-Schulz."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), _SMALLEST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def _name(optim: Any) -> str:
    word = str(getattr(optim, "value", optim))
    return _ALIASES.get(word, word)


def _of_optax(name: str) -> Callable[..., optax.GradientTransformation] | None:
    """optax's optimizer of a name: a function of a learning rate."""
    found = getattr(optax, name, None)
    if not inspect.isfunction(found):
        return None
    return found if next(iter(inspect.signature(found).parameters), None) == "learning_rate" else None


def _unknown(optim: Any) -> InvalidInputError | UnsupportedOptionError:
    others = f"Use {', '.join(_ARGS)}, the name of an optimizer of optax, or pass Trainer an optax optimizer."
    if "bit" in str(optim):
        return UnsupportedOptionError(
            f"optim={str(optim)!r} is not supported.",
            "Of the optimizers with moments in few bits, hfax has AdamW and Lion with 8, on the device.",
            "Use adamw_8bit or lion_8bit, or one with float32 moments.",
        )
    return InvalidInputError(
        f"optim={str(optim)!r} is unknown.", "Optimizers have transformers' or optax's names.", others
    )


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text if text in _FACTORS else float(text)
