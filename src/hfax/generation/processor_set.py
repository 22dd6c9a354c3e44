"""The caller's logits processors as a call's programs take them: options, device functions, and the values that the host fills in.

`custom_processors` sorts them. No jax, and neither torch nor transformers before there are any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.sampling_config import SamplingSpec, make_sampling_spec

if TYPE_CHECKING:
    from transformers.generation import logits_process as theirs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomProcessors:
    """The caller's processors, in their order.

    Args:
        on_device: those before the first of `on_host`: options of `make_sampling_spec`, and objects with `keyed` and `apply`.
        on_host: functions of torch tensors, (input_ids [batch, length] int64, scores [batch, vocab] float32) -> scores.
        prefix_allowed_tokens_fn: from the index of a prompt and its ids so far to the allowed tokens.
        watermark: transformers' processor, whose green lists come from torch's random numbers.
    """

    on_device: tuple[Any, ...] = ()
    on_host: tuple[Callable[..., Any], ...] = ()
    prefix_allowed_tokens_fn: Callable[..., Any] | None = None
    watermark: theirs.WatermarkLogitsProcessor | None = None

    @property
    def waits_for_host(self) -> bool:
        """Whether the host does something before every token."""
        return bool(self.on_host) or self.prefix_allowed_tokens_fn is not None or self.watermark is not None


def check_callables(name: str, given: Any) -> Sequence[Callable[..., Any]]:
    """The functions of an option given as a list or None.

    Raises:
        InvalidInputError: it is no list of callables.
    """
    functions = [] if given is None else given
    wrong = functions if not isinstance(functions, (list, tuple)) else [f for f in functions if not callable(f)]
    if wrong:
        raise InvalidInputError(
            f"{name} holds {wrong!r:.80}.",
            f"{name} takes callables, in a list.",
            f"Pass {name}=[…], as in transformers.",
        )
    return functions


def with_custom(
    spec: SamplingSpec,
    values: dict[str, Any],
    custom: CustomProcessors,
    *,
    prompts: int,
    sequences: int,
    capacity: int,
    vocab_size: int,
    prompt_length: int,
    max_new_tokens: int,
) -> tuple[SamplingSpec, dict[str, Any]]:
    """The spec and values of a call with the caller's processors.

    Args:
        spec: from `make_sampling_spec`.
        values: from `make_sampling_spec`.
        custom: the caller's processors.
        prompts: padded rows of the batch.
        sequences: sequences of each prompt.
        capacity: cache capacity, in tokens.
        vocab_size: as for `make_sampling_spec`.
        prompt_length: as for `make_sampling_spec`.
        max_new_tokens: as for `make_sampling_spec`.
    """
    parts: list[Any] = []
    held: list[Mapping[str, Any]] = []
    sizes = {"vocab_size": vocab_size, "prompt_length": prompt_length, "max_new_tokens": max_new_tokens}
    for part in custom.on_device:
        found, numbers = (part, {})
        if isinstance(part, dict):
            found, numbers = _as_spec(part, sizes)
        else:
            found = part.keyed(prompts * sequences, capacity, vocab_size)
        parts.append(found)
        held.append(numbers)
    active = set(spec.active)
    if custom.prefix_allowed_tokens_fn is not None:
        active.add("prefix_allowed_tokens")
        values = {**values, "allowed": np.ones((prompts, sequences, vocab_size), bool)}
    if custom.watermark is not None:
        active.add("watermark")
        values = {**values, "watermark": np.zeros((prompts * sequences, vocab_size), np.float32)}
    spec = dataclasses.replace(
        spec, active=tuple(sorted(active)), custom=tuple(parts), visits_host=bool(custom.on_host)
    )
    return spec, {**values, "custom": tuple(held)} if parts else values


def _as_spec(options: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[SamplingSpec, dict[str, Any]]:
    from transformers import GenerationConfig

    config, extra = GenerationConfig(), {}
    for name, value in options.items():
        if hasattr(config, name):
            setattr(config, name, value)
        else:
            extra[name] = value
    return make_sampling_spec(config, **sizes, **extra)
