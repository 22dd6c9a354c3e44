"""`hfax classify`: scores labels for a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.interrupts import CtrlC
from hfax.cli.model_options import BackendOptions
from hfax.cli.option_groups import expand
from hfax.cli.phase_display import PhaseDisplay
from hfax.errors import InvalidInputError

if TYPE_CHECKING:
    from hfax.checkpoint import Checkpoint
    from hfax.cli.label_scores import LabelScore

EXAMPLES = """[bold]Examples[/bold]

  hfax classify distilbert/distilbert-base-uncased-finetuned-sst-2-english "What a lovely day"
  hfax classify demo "What a lovely day" --labels POSITIVE,NEGATIVE
  hfax classify Qwen/Qwen3-0.6B "The keeper was injured" --labels sports,politics \\
      --template "{text} This is about {label}"
  hfax classify ./my-classifier - --json < review.txt"""

DEFAULT_TEMPLATE = "Text: {text}\nLabel: {label}"


@expand
def classify(
    model: model_options.ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to classify; - reads it from stdin.")],
    *,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Two or more labels, comma-separated. Required for a causal language model; "
            "a classification head has its own labels.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="For a causal model: prompt template with {text} once and {label} at the end. "
            "Default: the lines 'Text: {text}' and 'Label: {label}'.",
            show_default=False,
        ),
    ] = None,
    per_token: Annotated[
        bool,
        typer.Option(
            "--per-token", help="For a causal model: compare mean log-probabilities per token instead of sums."
        ),
    ] = False,
    which: BackendOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Score labels for a text, best first.

    A model with a sequence-classification head uses its own labels.
    A causal language model scores each label as a continuation of the text: the
    sum of its tokens' log-probabilities, normalized over all labels. Sums favour
    labels with few tokens; --per-token divides by the number of tokens.
    """
    parsed = None if labels is None else _parse_labels(labels)
    _check_template(template)
    with reporting(verbose):
        phases = PhaseDisplay(make_console())
        with phases.following("starting"), CtrlC() as ctrl_c, ctrl_c.raising():
            scores = _score(model, which, _read_text(text), parsed, template, per_token)
        ranked = sorted(scores, key=lambda s: s.score, reverse=True)
        typer.echo(_as_json(model, ranked, phases) if json_output else _as_lines(ranked))


def _score(
    name: str, which: BackendOptions, text: str, labels: list[str] | None, template: str | None, per_token: bool
) -> list[LabelScore]:
    checkpoint = which.open(name)
    has_head = _has_classification_head(checkpoint)
    if has_head and (labels is not None or template is not None or per_token):
        own = ", ".join(checkpoint.labels.values())
        raise typer.BadParameter(
            f"{name} has a classification head with its own labels ({own}). Omit --labels, --template and --per-token."
        )
    if not has_head and labels is None:
        raise typer.BadParameter(
            f"{name} has no classification head. Pass labels to compare, for example --labels POSITIVE,NEGATIVE.",
            param_hint="'--labels'",
        )
    from hfax.cli.label_scores import scores_of_head, scores_under_causal_model

    tokenizer = checkpoint.open_tokenizer()
    if labels is None:
        model: Any = checkpoint.load_model("text-classification")
        return scores_of_head(model, tokenizer, text, checkpoint.labels, checkpoint.problem_type)
    model = checkpoint.load_model("text-generation")
    return scores_under_causal_model(model, tokenizer, text, labels, template or DEFAULT_TEMPLATE, per_token=per_token)


def _has_classification_head(checkpoint: Checkpoint) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in checkpoint.architectures)


def _parse_labels(labels: str) -> list[str]:
    parsed = [label.strip() for label in labels.split(",")]
    if "" in parsed or len(set(parsed)) < len(parsed) or len(parsed) < 2:
        raise typer.BadParameter(
            f"{labels!r} is not a list of two or more distinct labels. Pass, for example, POSITIVE,NEGATIVE.",
            param_hint="'--labels'",
        )
    return parsed


def _check_template(template: str | None) -> None:
    if template is None:
        return
    if template.count("{text}") != 1 or template.count("{label}") != 1 or not template.endswith("{label}"):
        raise typer.BadParameter(
            f"{template!r} must contain {{text}} once, and end with {{label}}.",
            param_hint="'--template'",
        )


def _read_text(text: str) -> str:
    content = sys.stdin.read().removesuffix("\n") if text == "-" else text
    if not content.strip():
        raise InvalidInputError("The text is empty.", "There is nothing to classify.", "Pass a non-empty text.")
    return content


def _as_lines(scores: list[LabelScore]) -> str:
    width = max(len(s.label) for s in scores)
    return "\n".join(f"{s.label:<{width}}  {s.score:.4f}" for s in scores)


def _as_json(model: str, scores: list[LabelScore], phases: PhaseDisplay) -> str:
    kept = [{k: v for k, v in dataclasses.asdict(s).items() if v is not None} for s in scores]
    seconds = {name: round(s, 4) for name, s in phases.seconds.items()}
    return json.dumps(
        {"model": model, "label": scores[0].label, "scores": kept, "seconds": seconds}, ensure_ascii=False
    )
