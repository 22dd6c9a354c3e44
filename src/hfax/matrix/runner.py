"""Runs architectures in separate processes, a few in parallel.

Turns a list of `Architecture`s into `CaseResult`s. Processes are forked from a server that has imported the libraries but not
started an XLA client, so a crash, hang or out-of-memory error affects only one row.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from hfax import progress
from hfax.matrix.architectures import Architecture
from hfax.matrix.case import CaseResult, run_case
from hfax.matrix.variations import Variation

_PRELOADED = ["torch", "transformers", "jax", "hfax.matrix.case", "hfax.backends.jax.model", "hfax.generation.generate"]

_Case = tuple[Architecture, Variation | None]


def run_cases(
    architectures: Iterable[Architecture],
    variations: Iterable[Variation] | None = None,
    *,
    num_jobs: int = 2,
    timeout_s: float = 300.0,
    tensor: int = 1,
    trains: bool = False,
    on_result: Callable[[CaseResult], None] = lambda result: None,
) -> list[CaseResult]:
    """Run every architecture.

    Args:
        architectures: architectures to run.
        variations: one variation per architecture; None: small configs.
        num_jobs: number of parallel processes.
        timeout_s: time limit per architecture, in seconds; its process is then killed.
        tensor: number of virtual devices to shard weights over.
        trains: also compare a training step.
        on_result: called with each result as it arrives.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting: list[_Case] = (
        [(a, None) for a in architectures] if variations is None else list(zip(architectures, variations, strict=True))
    )
    running: dict[Connection, Any] = {}
    results: list[CaseResult] = []
    while waiting or running:
        while waiting and len(running) < num_jobs:
            case = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(*case, tensor, trains, sender))
            process.start()
            sender.close()
            running[receiver] = (case, process, time.monotonic() + timeout_s)
        for receiver in _ready(running):
            case, process, deadline = running.pop(receiver)
            result = _take(receiver, process, case, is_late=time.monotonic() > deadline)
            results.append(result)
            on_result(result)
    return results


def _ready(running: dict[Connection, Any]) -> list[Connection]:
    """Connections that have a result or were closed, and those past their deadline."""
    nearest = min(deadline for _, _, deadline in running.values())
    found = wait(list(running), timeout=max(0.0, nearest - time.monotonic()))
    late = [r for r, (_, _, deadline) in running.items() if time.monotonic() > deadline and r not in found]
    return [r for r in found if isinstance(r, Connection)] + late


def _take(receiver: Connection, process: Any, case: _Case, *, is_late: bool) -> CaseResult:
    architecture, variation = case
    try:
        result = receiver.recv() if receiver.poll() else None
    except EOFError:
        result = None
    if result is None and is_late:
        process.kill()
    process.join(10)
    receiver.close()
    if result is not None:
        return dataclasses.replace(result, variation=variation)  # the one that was asked for, not the process's copy
    reason = "took too long" if is_late else f"the process ended with code {process.exitcode}"
    return CaseResult(
        mapping=architecture.mapping,
        model_type=architecture.model_type,
        class_name=architecture.class_name,
        outcome="forward fails",
        reason=reason,
        variation=variation,
    )


def _child(
    architecture: Architecture, variation: Variation | None, tensor: int, trains: bool, sender: Connection
) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["HFAX_PROGRAM_CACHE"] = "0"
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={tensor}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    progress.turn_off()  # the parent says what runs
    torch.set_num_threads(1)
    sender.send(run_case(architecture, tensor, variation, trains=trains))
    sender.close()
