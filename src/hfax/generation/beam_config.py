"""Beam search's options, split into static ones that shape a program and values passed to it as arguments. No jax."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSpec:
    """What beam search specializes a program for.

    Args:
        num_beams: beams of each prompt, above 1.
        num_candidates: continuations of all beams of a prompt that are looked at in a step. Some of them end their text; there are
            so many that `num_beams` others remain.
    """

    num_beams: int
    num_candidates: int


def num_beams(config: GenerationConfig) -> int:
    """Beams of each prompt; 1: no beam search."""
    return int(config.num_beams or 1)


def rows_per_prompt(config: GenerationConfig) -> int:
    """Sequences that a program writes for each prompt: its beams, or the sequences to return."""
    return max(num_beams(config), int(config.num_return_sequences or 1))


def make_beam_spec(
    config: GenerationConfig, *, num_eos: int, max_new_tokens: int, capacity: int
) -> tuple[BeamSpec | None, dict[str, np.ndarray]]:
    """Split the options of beam search into spec and values.

    Args:
        config: the options, in range (`sampling_checks.check_ranges`).
        num_eos: number of end-of-sequence tokens.
        max_new_tokens: maximum number of new tokens.
        capacity: maximum tokens of a sequence, prompt included.

    Returns:
        The spec, and the values by name: `divisors` [capacity + 1] float32, `length ** length_penalty` for each number of new
        tokens; `max_new_tokens` int32; `ends_when_full` bool, `early_stopping=True`; `hopes_for_longest` bool, whether beams are
        compared with ended ones as if they went on to the end. None and no values without beam search.

    Raises:
        UnsupportedOptionError: there are stop strings.
    """
    if (beams := num_beams(config)) == 1:
        return None, {}
    if config.stop_strings:
        raise UnsupportedOptionError(
            f"stop_strings={config.stop_strings!r} cannot be used with beam search.",
            "Whether a candidate ends its text is decided on the device at every step; strings are searched on the host.",
            "Remove stop_strings, pass the tokens that end a text as eos_token_id, or pass num_beams=1.",
        )
    penalty = float(1.0 if config.length_penalty is None else config.length_penalty)
    with np.errstate(over="ignore", divide="ignore"):
        # in double precision, as transformers computes them
        divisors = np.power(np.arange(capacity + 1, dtype=np.float64), penalty).astype(np.float32)
    values: dict[str, Any] = {
        "divisors": divisors,
        "max_new_tokens": np.int32(max_new_tokens),
        "ends_when_full": np.bool_(config.early_stopping is True),
        "hopes_for_longest": np.bool_(config.early_stopping == "never" and penalty > 0),
    }
    return BeamSpec(num_beams=beams, num_candidates=max(2, 1 + num_eos) * beams), values


def fill_token(eos_token_ids: tuple[int, ...], pad_token_id: int) -> int:
    """What follows the end of a sequence: the pad token, but the end-of-sequence token where the pad token is 0.

    transformers writes `pad_token_id or eos_token_id[0]`, which matters for T5 and Marian: their tokenizers skip both.
    """
    return pad_token_id or (eos_token_ids[0] if eos_token_ids else 0)
