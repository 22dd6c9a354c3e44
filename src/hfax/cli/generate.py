"""`hfax generate`: generates a completion for a prompt."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.generation_options import WritingOptions
from hfax.cli.interrupts import CtrlC
from hfax.cli.model_options import BackendOptions
from hfax.cli.option_groups import expand
from hfax.cli.phase_display import PhaseDisplay
from hfax.errors import InvalidInputError

if TYPE_CHECKING:
    from hfax.checkpoint import Checkpoint

EXAMPLES = """[bold]Examples[/bold]

  hfax generate demo "Return a new"
  hfax generate Qwen/Qwen3-0.6B "Three primes:" --max-new-tokens 40 --temperature 0.7 --seed 1
  hfax generate Qwen/Qwen3-0.6B "Name three primes." --chat --system "Be brief."
  hfax generate ./my-checkpoint - --stop END < prompt.txt
  hfax generate demo "Return a new" --json | jq .tokens_per_second"""

_DEFAULT_LENGTH = 128


@expand
def generate(
    model: model_options.ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt to complete; - reads it from stdin.")],
    *,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template, or complete it as is."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message; requires --chat.", show_default=False)] = None,
    how: WritingOptions,
    which: BackendOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Generate a completion, streaming it to stdout.

    Generates at most 128 tokens, unless --max-new-tokens is set.
    Other defaults come from the checkpoint's generation_config.json;
    setting temperature, top-k, top-p or min-p enables sampling.
    """
    if system is not None and not chat:
        raise typer.BadParameter("a system message requires the chat template. Add --chat.", param_hint="'--system'")
    with reporting(verbose):
        messages = [{"role": "system", "content": system}] if system is not None else []
        _generate(model, which, how, prompt, messages if chat else None, json_output)


def _generate(
    model: str,
    which: BackendOptions,
    how: WritingOptions,
    prompt: str,
    messages: list[dict[str, str]] | None,
    as_json: bool,
) -> None:
    text = _read_prompt(prompt)
    phases = PhaseDisplay(make_console())
    with phases.following("starting"), CtrlC() as ctrl_c, ctrl_c.raising():
        checkpoint = which.open(model)
        tokenizer = checkpoint.open_tokenizer()
        ids = _prompt_ids(checkpoint, tokenizer, text, messages)
        loaded = checkpoint.load_model()

    from hfax.cli.answer_output import AnswerOutput
    from hfax.cli.writing import write_answer

    shown = text if messages is None and prompt != "-" else ""
    output = None if as_json else AnswerOutput(phases, shown)
    with phases.following("reading the prompt"), CtrlC() as ctrl_c:
        answer = write_answer(
            loaded, tokenizer, ids, how, phases, ctrl_c, default_length=_DEFAULT_LENGTH, output=output
        )
        if output is not None:
            output.finish()
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)
    if as_json:
        record = {
            "model": model,
            "prompt": text,
            "text": answer.text,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_tokens": answer.num_tokens,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "seconds": {name: round(s, 4) for name, s in {**phases.seconds, "generate": answer.seconds}.items()},
            "tokens_per_second": round(answer.tokens_per_second, 2),
        }
        typer.echo(json.dumps(record, ensure_ascii=False))


def _read_prompt(prompt: str) -> str:
    """Read the prompt; from stdin without the trailing newline."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise InvalidInputError(
            "The prompt is empty.",
            "The model needs at least one token to continue.",
            "Pass a non-empty prompt; for unconditional generation, pass the model's BOS token, for example '<s>'.",
        )
    return text


def _prompt_ids(checkpoint: Checkpoint, tokenizer: Any, text: str, messages: list[dict[str, str]] | None) -> list[int]:
    if messages is None:
        return list(tokenizer(text)["input_ids"])
    from hfax.cli.conversation import encode_messages

    return encode_messages(tokenizer, [*messages, {"role": "user", "content": text}], checkpoint.source.name)
