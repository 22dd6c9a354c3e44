"""`hfax lm-eval`: the lm-evaluation-harness command, with an additional model "hfax".

The harness has no entry points for external models, so its `lm_eval` command cannot find this one.
"""

from __future__ import annotations

import sys

import typer

from hfax.errors import BackendNotAvailableError, InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax lm-eval --model hfax --model_args pretrained=Qwen/Qwen3-0.6B --tasks lambada_openai
  hfax lm-eval --model hfax --model_args pretrained=./model,quantization=int8 --tasks ./my_task.yaml --batch_size 16"""


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval with the model `hfax` registered; all options are passed through."""
    if not context.args:
        raise InvalidInputError(
            "hfax lm-eval needs a model and tasks.",
            "It was given no options.",
            "Pass, for example, --model hfax --model_args pretrained=demo --tasks lambada_openai; --help lists all options.",
        )
    try:
        from lm_eval.__main__ import cli_evaluate

        import hfax.evaluation.lm_eval_model  # noqa: F401  (registers the model)
    except ImportError as error:
        raise BackendNotAvailableError(
            "hfax lm-eval requires lm-evaluation-harness.", str(error), "Install it: pip install 'hfax[eval]'."
        ) from error
    before, sys.argv = sys.argv, ["lm_eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
