"""Compiles functions that are traced in every process, as training steps are, or reads what an earlier process compiled.

What a step computes depends on Python that no key can name (optimizers, losses of the user's own), but its trace says all of it:
the key is the lowered text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

from hfax.phases import phase
from hfax.programs.executables import load_executable
from hfax.programs.program_cache import environment_parts
from hfax.programs.program_files import program_folder, read_program, write_program
from hfax.sharding.layout import Layout

_CALLS_PYTHON = "callback"
"""In the text of a program that calls Python of this process, by the address of it."""


def compile_stored(
    name: str, lowered: jax.stages.Lowered, layout: Layout, options: Mapping[str, Any] | None
) -> jax.stages.Compiled:
    """The executable of a lowered function.

    Args:
        name: for phases and the record on disk.
        lowered: the function.
        layout: devices of its arguments.
        options: the compiler's.
    """
    given = None if options is None else dict(options)
    text = lowered.as_text()
    devices = list(layout.devices)
    if devices[0].platform not in {device.platform for device in jax.local_devices()} or _CALLS_PYTHON in text:
        return _compile(name, lowered, given)
    parts = {
        "name": name,
        "lowered": hashlib.sha256(text.encode()).hexdigest(),
        # arguments that are not read are not in the text
        "arguments and results": repr((jax.tree.structure(lowered.args_info), lowered.out_tree)),
        "options": repr(sorted((given or {}).items())),
        "devices": repr([device.id for device in devices]),
        **environment_parts(layout.device),
    }
    path = program_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.program"

    def unpack(packed: bytes) -> jax.stages.Compiled:
        return load_executable(packed, jax.tree.structure(lowered.args_info), lowered.out_tree, layout)

    if (found := read_program(path, unpack)) is not None:
        return found
    compiled = _compile(name, lowered, given)
    write_program(path, lambda: serialize_executable.serialize(compiled)[0], parts)
    return compiled


def _compile(name: str, lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> jax.stages.Compiled:
    with phase("compile", name):
        return lowered.compile(compiler_options=options)
