"""Batched sampling, with per-sequence options.

Turns logits and option arrays, one row per sequence, into tokens. Three programs keep unused options free of cost: "greedy" takes
the argmax; "narrowed" samples with temperature among few candidates; "general" supports everything: penalties, biases, grammar
masks, any top-k, and log-probabilities. All programs that support a row's options give it the same token. The logits processors
are those of `generate`. This module is independent of sequences and scheduling.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.engine.sampling_params import MAX_BIASES, MAX_LOGPROBS, MAX_SUPPRESSED, SamplingParams
from hfax.generation import logits_processors as processors
from hfax.generation.sampling import first_maximum, invert, uniform_numbers
from hfax.generation.sampling_config import SamplingSpec

KINDS = ("greedy", "narrowed", "general")
NUM_CANDIDATES = 64
"""The largest `top_k` of the program "narrowed"."""
_NUM_TOP = 32
"""Top tokens computed for log-probabilities; a fixed k, since slicing the result of `lax.top_k` is slow on CPU."""
MAX_HELD_BACK = 32
"""Maximum number of stop tokens suppressed until `min_tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Sampling options of one row.

    Args:
        params: the sequence's sampling options.
        seed: random seed.
        stream: the sequence's index in its request.
        step: number of tokens sampled before.
        slot: the sequence's slot, where its newest token is kept on the device.
        held_back: stop tokens suppressed until `min_tokens`.
        mask: grammar bitmask of the allowed tokens, [ceil(vocab / 32)] int32; None: all are allowed.
        target: score this token instead of sampling.
    """

    params: SamplingParams
    seed: int
    stream: int
    step: int
    slot: int
    held_back: tuple[int, ...] = ()
    mask: np.ndarray | None = None
    target: int | None = None

    @property
    def kind(self) -> str:
        """The cheapest program that supports this row."""
        params = self.params
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if params.needs_edits or wants_logprobs or self.held_back or self.target is not None:
            return "general"
        if params.is_greedy:
            return "greedy"
        is_narrow = 0 < params.top_k <= NUM_CANDIDATES or (params.top_k == 0 and params.top_p == 1)
        return "narrowed" if is_narrow else "general"


def kind_of(draws: list[Draw]) -> str:
    """The cheapest program that supports all rows."""
    return max((draw.kind for draw in draws), key=KINDS.index, default="greedy")


def make_rows(draws: list[Draw], num_rows: int, kind: str, *, vocab_size: int, num_slots: int) -> dict[str, np.ndarray]:
    """Input arrays of `draw_tokens` for these rows; the remaining rows are padding without a slot."""
    count = len(draws)
    rows: dict[str, np.ndarray] = {"slot": np.full(num_rows, num_slots, np.int32)}
    rows["slot"][:count] = [num_slots if d.target is not None else d.slot for d in draws]
    if kind == "greedy":
        return rows
    numbers: dict[str, tuple[Any, Any, Any]] = {
        "temperature": (np.float32, 1.0, lambda d: 1.0 if d.params.is_greedy else d.params.temperature),
        "is_greedy": (np.bool_, True, lambda d: d.params.is_greedy),
        "top_k": (np.int32, vocab_size, lambda d: min(d.params.top_k or vocab_size, vocab_size)),
        "top_p": (np.float32, 1.0, lambda d: 1.0 if d.params.is_greedy else d.params.top_p),
        "min_p": (np.float32, 0.0, lambda d: d.params.min_p),
        "seed": (np.uint32, 0, lambda d: d.seed & 0xFFFFFFFF),
        "stream": (np.int32, 0, lambda d: d.stream),
        "step": (np.int32, 0, lambda d: d.step),
    }
    if kind == "general":
        numbers |= {
            "repetition_penalty": (np.float32, 1.0, lambda d: d.params.repetition_penalty),
            "presence_penalty": (np.float32, 0.0, lambda d: d.params.presence_penalty),
            "frequency_penalty": (np.float32, 0.0, lambda d: d.params.frequency_penalty),
            "counts": (np.bool_, False, lambda d: d.params.counts_tokens and d.target is None),
            "target": (np.int32, -1, lambda d: -1 if d.target is None else d.target),
        }
        rows |= _biases(draws, num_rows, vocab_size) | _masks(draws, num_rows, vocab_size)
    for name, (dtype, neutral, value) in numbers.items():
        rows[name] = np.full(num_rows, neutral, dtype)
        rows[name][:count] = [value(d) for d in draws]
    return rows


def _biases(draws: list[Draw], num_rows: int, vocab_size: int) -> dict[str, np.ndarray]:
    ids = np.full((num_rows, MAX_BIASES + MAX_SUPPRESSED + MAX_HELD_BACK), vocab_size, np.int32)
    biases = np.zeros(ids.shape, np.float32)
    for row, draw in enumerate(draws):
        banned = (*draw.params.suppress_tokens, *draw.held_back)
        given = [*draw.params.logit_bias.items(), *((token, -np.inf) for token in banned)]
        for column, (token, bias) in enumerate(given):
            ids[row, column], biases[row, column] = token, bias
    return {"bias_ids": ids, "biases": biases}


def _masks(draws: list[Draw], num_rows: int, vocab_size: int) -> dict[str, np.ndarray]:
    masks = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
    for row, draw in enumerate(draws):
        if draw.mask is not None:
            masks[row] = draw.mask
    return {"mask": masks}


def init_counts(num_slots: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Token counts per slot, for penalties: how often a token was generated, and whether it occurs in prompt or output."""
    return {
        "written": np.zeros((num_slots, vocab_size), np.int32),
        "seen": np.zeros((num_slots, vocab_size), np.bool_),
    }


def load_counts(
    counts: dict[str, jax.Array], slot: jax.Array, tokens: jax.Array, is_written: jax.Array
) -> dict[str, jax.Array]:
    """Return the counts with one slot recomputed.

    Args:
        counts: arrays of `init_counts`.
        slot: scalar int32.
        tokens: [n] int32, prompt and output; the vocabulary size for padding.
        is_written: [n] bool, True for output tokens.
    """
    vocab = counts["seen"].shape[1]
    written = jnp.zeros(vocab, jnp.int32).at[tokens].add(is_written.astype(jnp.int32), mode="drop")
    seen = jnp.zeros(vocab, jnp.bool_).at[tokens].set(True, mode="drop")
    return {"written": counts["written"].at[slot].set(written), "seen": counts["seen"].at[slot].set(seen)}


def draw_tokens(
    kind: str,
    logits: jax.Array,
    rows: dict[str, jax.Array],
    newest: jax.Array,
    counts: dict[str, jax.Array] | None,
) -> tuple[dict[str, jax.Array], jax.Array, dict[str, jax.Array] | None]:
    """Sample a token for every row.

    Args:
        kind: "greedy", "narrowed" or "general".
        logits: [rows, vocab] float32.
        rows: arrays of `make_rows`.
        newest: [slots] int32, the newest token of each slot.
        counts: token counts of the slots, for "general".

    Returns:
        `token` [rows] int32, and for "general" its `logprob` and `rank` (or those of the row's target), `top_ids` and
        `top_logprobs` [rows, 32]; `newest` and `counts` updated with the sampled tokens.
    """
    slots = newest.shape[0]
    scores = logits
    if kind == "general":
        assert counts is not None
        scores = _edited(logits, rows, counts)
    token = first_maximum(scores)
    if kind != "greedy":
        narrowed = _narrowed(scores, rows, kind)
        uniform = uniform_numbers(rows["seed"], rows["stream"], rows["step"])
        token = jnp.where(rows["is_greedy"], token, invert(narrowed, uniform))
    out = {"token": token}
    if kind == "general":
        assert counts is not None
        is_scored = rows["target"] >= 0
        named = jnp.where(is_scored, rows["target"], token)
        out |= _log_probabilities(logits, named)
        at = jnp.where(rows["counts"], rows["slot"], slots)
        counts = {
            "written": counts["written"].at[at, token].add(1, mode="drop"),
            "seen": counts["seen"].at[at, token].set(True, mode="drop"),
        }
    return out, newest.at[rows["slot"]].set(token, mode="drop"), counts


def _at(rows: dict[str, jax.Array], values: dict[str, jax.Array], state: dict[str, jax.Array]) -> Any:
    """The `DecodeStep` for the logits processors, with option values as columns, one value per row."""
    spec = SamplingSpec(do_sample=True, active=(), num_candidates=NUM_CANDIDATES, no_repeat_ngram_size=0)
    none = jnp.zeros((0,), jnp.int32)
    return processors.DecodeStep(
        spec=spec,
        values={name: value[:, None] for name, value in values.items()},
        state=state,
        tokens=none,
        step=none,
        end=none,
        lengths=none,
    )


def _edited(logits: jax.Array, rows: dict[str, jax.Array], counts: dict[str, jax.Array]) -> jax.Array:
    """Logits with penalties, biases and masks."""
    vocab = logits.shape[1]
    slot = jnp.minimum(rows["slot"], counts["seen"].shape[0] - 1)
    state = {"seen": counts["seen"][slot] & rows["counts"][:, None], "counts": counts["written"][slot]}
    values = {n: rows[n] for n in ("repetition_penalty", "presence_penalty", "frequency_penalty")}
    at = _at(rows, values, state)
    scores = processors.penalize_generated(processors.penalize_repetition(logits, at), at)
    index = jnp.arange(logits.shape[0])[:, None]
    scores = scores.at[index, rows["bias_ids"]].add(rows["biases"], mode="drop")
    bits = (rows["mask"][:, :, None] >> jnp.arange(32)) & 1
    allowed = bits.reshape(bits.shape[0], -1)[:, :vocab] != 0
    return jnp.where(allowed, scores, -jnp.inf)


def _narrowed(scores: jax.Array, rows: dict[str, jax.Array], kind: str) -> jax.Array:
    """Scores divided by temperature, with -inf for tokens removed by top-k, top-p or min-p."""
    at = _at(rows, {"temperature": rows["temperature"], "top_k": rows["top_k"], "top_p": rows["top_p"]}, {})
    scores = processors.divide_by_temperature(scores, at)
    whole = scores
    if kind == "narrowed":
        has_top_k = (rows["top_k"] < scores.shape[1])[:, None]
        narrowed = processors.keep_top_k_top_p(scores, at)
        scores = jnp.where(has_top_k, narrowed, scores)
    else:
        scores = processors.keep_highest(scores, at)
        scores = jnp.where((rows["top_p"] < 1)[:, None], processors.keep_top_p(scores, at), scores)
    border = whole.max(axis=-1, keepdims=True) + jnp.log(rows["min_p"])[:, None]
    return jnp.where(whole < border, -jnp.inf, scores)


def _log_probabilities(logits: jax.Array, named: jax.Array) -> dict[str, jax.Array]:
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    of_named = jnp.take_along_axis(log_probs, named[:, None], axis=1)
    top, ids = jax.lax.top_k(log_probs, min(_NUM_TOP, logits.shape[1]))
    return {
        "logprob": of_named[:, 0],
        "rank": 1 + jnp.sum(log_probs > of_named, axis=-1, dtype=jnp.int32),
        "top_ids": ids.astype(jnp.int32),
        "top_logprobs": top,
    }


assert _NUM_TOP >= MAX_LOGPROBS
