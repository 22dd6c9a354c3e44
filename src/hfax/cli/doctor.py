"""`hfax doctor`: checks from its config whether a model will run."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax doctor demo
  hfax doctor Qwen/Qwen3-0.6B
  hfax doctor ./my-model/config.json --check --json"""


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, a config.json, or demo.")],
    check: Annotated[
        bool, typer.Option("--check", help="Also compare a scaled-down copy with plain transformers.")
    ] = False,
    task: Annotated[str | None, typer.Option(help="Pipeline task name; selects the model class.")] = None,
    backend: Annotated[
        str, typer.Option(help="jax: trace from the config only. torch_xla: run and profile a small copy.")
    ] = "jax",
    trust_remote_code: model_options.TrustOption = False,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Check whether a model works, which patches it needs, and what it costs. Loads no weights. Exit code 1 if it fails."""
    with reporting(verbose):
        if backend == "torch_xla":
            from hfax.backends.torch_xla.diagnosis import diagnose

            seen = diagnose(model, task=task, trust_remote_code=trust_remote_code)
            typer.echo(json.dumps(dataclasses.asdict(seen), indent=2) if json_output else str(seen))
            if seen.problems:
                raise typer.Exit(1)
            return
        if backend != "jax":
            raise InvalidInputError(
                f"Unknown backend {backend!r}.",
                "hfax doctor supports the backends jax and torch_xla.",
                "Use --backend jax or torch_xla.",
            )
        from hfax.doctor import diagnose

        found = diagnose(model, task=task, check=check, trust_remote_code=trust_remote_code)
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2) if json_output else _as_text(found))
        if found.verdict == "fails":
            raise typer.Exit(1)


def _as_text(found) -> str:  # noqa: ANN001 (its class would import jax)
    lines = [
        f"{found.class_name} ({found.model_type}): {found.verdict}",
        f"  parameters       {found.num_parameters / 1e9:.3f} billion, {found.weight_bytes / 1e9:.2f} GB in {found.dtype}",
    ]
    if found.cache_bytes_per_token is not None:
        lines.append(
            f"  cache            {found.cache_bytes_per_token:,} bytes per token plus {found.state_bytes or 0:,} fixed"
        )
    if found.operations_per_token:
        lines.append(f"  operations       {found.operations_per_token / 1e9:.2f} billion per token")
    if found.static_arguments:
        lines.append(f"  static arguments {', '.join(found.static_arguments)}")
    if found.why_not_padded is not None:
        lines.append(f"  a program for each size of a forward call: {found.why_not_padded}")
    lines += [f"  lowering         {way}" for way in found.lowerings]
    if found.cpu_kernels is not None:
        lines.append(f"  cpu kernels      {found.cpu_kernels}")
    lines += [f"  patch {name}: {why}" for name, why in found.patches.items()]
    lines += [f"  no patch {name}: {why}" for name, why in found.refusals.items()]
    if found.wide_dtypes:
        floats = [line for line, dtype in found.wide_dtypes.items() if dtype == "float64"]
        where = f", float64 at {', '.join(floats)}" if floats else ""
        lines.append(f"  float64 and int64 become 32-bit at {len(found.wide_dtypes)} lines{where}")
    if found.checked is not None:
        lines.append(f"  check            {found.checked}")
    lines += [f"  problem: {problem}" for problem in found.problems]
    return "\n".join(lines)
