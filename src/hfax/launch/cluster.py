"""Cluster membership: which process of a run this is, and how it joins the others.

Three environment variables describe a run; `hfax launch` sets them for its child processes. On Slurm and TPU pods, JAX detects the
run itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hfax.errors import BackendNotAvailableError, InvalidInputError

if TYPE_CHECKING:
    import jax

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "HFAX_COORDINATOR", "HFAX_NUM_PROCESSES", "HFAX_PROCESS_ID"
AUTOMATIC = "auto"
"""Coordinator value for runs that JAX detects itself."""
_HEARTBEAT_S = 30
_START_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a run.

    Args:
        coordinator: "host:port" of process 0, or `AUTOMATIC`.
        num_processes: number of processes in the run; 0 if JAX detects it.
        process_id: this process's index, from 0; 0 if JAX detects it.
    """

    coordinator: str
    num_processes: int = 0
    process_id: int = 0

    def environment(self) -> dict[str, str]:
        """The environment variables that describe this member."""
        return {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
        }


def member_from(environment: Mapping[str, str]) -> Member | None:
    """Read the environment variables of `hfax launch`; None if they are not set."""
    if not (coordinator := environment.get(COORDINATOR)):
        return None
    return Member(
        coordinator=coordinator,
        num_processes=int(environment.get(NUM_PROCESSES, "0")),
        process_id=int(environment.get(PROCESS_ID, "0")),
    )


def detected(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster, if JAX can detect the run itself; else None."""
    if environment.get("SLURM_JOB_ID") and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return "Slurm"
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return "a TPU pod slice"
    if environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return "TPU pod slices"
    return None


def checked_address(text: str) -> tuple[str, int]:
    """Parse "host:port".

    Raises:
        InvalidInputError: the address is malformed.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise InvalidInputError(
            f"{text!r} is not a valid coordinator address.",
            "All other processes connect to process 0 at this address.",
            "Pass host:port, for example 10.0.0.1:8476; the next port must be free, too.",
        )
    return host.strip("[]"), int(port)


_joined = False


def join() -> None:
    """Join the run described by the environment; a no-op without one, or if this process has already joined.

    Call it before anything initializes JAX's devices.

    Raises:
        BackendNotAvailableError: this process could not connect to the run.
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
            "Start every process with the same number of processes, and check that each can reach process 0.",
        ) from error
    _joined = True


def default_device() -> jax.Device:
    """The first device of this process, after it has joined its run.

    Raises:
        BackendNotAvailableError: JAX finds no device, or this process could not connect to the run.
    """
    import jax

    join()
    try:
        return jax.local_devices()[0]
    except RuntimeError as error:
        raise BackendNotAvailableError(
            "JAX found no device.",
            str(error).splitlines()[0],
            "Check JAX_PLATFORMS and the installed extra (hfax[tpu], hfax[cuda] or hfax[cpu]) with `hfax env`.",
        ) from error
