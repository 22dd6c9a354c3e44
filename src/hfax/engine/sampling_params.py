"""Sampling options of one request, validated on construction."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from hfax.errors import InvalidInputError

MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_SUPPRESSED = 128
MAX_STOPS = 16
"""Maximum stop strings, and maximum stop tokens, per request."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this decode greedily, as in vLLM: a smaller one overflows float32 when logits are divided by it."""
GREEDY_TOP_P = 1e-6
"""A `top_p` up to this keeps the best token alone, whose probability is at least 1 / vocabulary size."""
_MAX_MARKER = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on the completion, with vLLM's names; set exactly one, and `after` besides where the model reasons first.

    Args:
        json: a JSON schema, as a string or a mapping.
        regex: a regular expression that the whole completion must match.
        choice: the completion must be one of these strings.
        grammar: a context-free grammar in llguidance's Lark syntax.
        json_object: any JSON object.
        after: text that ends the model's reasoning ("</think>"): the constraint begins behind its first occurrence and up to
            two line breaks. The text before it is free, except that the sequence cannot end there. None: the constraint begins
            with the first token.
        num_bytes: memory of the compiled constraint, if measured: compiled ones are kept for later requests up to a total.

    Raises:
        InvalidInputError: none or several constraints are set, or `after` is empty.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    after: str | None = None
    num_bytes: int | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("after", "num_bytes")]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidInputError(
                f"StructuredOutputsParams got {' and '.join(given) or 'nothing'}.",
                "Exactly one constraint must be set.",
                "Pass one of json, regex, choice, grammar or json_object.",
            )
        if self.after is not None and not (isinstance(self.after, str) and 0 < len(self.after) <= _MAX_MARKER):
            raise InvalidInputError(
                f"after={self.after!r:.80} is invalid.",
                "It is the text that ends the reasoning, such as </think>.",
                f"Pass a string of 1 to {_MAX_MARKER} characters, or None.",
            )
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", json.dumps(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise InvalidInputError(
                    f"choice={self.choice!r} is invalid.",
                    "The completion must be one of these strings.",
                    "Pass a list of non-empty strings.",
                )

    @property
    def text(self) -> str:
        """The schema, regex or grammar as text; for `choice`, all choices concatenated."""
        if self.choice is not None:
            return "".join(self.choice)
        return str(self.json or self.regex or self.grammar or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request, with vLLM's names and meanings.

    Args:
        n: number of completions per prompt, sampled independently.
        max_tokens: maximum new tokens; None: up to the context length.
        min_tokens: minimum new tokens before a stop token may be sampled.
        temperature: sampling temperature; 0, or anything below 1e-5, for greedy decoding.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the smallest set of tokens with at least this cumulative probability; 0 keeps the best
            token alone.
        min_p: sample from tokens with at least this fraction of the top token's probability.
        seed: random seed; None picks one. The same seed and options match `model.generate(seed=…)`.
        repetition_penalty: as in transformers.
        presence_penalty: subtracted from the logits of tokens already generated.
        frequency_penalty: subtracted from a token's logit once per earlier occurrence in the completion.
        logit_bias: token id to a bias added to its logit.
        suppress_tokens: tokens that are never sampled, as in transformers' generation configs.
        stop: stop strings; left out of the text.
        stop_token_ids: further stop tokens, besides the model's EOS tokens.
        ignore_eos: do not stop at the model's EOS tokens.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: return each token's log-probability and those of this many top tokens, at most 20.
        prompt_logprobs: return log-probabilities of the prompt tokens in the same form, at most 20 top tokens.
        structured_outputs: constraint on the completion.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "suppress_tokens", tuple(self.suppress_tokens))
        _check(self)

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: the best token is the only one that can be sampled."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p <= GREEDY_TOP_P

    @property
    def needs_edits(self) -> bool:
        """Whether logits processors other than temperature, top-k, top-p and min-p apply."""
        return bool(
            self.logit_bias
            or self.suppress_tokens
            or self.min_tokens
            or self.structured_outputs is not None
            or self.repetition_penalty != 1
            or self.counts_tokens
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(params: SamplingParams) -> None:
    whole = {"n": 1, "min_tokens": 0, "top_k": 0}
    for name, least in whole.items():
        _require(
            name,
            getattr(params, name),
            lambda v, least=least: _is_int(v) and v >= least,
            f"an integer of at least {least}",
        )
    for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed"):
        _require(
            name,
            getattr(params, name),
            lambda v: v is None or (_is_int(v) and v >= 0),
            "a non-negative integer, or None",
        )
    for name in ("logprobs", "prompt_logprobs"):
        _require(name, getattr(params, name), lambda v: v is None or v <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}")
    ranges: dict[str, tuple[float, float]] = {
        "temperature": (0, math.inf),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (0, math.inf),
    }
    for name, (low, high) in ranges.items():
        _require(
            name,
            getattr(params, name),
            lambda v, low=low, high=high: _is_number(v) and low <= v <= high,
            f"between {low} and {high}",
        )
    _require("repetition_penalty", params.repetition_penalty, lambda v: v > 0, "above 0")
    for name in ("stop", "stop_token_ids"):
        _require(name, getattr(params, name), lambda v: len(v) <= MAX_STOPS, f"at most {MAX_STOPS}")
    _require("suppress_tokens", params.suppress_tokens, lambda v: len(v) <= MAX_SUPPRESSED, f"at most {MAX_SUPPRESSED}")
    _require("stop", params.stop, lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings")
    _require("stop_token_ids", params.stop_token_ids, lambda v: all(_is_int(t) and t >= 0 for t in v), "token ids")
    _require(
        "logit_bias",
        params.logit_bias,
        lambda v: (
            len(v) <= MAX_BIASES
            and all(_is_int(k) and k >= 0 and _is_number(b) and abs(b) <= 100 for k, b in v.items())
        ),
        f"at most {MAX_BIASES} token ids with biases between -100 and 100",
    )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidInputError(
            f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}.",
            "Both bound the number of new tokens.",
            "Reduce min_tokens, or raise max_tokens.",
        )


def _require(name: str, value: Any, is_valid: Any, wanted: str) -> None:
    if not is_valid(value):
        raise InvalidInputError(f"{name}={value!r} is out of range.", f"It must be {wanted}.", f"Change {name}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
