"""Which process of a run this is, and how it joins the others.

A run is described by three environment variables, which `hfax launch` sets for its children, or by what the machine says: Slurm's
variables and TPU pods are found by JAX itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from hfax.errors import BackendNotAvailableError, InvalidInputError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "HFAX_COORDINATOR", "HFAX_NUM_PROCESSES", "HFAX_PROCESS_ID"
AUTOMATIC = "auto"
"""As coordinator: JAX finds the run by itself."""
_HEARTBEAT_S = 30
_START_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a run.

    Args:
        coordinator: "host:port" of process 0, or `AUTOMATIC`.
        num_processes: of the run; 0 if JAX finds it.
        process_id: of this one, from 0; likewise.
    """

    coordinator: str
    num_processes: int = 0
    process_id: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        return {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
        }


def member_from(environment: Mapping[str, str]) -> Member | None:
    """What the variables of `hfax launch` say; None if they are not there."""
    if not (coordinator := environment.get(COORDINATOR)):
        return None
    return Member(
        coordinator=coordinator,
        num_processes=int(environment.get(NUM_PROCESSES, "0")),
        process_id=int(environment.get(PROCESS_ID, "0")),
    )


def detected(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster whose processes JAX finds by itself; None if this is none."""
    if environment.get("SLURM_JOB_ID") and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return "Slurm"
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return "a TPU pod slice"
    if environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return "TPU pod slices"
    return None


def checked_address(text: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        InvalidInputError: it is written otherwise.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise InvalidInputError(
            f"{text!r} is no address of a coordinator.",
            "The other processes find process 0 under it.",
            "Write host:port, for instance 10.0.0.1:8476; the port after it must be free, too.",
        )
    return host.strip("[]"), int(port)


_joined = False


def join() -> None:
    """Join the run that the environment describes; nothing if it describes none, or if this process did so before.

    It must come before anything asks JAX for devices.

    Raises:
        BackendNotAvailableError: the others did not come.
    """
    global _joined
    member = member_from(os.environ)
    if _joined or member is None:
        return
    import jax

    try:
        if member.coordinator == AUTOMATIC:
            jax.distributed.initialize(
                initialization_timeout=_START_S, heartbeat_timeout_seconds=_HEARTBEAT_S, cluster_detection_method=None
            )
        else:
            jax.distributed.initialize(
                member.coordinator,
                member.num_processes,
                member.process_id,
                initialization_timeout=_START_S,
                heartbeat_timeout_seconds=_HEARTBEAT_S,
            )
    except (RuntimeError, ValueError) as error:
        raise BackendNotAvailableError(
            f"Process {member.process_id} could not join the run at {member.coordinator}.",
            str(error).splitlines()[0],
            "Start every process of the run, with the same number of processes, and let them reach process 0.",
        ) from error
    _joined = True
