"""`hfax launch`: one program on several processes, each with devices of its own."""

from __future__ import annotations

import os
import socket
import sys
from typing import Annotated

import typer

from hfax.cli.error_display import reporting
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax launch script.py                                        (on every host of a TPU pod slice, or under srun)
  hfax launch --coordinator 10.0.0.1:8476 --processes 2 --process-id 0 script.py
  hfax launch --local 2 --cpu-devices 4 script.py              (two processes here, to try it out)
  hfax launch --local 2 hfax generate demo "Return a new" --parallelism data=2"""


def launch(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A Python script, or hfax and a verb.", show_default=False)
    ],
    coordinator: Annotated[
        str | None, typer.Option(help="host:port of process 0, the same everywhere.", show_default=False)
    ] = None,
    processes: Annotated[int, typer.Option(help="Of the whole run.", show_default=False)] = 0,
    process_id: Annotated[int, typer.Option(help="Of this one, from 0.", show_default=False)] = -1,
    local: Annotated[int, typer.Option(help="Start so many processes here, and nothing elsewhere.")] = 0,
    cpu_devices: Annotated[int, typer.Option(help="Virtual CPU devices a process, to try things out.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="How long to wait for the other processes, s.")] = 300,
) -> None:
    """Run a program as one of several processes, or start several here; they end together."""
    with reporting(False):
        from hfax.launch.cluster import AUTOMATIC, Member, checked_address, detected
        from hfax.launch.supervisor import supervise

        arguments = list(context.args)
        if program != "hfax" and not os.path.isfile(program):  # noqa: PTH113 (pathlib is slower to import)
            raise InvalidInputError(
                f"There is no script {program}.",
                "hfax launch runs a Python script, or a verb of hfax.",
                "Give the script's path, or: hfax launch … hfax generate …",
            )
        if local:
            if coordinator or processes or process_id >= 0:
                raise InvalidInputError(
                    "--local was given beside --coordinator, --processes or --process-id.",
                    "It starts the whole run on this machine.",
                    "Leave the others out.",
                )
            address = f"127.0.0.1:{_free_port()}"
            members = [Member(coordinator=address, num_processes=local, process_id=i) for i in range(local)]
        elif coordinator or processes or process_id >= 0:
            if not coordinator or processes < 1 or not 0 <= process_id < processes:
                raise InvalidInputError(
                    f"--coordinator {coordinator}, --processes {processes} and --process-id {process_id} say no run.",
                    "A process needs all three: where process 0 is, how many there are, and which it is itself, from 0.",
                    "For instance --coordinator 10.0.0.1:8476 --processes 2 --process-id 1.",
                )
            checked_address(coordinator)
            members = [Member(coordinator=coordinator, num_processes=processes, process_id=process_id)]
        elif (kind := detected(os.environ)) is not None:
            typer.echo(f"hfax launch: {kind}", err=True)
            members = [Member(coordinator=AUTOMATIC)]
        else:
            raise InvalidInputError(
                "hfax launch does not know which run this is.",
                "This is neither a Slurm job nor a TPU pod slice, as far as the environment says.",
                "Give --coordinator, --processes and --process-id on every machine, or --local N for a run here.",
            )
        environment = dict(os.environ)
        if cpu_devices:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
            environment.setdefault("JAX_PLATFORMS", "cpu")
        ending = supervise(members, [program, *arguments], environment, start_s=start_timeout)
        if ending.reason:
            typer.echo(f"hfax launch: {ending.reason} The run is over.", err=True)
        sys.exit(ending.code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
