"""How the tokens of one request are drawn; checked when it is made."""

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
"""Stop strings, or stop tokens, of a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that a text must have, with vLLM's names: exactly one of these.

    Args:
        json: a JSON schema, as text or as a mapping.
        regex: a regular expression that the whole text matches.
        choice: texts, one of which it is.
        grammar: a context-free grammar in Lark's notation, as llguidance reads it.
        json_object: any JSON object.

    Raises:
        InvalidInputError: none of them is given, or several are.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidInputError(
                f"Structured outputs were asked for by {' and '.join(given) or 'nothing'}.",
                "One thing says what form a text has.",
                "Pass one of json, regex, choice, grammar or json_object.",
            )
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", json.dumps(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise InvalidInputError(
                    f"choice={self.choice!r} is out of range.",
                    "A text is one of them.",
                    "Pass a list of strings that are not empty.",
                )

    @property
    def text(self) -> str:
        """The schema, expression or grammar itself; of choices all of them."""
        if self.choice is not None:
            return "".join(self.choice)
        return str(self.json or self.regex or self.grammar or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request, with vLLM's names and meanings.

    Args:
        n: texts for the prompt, each with random numbers of its own.
        max_tokens: most new tokens; None: as many as the context holds.
        min_tokens: no stop token is drawn before so many.
        temperature: 0 takes the highest logit.
        top_k: draw among the highest so many; 0 for all.
        top_p: draw among the fewest that have so much of the probability.
        min_p: draw among those with at least so much of the highest one's probability.
        seed: of the random numbers; None draws one. A seed gives what `model.generate(seed=…)` gives for the same options.
        repetition_penalty: as transformers'.
        presence_penalty: subtracted from the logits of tokens already written.
        frequency_penalty: the same for each time they were.
        logit_bias: added to the logits of tokens by id.
        suppress_tokens: tokens that are never drawn, as transformers' generation configs name them.
        stop: strings that end the text; they are left out of it.
        stop_token_ids: tokens that do, beside the model's own.
        ignore_eos: the model's own do not.
        include_stop_str_in_output: the text ends with the stop string.
        skip_special_tokens: special tokens are left out of the text.
        logprobs: with each token, its log-probability and those of the so many likeliest, at most 20.
        prompt_logprobs: the same of the prompt's tokens.
        structured_outputs: the form that the text must have.
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
        """Whether the highest logit is taken."""
        return self.temperature == 0

    @property
    def needs_edits(self) -> bool:
        """Whether logits change before a token is drawn, beyond temperature and what narrows the choice."""
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
        """Whether the tokens so far matter to the draw."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(params: SamplingParams) -> None:
    whole = {"n": 1, "min_tokens": 0, "top_k": 0}
    for name, least in whole.items():
        _require(
            name,
            getattr(params, name),
            lambda v, least=least: _is_int(v) and v >= least,
            f"a whole number from {least}",
        )
    for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed"):
        _require(
            name,
            getattr(params, name),
            lambda v: v is None or (_is_int(v) and v >= 0),
            "a whole number from 0, or None",
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
            f"from {low} to {high}",
        )
    for name in ("top_p", "repetition_penalty"):
        _require(name, getattr(params, name), lambda v: v > 0, "above 0")
    for name in ("stop", "stop_token_ids"):
        _require(name, getattr(params, name), lambda v: len(v) <= MAX_STOPS, f"at most {MAX_STOPS}")
    _require("suppress_tokens", params.suppress_tokens, lambda v: len(v) <= MAX_SUPPRESSED, f"at most {MAX_SUPPRESSED}")
    _require("stop", params.stop, lambda v: all(isinstance(s, str) and s for s in v), "strings that are not empty")
    _require("stop_token_ids", params.stop_token_ids, lambda v: all(_is_int(t) and t >= 0 for t in v), "token ids")
    _require(
        "logit_bias",
        params.logit_bias,
        lambda v: (
            len(v) <= MAX_BIASES
            and all(_is_int(k) and k >= 0 and _is_number(b) and abs(b) <= 100 for k, b in v.items())
        ),
        f"at most {MAX_BIASES} token ids with numbers from -100 to 100",
    )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidInputError(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}.",
            "Both bound the same number.",
            "Change one of them.",
        )


def _require(name: str, value: Any, is_valid: Any, wanted: str) -> None:
    if not is_valid(value):
        raise InvalidInputError(f"{name}={value!r} is out of range.", f"It must be {wanted}.", f"Change {name}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
