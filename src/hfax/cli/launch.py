"""`hfax launch`: runs a program in several processes, each with its own devices."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hfax.cli.error_display import reporting
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax launch script.py                                        (on every host of a TPU pod slice, or under srun)
  hfax launch --coordinator 10.0.0.1:8476 --processes 2 --process-id 0 script.py
  hfax launch --local 2 --cpu-devices 4 script.py              (two local processes, for testing)
  hfax launch --local 2 hfax generate demo "Return a new" --parallelism data=2"""


def launch(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A Python script, or hfax and a command.", show_default=False)
    ],
    coordinator: Annotated[
        str | None, typer.Option(help="host:port of process 0; the same on every machine.", show_default=False)
    ] = None,
    processes: Annotated[int, typer.Option(help="Number of processes in the run.", show_default=False)] = 0,
    process_id: Annotated[int, typer.Option(help="Index of this process, from 0.", show_default=False)] = -1,
    local: Annotated[
        int,
        typer.Option(help="Number of processes for a run on this machine only; their lines begin with [process id]."),
    ] = 0,
    cpu_devices: Annotated[int, typer.Option(help="Virtual CPU devices per process, for testing.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="Timeout for the other processes to connect, in seconds.")] = 300,
) -> None:
    """Run a program as one process of a multi-process run, or start several processes here; if one fails, all stop."""
    with reporting(False):
        from hfax.launch.cluster import AUTOMATIC, Member, checked_address, detected
        from hfax.launch.ports import free_port
        from hfax.launch.supervisor import supervise

        arguments = list(context.args)
        if program != "hfax" and not os.path.isfile(program):  # noqa: PTH113 (pathlib is slower to import)
            raise InvalidInputError(
                f"Script not found: {program}.",
                "hfax launch runs a Python script or an hfax command.",
                "Pass the script's path, or for example: hfax launch … hfax generate …",
            )
        if local:
            if coordinator or processes or process_id >= 0:
                raise InvalidInputError(
                    "--local cannot be combined with --coordinator, --processes or --process-id.",
                    "It starts the whole run on this machine.",
                    "Omit the other options.",
                )
            address = f"127.0.0.1:{free_port()}"
            members = [Member(coordinator=address, num_processes=local, process_id=i) for i in range(local)]
        elif coordinator or processes or process_id >= 0:
            if not coordinator or processes < 1 or not 0 <= process_id < processes:
                raise InvalidInputError(
                    f"--coordinator {coordinator}, --processes {processes} and --process-id {process_id} are not a valid run.",
                    "All three are required, with 0 <= process id < number of processes.",
                    "Pass, for example, --coordinator 10.0.0.1:8476 --processes 2 --process-id 1.",
                )
            checked_address(coordinator)
            members = [Member(coordinator=coordinator, num_processes=processes, process_id=process_id)]
        elif (kind := detected(os.environ)) is not None:
            typer.echo(f"hfax launch: {kind}", err=True)
            members = [Member(coordinator=AUTOMATIC)]
        else:
            raise InvalidInputError(
                "No multi-process run was specified or detected.",
                "The environment shows neither a Slurm job nor a TPU pod slice.",
                "Pass --coordinator, --processes and --process-id on every machine, or --local N for a run on this one.",
            )
        environment = dict(os.environ)
        if cpu_devices:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
            environment.setdefault("JAX_PLATFORMS", "cpu")
        command = [program, *arguments]
        ending = supervise(members, command, environment, start_s=start_timeout, is_labelled=len(members) > 1)
        if ending.reason:
            typer.echo(f"hfax launch: {ending.reason} The run is over.", err=True)
        sys.exit(ending.code)
