"""`hfax doctor`: checks from its config whether a model will run."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax doctor demo
  hfax doctor Qwen/Qwen3-0.6B
  hfax doctor Qwen/Qwen3-0.6B --programs
  hfax doctor ./my-model/config.json --check --json"""


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, a config.json, or demo.")],
    check: Annotated[
        bool, typer.Option("--check", help="Also compare a scaled-down copy with plain transformers.")
    ] = False,
    programs: Annotated[
        bool,
        typer.Option(
            "--programs",
            help="Instead, list the programs on disk for the model's class, and what stands against using each one.",
        ),
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
        from hfax.load.source import reject_missing_path

        reject_missing_path(model)
        if programs and (check or backend != "jax"):
            raise InvalidInputError(
                f"--programs cannot be combined with {'--check' if check else '--backend'}.",
                "It lists programs of the backend jax, and runs nothing.",
                "Omit one of them.",
            )
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
        from hfax.doctor import diagnose, stored_programs

        if programs:
            stored = stored_programs(model, task=task, trust_remote_code=trust_remote_code)
            rows = [dataclasses.asdict(program) for program in stored]
            typer.echo(json.dumps(rows, indent=2) if json_output else programs_as_text(stored))
            return
        found = diagnose(model, task=task, check=check, trust_remote_code=trust_remote_code)
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2) if json_output else as_text(found, verbose, _free()))
        if found.verdict == "fails":
            raise typer.Exit(1)


def _free() -> tuple[str, int] | None:
    """The first device's name and its free memory, in bytes; None if it does not say."""
    import jax

    from hfax.load.placement import free_bytes

    device = jax.local_devices()[0]
    free = free_bytes(device)
    return None if free is None else ("this machine's memory" if device.platform == "cpu" else str(device), free)


def _number(count: float) -> str:
    """A count or a size with three digits and a unit: 3.15M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _form(found: Any) -> str:
    """The form of the weights whose size is told."""
    if found.quantization is None:
        return found.dtype
    if found.has_packed_size:
        return f"{found.quantization} and {found.dtype}"
    return f"{found.dtype}; fewer as the checkpoint has them, in {found.quantization}"


def _bytes(count: float) -> str:
    """A size in bytes with three digits: 6.29 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def programs_as_text(stored) -> str:  # noqa: ANN001 (its class would import jax)
    """A list of `StoredProgram`s in lines, those that can be used first."""
    if not stored:
        return "No programs of this class are on the disk. hfax warm makes them ahead."
    usable = [program for program in stored if not program.differences]
    lines = [f"{len(usable)} of {len(stored)} programs on the disk can be used here and now."]
    for program in sorted(stored, key=lambda program: bool(program.differences)):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(program.last_used_s))
        why = f": differs in {', '.join(program.differences)}" if program.differences else ""
        lines.append(f"  {program.name}, {_bytes(program.num_bytes)}, last used {used}{why}")
    return "\n".join(lines)


def as_text(found, verbose: bool, free: tuple[str, int] | None) -> str:  # noqa: ANN001 (its class would import jax)
    """A diagnosis in lines.

    Args:
        found: a `Diagnosis`.
        verbose: the patches and lowerings one by one, instead of their number.
        free: a device and its free memory, in bytes.
    """
    lines = [
        f"{found.class_name} ({found.model_type}): {found.verdict}",
        f"  parameters       {_number(found.num_parameters)}, {_bytes(found.weight_bytes)} in {_form(found)}",
    ]
    if free is not None:
        fits = (
            "yes"
            if found.weight_bytes < free[1]
            else "no; hfax plan finds a machine, and quantization makes it smaller"
        )
        lines.append(f"  fits here        {fits} ({_bytes(free[1])} of {free[0]} are free)")
    if found.cache_bytes_per_token is not None:
        lines.append(
            f"  cache            {_bytes(found.cache_bytes_per_token)} per token"
            + (f" and {_bytes(found.state_bytes)} for each sequence" if found.state_bytes else "")
        )
    if found.operations_per_token:
        lines.append(f"  operations       {_number(found.operations_per_token)} per token")
    if found.static_arguments and verbose:
        lines.append(f"  static arguments {', '.join(found.static_arguments)}")
    if found.why_not_padded is not None:
        lines.append(f"  a program for each size of a forward call: {found.why_not_padded}")
    if found.shares_image_sizes is False:
        lines.append("  a program for each mix of image sizes: the model's code reads their grids")
    if verbose:
        lines += [f"  lowering         {way}" for way in found.lowerings]
    if found.cpu_kernels is not None:
        lines.append(f"  cpu kernels      {found.cpu_kernels}")
    if verbose:
        lines += [f"  patch {name}: {why}" for name, why in found.patches.items()]
    elif found.patches or found.lowerings:
        lines.append(
            f"  patches          {len(found.patches)}, and {len(found.lowerings)} choices of kernels: -v names them"
        )
    lines += [f"  no patch {name}: {why}" for name, why in found.refusals.items()]
    if found.value_reads and found.verdict != "fails":
        lines.append("  forward calls end a program and read a value at")
        lines += [f"    {line}: {how}" for line, how in found.value_reads.items()]
    if found.wide_dtypes:
        floats = [line for line, dtype in found.wide_dtypes.items() if dtype == "float64"]
        where = f", float64 at {', '.join(floats)}" if floats else ""
        lines.append(f"  float64 and int64 become 32-bit at {len(found.wide_dtypes)} lines{where}")
    if found.checked is not None:
        lines.append(f"  check            {found.checked}")
    lines += [f"  problem: {problem}" for problem in found.problems]
    return "\n".join(lines)
