"""`hfax.export`: a model as a bundle, a folder that starts elsewhere without tracing or compiling anything.

    model → weights, split as the devices will want them → the same model, only described → its programs → bundle.json

The programs are those that the described model's own calls make, so a bundle holds what the same calls look for when it is loaded.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hfax.backends.jax.backend import load_saved
from hfax.backends.jax.model import JaxModel
from hfax.backends.protocol import LoadOptions
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.exporting.folders import replacing
from hfax.load.save_pretrained import save_model
from hfax.load.source import resolve_checkpoint
from hfax.parallelism import plan_over
from hfax.phases import phase
from hfax.programs.bundle import FILE, PROGRAMS, Bundle, runtime_of, sizes_of, specs_of
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import make_mesh, size_of

_TOKENIZER_FILES = (
    "*token*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "*.jinja",
    "*processor*",
    "special_tokens_map.json",
)


def export(
    model: JaxModel,
    folder: str | Path,
    *,
    batch_sizes: Sequence[int] = (1,),
    prompt_lengths: Sequence[int] = (64,),
    max_new_tokens: int = 64,
    calls: Sequence[Mapping[str, Any]] = (),
    topology: str | None = None,
    parallelism: Any = "auto",
    **options: Any,
) -> Bundle:
    """Write a bundle: weights split by device, and compiled programs. `AutoModelForTPU.from_pretrained(folder)` starts it.

    Args:
        model: loaded; for a topology on one device of this host.
        folder: must not be there, or be an earlier bundle, which stays until the new one is complete.
        batch_sizes: of the calls of `generate` that programs are made for, as `JaxModel.compile` takes them. Smaller requests use
            the smallest size that holds them; larger ones compile.
        prompt_lengths: likewise.
        max_new_tokens: likewise.
        calls: inputs of forward passes that programs are made for, besides; the arrays' values do not matter.
        topology: TPUs to make the bundle for, such as "v5e:2x4"; None: the devices that the model is on.
        parallelism: over the topology's devices, as `from_pretrained` takes it.
        **options: generation options of those calls: which are active shapes the programs, their values do not.

    Returns:
        What its `bundle.json` says.

    Raises:
        InvalidInputError: the folder holds something else.
        UnsupportedOptionError: several processes run; the model reads something else than token ids and no `calls` are given.
        BackendNotAvailableError: orbax, or for a topology libtpu, is not installed.
        HfaxError: the folder cannot be written.
    """
    _check(model)
    layout = model._layout if topology is None else _layout_of(model, topology, parallelism)
    with replacing(Path(folder), FILE) as writing:
        with phase("load", "weights into the bundle"):
            _write_checkpoint(model, writing, layout)
        source = resolve_checkpoint(writing)
        loading = LoadOptions(task=model.task, attn_implementation=_attention(model))
        described = load_saved(source, lambda skeleton, packed: layout.described(), loading)
        warmed = []
        if described.can_generate() and described.main_input_name == "input_ids":
            given = {"max_new_tokens": max_new_tokens, **options}
            warmed = described.compile(batch_sizes, prompt_lengths, **given)
        elif not calls:
            raise UnsupportedOptionError(
                f"{type(model).__name__} does not write text, and export() got no calls.",
                "Programs are made for calls of a certain shape.",
                'Pass calls=[{"input_ids": …, "attention_mask": …}], with arrays of the shapes to come.',
            )
        for inputs in calls:
            described(**inputs)
        made = described._programs.made
        devices = jax.devices() if topology is None else layout.devices
        bundle = Bundle(
            runtime=runtime_of(devices, is_one_device=layout.plan is None),
            device_ids=[device.id for device in layout.devices],
            mesh=sizes_of(layout.mesh),
            specs=specs_of(layout),
            attn_implementation=_attention(model),
            task=model.task,
            programs={file: program.name for file, program in made.items()},
            sizes=sorted({size.padded for size in warmed}),
        )
        (writing / PROGRAMS).mkdir(mode=0o700)
        for file, program in made.items():
            assert program.packed is not None
            (writing / PROGRAMS / file).write_bytes(program.packed())
        bundle.write(writing)
    return bundle


def _check(model: JaxModel) -> None:
    if jax.process_count() > 1:
        raise UnsupportedOptionError(
            "export() runs in one process.",
            "Several processes would each write the bundle.",
            "Export on one host, with topology= for a slice of several.",
        )
    if not type(model._skeleton.module).__module__.startswith("transformers."):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not one of transformers' own classes.",
            "A bundle holds no modelling code.",
            "Load the model with its own code where it runs.",
        )


def _layout_of(model: JaxModel, topology: str, parallelism: Any) -> Layout:
    """Of a topology's devices, nothing of which is there."""
    from hfax.planning.topology import topology_devices

    devices = topology_devices(topology)
    # a mesh even of one: from it Pallas learns which chip a kernel is for
    mesh = make_mesh(parallelism, model.config, devices)
    return Layout.of(plan_over(model._skeleton, mesh, model.quantization))  # pyright: ignore[reportArgumentType]


def _write_checkpoint(model: JaxModel, folder: Path, layout: Layout) -> None:
    def parts(name: str) -> int:
        if layout.plan is None or name not in layout.plan.weights:
            return 1
        return math.prod(size_of(layout.plan.mesh, axes) for axes in layout.plan.weights[name].spec)

    save_model(folder, model._skeleton, model.params, model.generation_config, "orbax", parts=parts)
    if model.folder is not None:
        for pattern in _TOKENIZER_FILES:
            for path in model.folder.glob(pattern):
                if path.is_file() and not (folder / path.name).exists():
                    shutil.copyfile(path, folder / path.name)


def _attention(model: JaxModel) -> str | None:
    """As `from_pretrained` was given it."""
    return "eager" if model.config._attn_implementation == "eager" else None
