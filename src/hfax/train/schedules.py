"""Learning rate schedules, with the names, options and values of `transformers.get_scheduler`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.errors import InvalidInputError

Factor = Callable[[jax.Array], jax.Array]

SCHEDULERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": None},
    "warmup_stable_decay": {
        **{"num_decay_steps": None, "num_stable_steps": None, "warmup_type": "linear", "decay_type": "cosine"},
        **{"min_lr_ratio": 0.0, "num_cycles": 0.5},
    },
}
"""Each schedule's options and their defaults."""
_RAMPS: dict[str, Factor] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - jnp.cos(jnp.pi * done)),
    "1-sqrt": lambda done: 1.0 - jnp.sqrt(1.0 - done),
}
_WITHOUT_END = {"constant", "constant_with_warmup", "inverse_sqrt"}


def make_schedule(
    kind: str, options: Mapping[str, Any], *, peak: float, warmup_steps: int, total_steps: int
) -> Callable[[Any], jax.Array]:
    """A schedule for optax: the learning rate of a step, counted from 0.

    Args:
        kind: a name in `SCHEDULERS`, checked with its options by `check_schedule`.
        options: options of the schedule.
        peak: the learning rate after the warm-up.
        warmup_steps: steps over which it rises from 0.
        total_steps: steps of the run.
    """
    options = {**SCHEDULERS[kind], **options}
    span = max(total_steps - warmup_steps, 1)
    make = {
        "linear": lambda: lambda after: 1.0 - after / span,
        "cosine": lambda: lambda after: 0.5 * (1.0 + jnp.cos(jnp.pi * 2.0 * options["num_cycles"] * after / span)),
        "cosine_with_restarts": lambda: _restarts(int(options["num_cycles"]), span),
        "polynomial": lambda: _polynomial(options["lr_end"] / peak, options["power"], span),
        "constant": lambda: jnp.ones_like,
        "constant_with_warmup": lambda: jnp.ones_like,
        "inverse_sqrt": lambda: _inverse_sqrt(options["timescale"] or warmup_steps or 10_000),
        "warmup_stable_decay": lambda: _stable_decay(options, span),
    }
    fall = make[kind]()
    lowest = options.get("min_lr_ratio", 0.0)

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.int32)
        risen = _RAMPS[options.get("warmup_type", "linear")](step / max(warmup_steps, 1))
        risen = risen * (1.0 - lowest) + lowest
        after = jnp.maximum(step - warmup_steps, 0).astype(jnp.float32)
        return peak * jnp.where(step < warmup_steps, risen, jnp.maximum(fall(after), 0.0))

    return rate


def check_schedule(kind: str, options: Mapping[str, Any], peak: float) -> None:
    """Raise for an unknown schedule, or options that it does not have.

    Raises:
        InvalidInputError: names what exists.
    """
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        raise InvalidInputError(
            f"lr_scheduler_type={kind!r} is unknown.",
            "Schedules have the names and options of transformers.",
            f"Use one of {', '.join(SCHEDULERS)}; or pass Trainer an optax optimizer with a schedule of its own.",
        )
    if unknown := sorted(set(options) - set(SCHEDULERS[kind])):
        raise InvalidInputError(
            f"lr_scheduler_kwargs has {unknown[0]!r}, which {kind!r} does not take.",
            "An argument is honoured or refused, never ignored.",
            f"It takes {', '.join(SCHEDULERS[kind]) or 'none'}.",
        )
    for name in ("warmup_type", "decay_type"):
        if options.get(name, "linear") not in _RAMPS:
            raise InvalidInputError(
                f"lr_scheduler_kwargs has {name}={options[name]!r}.",
                "It is unknown.",
                f"Use one of {', '.join(_RAMPS)}.",
            )
    words = ("warmup_type", "decay_type")
    for name, value in options.items():
        if name not in words and value is not None and (not _is_number(value) or value < 0):
            raise InvalidInputError(
                f"lr_scheduler_kwargs has {name}={value!r}.",
                "It is not a number of at least 0.",
                f"Pass another {name}.",
            )
    if kind == "warmup_stable_decay" and options.get("num_decay_steps") is None:
        raise InvalidInputError(
            "warmup_stable_decay needs num_decay_steps.",
            "The learning rate is stable until that many steps before the end.",
            'Pass lr_scheduler_kwargs={"num_decay_steps": …}.',
        )
    if kind == "polynomial" and not peak > options.get("lr_end", SCHEDULERS[kind]["lr_end"]):
        raise InvalidInputError(
            f"learning_rate={peak} is not above lr_end.",
            "A polynomial schedule falls from learning_rate to lr_end, by default 1e-7.",
            'Pass a higher learning_rate, or lr_scheduler_kwargs={"lr_end": …}.',
        )


def depends_on_end(kind: str, options: Mapping[str, Any]) -> bool:
    """Whether the learning rate before the end depends on where the end is."""
    return kind not in _WITHOUT_END and options.get("num_stable_steps") is None


def _restarts(cycles: int, span: int) -> Factor:
    def fall(after: jax.Array) -> jax.Array:
        within = (
            (cycles * after.astype(jnp.int32)) % span / span
        )  # whole numbers: a restart must not come a step early or late
        return jnp.where(after >= span, 0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * within)))

    return fall


def _polynomial(end: float, power: float, span: int) -> Factor:
    return lambda after: jnp.maximum(1.0 - after / span, 0.0) ** power * (1.0 - end) + end


def _inverse_sqrt(timescale: float) -> Factor:
    return lambda after: 1.0 / jnp.sqrt((after + timescale) / timescale)


def _stable_decay(options: Mapping[str, Any], span: int) -> Factor:
    decay, lowest = options["num_decay_steps"], options["min_lr_ratio"]
    stable = span - decay if options["num_stable_steps"] is None else options["num_stable_steps"]

    def fall(after: jax.Array) -> jax.Array:
        done = jnp.clip((after - stable) / max(decay, 1), 0.0, 1.0)
        if options["decay_type"] == "cosine":
            factor = 0.5 * (1.0 + jnp.cos(math.pi * 2.0 * options["num_cycles"] * done))
        else:
            factor = 1.0 - (done if options["decay_type"] == "linear" else jnp.sqrt(done))
        factor = factor * (1.0 - lowest) + lowest
        return jnp.where(after < stable, 1.0, jnp.where(after < stable + decay, factor, lowest))

    return fall


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
