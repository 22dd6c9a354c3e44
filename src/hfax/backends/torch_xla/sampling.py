"""From logits to the next token on torch_xla: the processors of `hfax.generation.logits_processors`, in torch.

Shapes do not depend on values, and everything that changes from step to step is a tensor, so every step is the same program.
Random numbers are generated on the host once per call, from one Philox stream per row, so a seed is reproducible on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from hfax.errors import UnsupportedOptionError
from hfax.generation.processor_set import CustomProcessors
from hfax.generation.sampling_config import SamplingSpec

_NEVER = -float("inf")
Processor = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]
"""From scores [batch, vocab] float32, values and the decoding state, to scores of the same shape."""


def uniform_numbers(seed: int, rows: int, steps: int) -> np.ndarray:
    """[rows, steps] float32 in [0, 1), one stream per row."""
    streams = (np.random.Generator(np.random.Philox(key=[seed, row])) for row in range(rows))
    return np.stack([stream.random(steps, dtype=np.float32) for stream in streams])


def check_supported(spec: SamplingSpec) -> None:
    """Raise `UnsupportedOptionError` for options that this backend lacks."""
    lacking = [name for part in (spec, *spec.custom) for name in part.active if name not in PROCESSORS]
    if lacking:
        raise UnsupportedOptionError(
            f"The backend torch_xla does not support {', '.join(lacking)}.",
            "These have no implementation on it.",
            'Remove the option, or use backend="jax", which supports it.',
        )


def check_custom(custom: CustomProcessors) -> None:
    """Raise `UnsupportedOptionError` for functions of JAX arrays."""
    if any(not isinstance(part, dict) for part in custom.on_device):
        raise UnsupportedOptionError(
            "The backend torch_xla does not support hfax.device_processor.",
            "It marks a function of JAX arrays, and this backend's program is torch's.",
            'Pass a function of torch tensors, or use backend="jax".',
        )


def process(spec: SamplingSpec, values: Mapping[str, Any], at: Mapping[str, Any], logits: Any) -> Any:
    """Scores of the next token, [batch, vocab] float32: `penalize`, then `warp`.

    Args:
        spec: the active processors.
        values: their parameters, from `make_sampling_spec`, on the device.
        at: `tokens` [batch, capacity], `step` and `end` scalars, `first`, `lengths` and `prompt_lengths` [batch], and the
            state from `remember`.
        logits: [batch, vocab].
    """
    return warp(spec, values, at, penalize(spec, values, at, logits))


def penalize(spec: SamplingSpec, values: Mapping[str, Any], at: Mapping[str, Any], logits: Any) -> Any:
    """The first half of `process`: penalties, and the caller's processors that are options."""
    scores = _apply(spec.penalties, spec, values, at, logits.float())
    for index, part in enumerate(spec.custom):
        scores = process(part, values["custom"][index], at, scores)
    return scores


def warp(spec: SamplingSpec, values: Mapping[str, Any], at: Mapping[str, Any], scores: Any) -> Any:
    """The second half of `process`: temperature, the filters of sampling, normalization."""
    return _apply(spec.warpers, spec, values, at, scores)


def _apply(names: Collection[str], spec: SamplingSpec, values: Any, at: Mapping[str, Any], scores: Any) -> Any:
    at = {**at, "spec": spec}
    for name, processor in PROCESSORS.items():
        if name in names:
            scores = processor(scores, values, at)
    return scores


def choose(spec: SamplingSpec, scores: Any, uniform: Any) -> Any:
    """The next token of each row, [batch] int64: the first highest score, or sampled with `uniform`, [batch]."""
    vocab = scores.shape[-1]
    index = torch.arange(vocab, device=scores.device)
    best = torch.where(scores == scores.max(dim=-1, keepdim=True).values, index, vocab).min(dim=-1).values
    best = best.clamp(max=vocab - 1)
    if not spec.do_sample:
        return best
    weights = torch.softmax(scores, dim=-1)
    sums = weights.cumsum(dim=-1)
    is_possible = weights > 0
    is_past = is_possible & (sums > uniform[:, None] * sums[:, -1:])
    last = torch.where(is_possible, index, 0).max(dim=-1).values
    drawn = torch.minimum(torch.where(is_past, index, vocab).min(dim=-1).values, last)
    return torch.where(torch.isfinite(sums[:, -1]), drawn, best)


def remember(spec: SamplingSpec, vocab: int, prompt: Any, mask: Any) -> dict[str, Any]:
    """The processors' initial state from the prompt, [batch, length], where `mask` is not 0."""
    state: dict[str, Any] = {}
    active = {name for part in (spec, *spec.custom) for name in part.active}
    if "repetition_penalty" in active:
        seen = torch.zeros((prompt.shape[0], vocab + 1), dtype=torch.float32, device=prompt.device)
        real = torch.where(mask != 0, prompt, vocab)
        state["seen"] = seen.scatter(1, real, 1.0)[:, :vocab]
    if "presence_frequency_penalty" in spec.active:
        state["counts"] = torch.zeros((prompt.shape[0], vocab), dtype=torch.float32, device=prompt.device)
    return state


def remember_drawn(state: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """The processors' state after `tokens`, [batch], were generated."""
    state = dict(state)
    one = torch.ones_like(tokens, dtype=torch.float32)[:, None]
    if "seen" in state:
        state["seen"] = state["seen"].scatter(1, tokens[:, None], 1.0)
    if "counts" in state:
        state["counts"] = state["counts"].scatter_add(1, tokens[:, None], one)
    return state


def _banned(scores: Any, ids: Any, where: Any = True) -> Any:
    """Scores with `ids`, [n] or [batch, n], banned in the rows (or entries) selected by `where`."""
    wide = torch.nn.functional.pad(scores, (0, 1))  # padding ids are one past the last token
    ids = ids if ids.ndim == 2 else ids[None].expand(scores.shape[0], -1)
    marks = torch.as_tensor(where, device=scores.device).to(scores.dtype)
    marks = marks.reshape(-1, 1) if marks.ndim == 1 else marks
    hit = torch.zeros_like(wide).scatter_add(1, ids.long(), marks.expand(ids.shape).contiguous())
    return torch.where(hit[:, :-1] > 0, _NEVER, scores)


def _sequence_bias(scores: Any, values: Any, at: Any) -> Any:
    matches = _ends_with(at, values["sequence_bias_prefixes"])
    bias = torch.where(matches, values["sequence_bias"], 0.0)
    wide = torch.nn.functional.pad(scores, (0, 1))
    last = values["sequence_bias_last"][None].expand(scores.shape[0], -1).long()
    return wide.scatter_add(1, last, bias.to(wide.dtype))[:, :-1]


def _repetition(scores: Any, values: Any, at: Any) -> Any:
    penalty = values["repetition_penalty"]
    return torch.where(at["seen"] > 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _encoder_repetition(scores: Any, values: Any, at: Any) -> Any:
    ids, penalty = _encoder_ids(scores, values), values["encoder_repetition_penalty"]
    marks = torch.zeros_like(torch.nn.functional.pad(scores, (0, 1))).scatter(1, ids, 1.0)[:, :-1]
    return torch.where(marks > 0, torch.where(scores < 0, scores / penalty, scores * penalty), scores)


def _encoder_ngrams(scores: Any, values: Any, at: Any) -> Any:
    size, ids, tokens = at["spec"].encoder_no_repeat_ngram_size, _encoder_ids(scores, values), at["tokens"]
    index = torch.arange(ids.shape[1], device=ids.device)[None]
    repeats = (index + size - 1 < ids.shape[1]) & (at["lengths"] >= size - 1)[:, None]
    for offset in range(size - 1):
        last = tokens.index_select(1, (at["end"] - size + 1 + offset).reshape(1).clamp(min=0))
        repeats = repeats & (torch.roll(ids, -offset, dims=1) == last)
    return _banned(scores, torch.where(repeats, torch.roll(ids, -(size - 1), dims=1), scores.shape[-1]))


def _encoder_ids(scores: Any, values: Any) -> Any:
    ids = values["encoder_ids"].long()
    return ids.repeat_interleave(scores.shape[0] // ids.shape[0], dim=0)


def _presence(scores: Any, values: Any, at: Any) -> Any:
    counts = at["counts"]
    return scores - values["frequency_penalty"] * counts - values["presence_penalty"] * (counts > 0)


def _ngrams(scores: Any, values: Any, at: Any) -> Any:
    size, tokens = at["spec"].no_repeat_ngram_size, at["tokens"]
    index = torch.arange(tokens.shape[1], device=tokens.device)[None]
    repeats = (index >= at["first"][:, None]) & (index + size - 1 < at["end"])
    for offset in range(size - 1):
        last = tokens.index_select(1, (at["end"] - size + 1 + offset).reshape(1).clamp(min=0))
        repeats = repeats & (torch.roll(tokens, -offset, dims=1) == last)
    following = torch.where(repeats, torch.roll(tokens, -(size - 1), dims=1), scores.shape[-1])
    return _banned(scores, following)


def _bad_words(scores: Any, values: Any, at: Any) -> Any:
    return _banned(scores, values["bad_words_ids_last"], _ends_with(at, values["bad_words_ids_prefixes"]))


def _min_length(scores: Any, values: Any, at: Any) -> Any:
    is_short = (at["lengths"] < values["min_length"]) | (at["step"] < values["min_new_tokens"])
    return _banned(scores, values["min_length_eos"], is_short)


def _force(scores: Any, ids: Any, where: Any) -> Any:
    kept = torch.zeros_like(torch.nn.functional.pad(scores, (0, 1)))
    kept = kept.scatter(1, ids.reshape(1, -1).expand(scores.shape[0], -1).long(), 1.0)[:, :-1]
    return torch.where(where.reshape(-1, 1), torch.where(kept > 0, 0.0, _NEVER), scores)


def _allowed(scores: Any, values: Any, at: Any) -> Any:
    limits = torch.where(values["allowed"], 0.0, _NEVER)
    kept = scores.reshape(limits.shape) + limits
    is_impossible = torch.isneginf(kept.amax(dim=-1, keepdim=True)).all(dim=1, keepdim=True)
    return torch.where(is_impossible, limits, kept).reshape(scores.shape)


def _forced_bos(scores: Any, values: Any, at: Any) -> Any:
    return _force(scores, values["forced_bos_token_id"], at["lengths"] == 1)


def _forced_eos(scores: Any, values: Any, at: Any) -> Any:
    is_last = (at["step"] == values["last_step"]).expand(scores.shape[0])
    return _force(scores, values["forced_eos_token_id"], is_last)


def _suppress(scores: Any, values: Any, at: Any) -> Any:
    return _banned(scores, values["suppress_tokens"])


def _suppress_begin(scores: Any, values: Any, at: Any) -> Any:
    is_forced = (at["prompt_lengths"] <= 1) & ("forced_bos_token_id" in at["spec"].active)
    return _banned(scores, values["begin_suppress_tokens"], at["step"] == is_forced.long())


def _top_h(scores: Any, values: Any, at: Any) -> Any:
    candidates = torch.topk(scores, min(100, scores.shape[-1]), dim=-1).values
    log_probs = torch.log_softmax(candidates, dim=-1)
    terms = torch.where(torch.isinf(log_probs), 0.0, -torch.exp(log_probs) * log_probs)
    is_kept = (terms.cumsum(dim=-1) <= values["top_h"] * terms.sum(dim=-1, keepdim=True)) & ~torch.isinf(candidates)
    kept = torch.where(is_kept, candidates, float("inf")).min(dim=-1, keepdim=True).values
    return torch.where(scores < torch.minimum(kept, scores.max(dim=-1, keepdim=True).values), _NEVER, scores)


def _top_k(scores: Any, values: Any, at: Any) -> Any:
    candidates = torch.topk(scores, min(at["spec"].num_candidates, scores.shape[-1]), dim=-1).values
    counted = torch.arange(candidates.shape[-1], device=scores.device) < values["top_k"]
    border = torch.where(counted, candidates, float("inf")).min(dim=-1, keepdim=True).values
    return torch.where(scores < border, _NEVER, scores)


def _top_p(scores: Any, values: Any, at: Any) -> Any:
    ordered = torch.sort(scores, dim=-1, descending=True).values
    weights = torch.softmax(ordered, dim=-1)
    above = weights.cumsum(dim=-1) - weights
    border = torch.where(above < values["top_p"], ordered, float("inf")).min(dim=-1, keepdim=True).values
    highest = scores.max(dim=-1, keepdim=True).values
    return torch.where(scores < torch.minimum(border, highest), _NEVER, scores)


def _top_k_top_p(scores: Any, values: Any, at: Any) -> Any:
    return _top_p(_top_k(scores, values, at), values, at)


def _min_p(scores: Any, values: Any, at: Any) -> Any:
    return torch.where(scores < scores.max(dim=-1, keepdim=True).values + values["log_min_p"], _NEVER, scores)


def _epsilon(scores: Any, values: Any, at: Any) -> Any:
    is_rare = torch.log_softmax(scores, dim=-1) < torch.log(values["epsilon_cutoff"])
    return torch.where(is_rare & (scores < scores.max(dim=-1, keepdim=True).values), _NEVER, scores)


def _eta(scores: Any, values: Any, at: Any) -> Any:
    log_probs, log_epsilon = torch.log_softmax(scores, dim=-1), torch.log(values["eta_cutoff"])
    cutoff = torch.minimum(log_epsilon, 0.5 * log_epsilon - _entropy(log_probs))
    return torch.where((log_probs < cutoff) & (scores < scores.max(dim=-1, keepdim=True).values), _NEVER, scores)


def _typical(scores: Any, values: Any, at: Any) -> Any:
    log_probs = torch.log_softmax(scores, dim=-1)
    distance = torch.abs(-log_probs - _entropy(log_probs))
    ordered, order = torch.sort(distance, dim=-1)
    weights = torch.exp(log_probs).gather(1, order)
    above = weights.cumsum(dim=-1) - weights
    border = torch.where(above < values["typical_p"], ordered, -1.0).max(dim=-1, keepdim=True).values
    return torch.where(distance > border, _NEVER, scores)


def _entropy(log_probs: Any) -> Any:
    terms = torch.where(torch.isinf(log_probs), 0.0, torch.exp(log_probs) * log_probs)
    return -terms.sum(dim=-1, keepdim=True)


def _decay(scores: Any, values: Any, at: Any) -> Any:
    excess = (at["step"] - values["decay_start"]).clamp(min=0)
    wide = torch.nn.functional.pad(scores, (0, 1))
    ids = values["decay_eos"].long()[None].expand(scores.shape[0], -1)
    ends = wide.gather(1, ids)
    raised = (ends.abs() * torch.expm1(excess * values["decay_log_factor"])).clamp(max=torch.finfo(torch.float32).max)
    return wide.scatter_add(1, ids, torch.where(torch.isfinite(ends), raised, 0.0))[:, :-1]


def _ends_with(at: Any, prefixes: Any) -> Any:
    """Whether each row ends with each of `prefixes`, [words, width], left-padded with -1: [batch, words]."""
    tokens, width = at["tokens"], prefixes.shape[1]
    positions = at["end"] - width + torch.arange(width, device=tokens.device)
    tail = tokens.index_select(1, positions.clamp(0, tokens.shape[1] - 1))
    tail = torch.where(positions[None] >= at["first"][:, None], tail, -2)
    return ((prefixes[None] == -1) | (prefixes[None] == tail[:, None])).all(dim=-1)


PROCESSORS: Mapping[str, Processor] = {
    "sequence_bias": _sequence_bias,
    "encoder_repetition_penalty": _encoder_repetition,
    "repetition_penalty": _repetition,
    "presence_frequency_penalty": _presence,
    "no_repeat_ngram_size": _ngrams,
    "encoder_no_repeat_ngram_size": _encoder_ngrams,
    "bad_words_ids": _bad_words,
    "min_length": _min_length,
    "prefix_allowed_tokens": _allowed,
    "forced_bos_token_id": _forced_bos,
    "forced_eos_token_id": _forced_eos,
    "remove_invalid_values": lambda scores, values, at: torch.nan_to_num(scores),
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": _suppress,
    "begin_suppress_tokens": _suppress_begin,
    "temperature": lambda scores, values, at: scores / values["temperature"],
    "top_h": _top_h,
    "top_k": _top_k,
    "top_k_top_p": _top_k_top_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical,
    "epsilon_cutoff": _epsilon,
    "eta_cutoff": _eta,
    "watermark": lambda scores, values, at: scores + values["watermark"],
    "renormalize_logits": lambda scores, values, at: torch.log_softmax(scores, dim=-1),
}
"""In the order of transformers' `_get_logits_processor`."""
