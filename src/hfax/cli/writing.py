"""One generation: from prompt tokens to text, with timing.

Turns prompt ids and command-line options into one call of `model.generate`, with or without a chat template.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from hfax.cli.answer_output import AnswerOutput
from hfax.cli.generation_options import WritingOptions
from hfax.cli.interrupts import CtrlC
from hfax.cli.phase_display import PhaseDisplay
from hfax.cli.text_stream import TextStream, decode_answer

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel
    from hfax.generation.kept_cache import KeptCache

FinishReason = Literal["eos", "stop_string", "length", "interrupted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion.

    Args:
        text: the text without special tokens.
        num_prompt_tokens, num_tokens: numbers of prompt tokens and generated tokens.
        finish_reason: "eos", "stop_string", "length" (max_new_tokens or the end of the context), or "interrupted" (Ctrl-C).
        seconds: time of prefill and decoding, without tracing and compilation.
        seed: the seed that reproduces this completion.
        cache: of the prompt and the text, for an answer that continues them; of an earlier one if this one was interrupted.
    """

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason
    seconds: float
    seed: int
    cache: KeptCache | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill time included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


def write_answer(
    model: JaxModel,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    options: WritingOptions,
    phases: PhaseDisplay,
    ctrl_c: CtrlC,
    *,
    default_length: int,
    output: AnswerOutput | None,
    cache: KeptCache | None = None,
) -> Answer:
    """Run `model.generate` on one prompt.

    Args:
        model: a generative model.
        tokenizer: the model's tokenizer.
        prompt_ids: the prompt's token ids.
        options: generation options.
        phases: phase display; its trace and compile seconds are subtracted.
        ctrl_c: Ctrl-C handler that stops generation early; the partial output is returned.
        default_length: default max_new_tokens, limited to the remaining context.
        output: receives the text as it is generated, with beam search at the end; None: all tokens are generated on the device in
            one call.
        cache: of an earlier answer, whose text is not read again.
    """
    call = make_call(model, tokenizer, prompt_ids, options, default_length=default_length, cache=cache)
    seed, length = call["seed"], call["max_new_tokens"]
    is_encoder_decoder = model.is_encoder_decoder
    before = () if is_encoder_decoder else prompt_ids
    write = output.write if output else lambda piece: None
    stream = TextStream(tokenizer, before, write, should_stop=lambda: ctrl_c.was_pressed)
    is_streamed = output is not None and (options.num_beams or model.default_option("num_beams") or 1) == 1
    compiled = phases.seconds["trace"] + phases.seconds["compile"]
    start, is_interrupted = time.perf_counter(), False
    try:
        with ctrl_c.raising():
            sequences, cache = model.generate_and_keep(streamer=stream if is_streamed else None, **call)
            if not is_streamed:
                stream.token_ids = [int(t) for t in sequences[0][1 if is_encoder_decoder else len(prompt_ids) :]]
                stream.pieces = [decode_answer(tokenizer, before, stream.token_ids)]
                write(stream.text)
    except KeyboardInterrupt:
        is_interrupted = True
        stream.end()
    seconds = time.perf_counter() - start - (phases.seconds["trace"] + phases.seconds["compile"] - compiled)
    return Answer(
        text=stream.text,
        num_prompt_tokens=len(prompt_ids),
        num_tokens=len(stream.token_ids),
        finish_reason="interrupted" if is_interrupted else _finish_reason(model, stream, options, length),
        seconds=seconds,
        seed=seed,
        cache=cache,
    )


def make_call(
    model: JaxModel,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    options: WritingOptions,
    *,
    default_length: int,
    cache: KeptCache | None,
) -> dict[str, Any]:
    """The arguments of `model.generate`, without a streamer, for one prompt; see `write_answer`."""
    context = None if model.is_encoder_decoder else model.context_length
    arguments = options.as_arguments()
    if cache is not None and cache.can_continue([list(prompt_ids)]):
        arguments["past_key_values"] = cache
    return {
        "inputs": [list(prompt_ids)],
        "attention_mask": [[1] * len(prompt_ids)],
        "tokenizer": tokenizer,
        "seed": options.draw_seed(),
        "max_new_tokens": options.length_within(default_length, len(prompt_ids), context),
        **arguments,
    }


def _finish_reason(model: JaxModel, stream: TextStream, options: WritingOptions, length: int) -> FinishReason:
    eos: Any = model.default_option("eos_token_id")
    eos_ids = eos if isinstance(eos, (list, tuple)) else (eos,)
    if stream.token_ids and stream.token_ids[-1] in eos_ids:
        return "eos"
    if len(stream.token_ids) < length or any(stop in stream.text for stop in options.stop):
        return "stop_string"
    return "length"
