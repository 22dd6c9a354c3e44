"""`hfax train`: fine-tuning, preferences and distillation from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.phase_display import PhaseDisplay
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax train sft.yaml
  hfax train sft.yaml --resume
  hfax train dpo.yaml            # recipe: dpo, orpo, kto, reward, distill or grpo

[bold]sft.yaml[/bold]

  model: Qwen/Qwen3-0.6B
  train_data: chats.jsonl        # {"messages": [{"role": "user", "content": "…"}, …]}
  output_dir: run
  lora: {r: 16, lora_alpha: 32, target_modules: all-linear}
  learning_rate: 2e-4
  max_steps: 500"""


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="Recipe file; docs/training.md describes its fields.")
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in output_dir.")] = False,
    accept_change: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-change",
            metavar="FIELD",
            help="With --resume: a field that may differ from the run to resume, though it changes the losses; repeatable.",
        ),
    ] = None,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Train a model on texts, conversations, preferences, a teacher's outputs or rewards: all weights, or a LoRA adapter."""
    with reporting(verbose):
        if not config.is_file():
            raise InvalidInputError(
                f"{config} could not be read.", "There is no such file.", "Pass a YAML file; see docs/training.md."
            )
        if accept_change and not resume:
            raise InvalidInputError(
                "--accept-change is given without --resume.", "Only a run that is resumed is compared.", "Add --resume."
            )
        from hfax.train.recipe import read_recipe, run_recipe

        recipe = read_recipe(config)
        phases = PhaseDisplay(make_console())
        with phases.following("reading"):  # from then on the progress bar owns the terminal
            _, metrics, folder = run_recipe(
                recipe, resume=resume, accept_changes=accept_change or (), on_start=phases.answering
            )
        if json_output:
            typer.echo(json.dumps({**metrics, "saved_to": str(folder)}))
            return
        typer.echo(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        typer.echo(f"saved to {folder}")
