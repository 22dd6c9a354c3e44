"""The host's loop around a request with beam search, on every backend: from checked prompts to the best texts.

Like `host_loop`, it does not know JAX and torch_xla.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hfax.errors import UnsupportedOptionError
from hfax.generation.beam_config import fill_token, num_beams
from hfax.generation.generation_request import GenerationOptions, Prompts
from hfax.generation.host_loop import DecodingLoop, Generated, Streamer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamProgress:
    """What the host reads of a state with beams.

    Args:
        num_steps: steps so far.
        is_complete: the search is over for all prompts.
        scores: [prompts, beams] float32, of the ended texts, best first; prompts that only pad the batch are last.
        texts: the ended texts by name, [prompts, beams, capacity], see `beam_search.Texts`.
    """

    num_steps: int
    is_complete: bool
    scores: np.ndarray
    texts: Mapping[str, np.ndarray]


class BeamLoop(DecodingLoop, Protocol):
    """The programs of a request with beam search on one backend."""

    def read_beams(self, state: dict[str, Any]) -> BeamProgress:
        """Wait for the device and copy what the host looks at."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedByBeams(Generated):
    """The texts of a beam search.

    Args:
        sequences_scores: [sequences] float32, the sum of log-probabilities divided by `length ** length_penalty`.
        beam_indices: [sequences, steps] int32, the row of the beam that each token continued; -1 after a sequence's end. Rows of
            `scores` and `logits` are beams; they have an entry for each step of the search, which may be longer than its texts.
    """

    sequences_scores: np.ndarray
    beam_indices: np.ndarray


def run_beam_search(
    loop: BeamLoop,
    inputs: Mapping[str, Any],
    prompts: Prompts,
    options: GenerationOptions,
    *,
    streamer: Streamer | None,
) -> GeneratedByBeams:
    """Search until no prompt can get a better text.

    Args:
        loop: the request's programs.
        inputs: inputs of `loop.start`.
        prompts: checked and padded prompts.
        options: generation options.
        streamer: must be None.

    Raises:
        UnsupportedOptionError: a streamer was passed.
    """
    if streamer is not None:
        raise UnsupportedOptionError(
            f"streamer cannot be used with beam search (num_beams={options.config.num_beams}).",
            "Which text is the best is known only at the end.",
            "Remove streamer, or pass num_beams=1.",
        )
    state = loop.start(inputs)
    while not (progress := loop.read_beams(state)).is_complete:
        chunk = loop.unwatched_chunk or options.max_new_tokens
        state = loop.advance(state, min(progress.num_steps + chunk, options.max_new_tokens))
    return _collect(loop, state, progress, prompts, options)


def _collect(
    loop: BeamLoop, state: dict[str, Any], progress: BeamProgress, prompts: Prompts, options: GenerationOptions
) -> GeneratedByBeams:
    """The best `num_return_sequences` texts of each prompt, cut off at the longest of them."""
    given, first = len(prompts.given), prompts.padded_length
    best = np.s_[:given, : options.config.num_return_sequences or 1]
    texts = {name: a[best].reshape(-1, a.shape[-1])[:, first:] for name, a in progress.texts.items()}
    lengths = (texts["parents"] >= 0).sum(axis=1)
    texts = {name: array[:, : lengths.max()] for name, array in texts.items()}
    past_end = np.arange(lengths.max())[None] >= lengths[:, None]
    fill = fill_token(options.eos_token_ids, options.pad_token_id)

    def record(name: str) -> np.ndarray | None:
        kept = loop.record(state, name)
        return None if kept is None else kept[: progress.num_steps, : given * num_beams(options.config)]

    return GeneratedByBeams(
        new_tokens=np.where(past_end, fill, texts["tokens"]).astype(np.int32),
        lengths=lengths,
        scores=record("scores"),
        logits=record("logits"),
        log_probs=np.where(past_end, 0.0, texts["log_probs"]) if "log_probs" in texts else None,
        sequences_scores=progress.scores[best].reshape(-1),
        beam_indices=texts["parents"].astype(np.int32),
    )
