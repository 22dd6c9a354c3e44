"""`hfax.export`: writes a bundle, a model folder that starts without tracing or compiling.

    model → weights, sharded for the target devices → abstract model → compiled programs → bundle.json

Programs are compiled by calling the abstract model, so a bundle has exactly the programs that the same calls look up after loading.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hfax.backends.jax.backend import load_saved, model_around
from hfax.backends.jax.model import JaxModel
from hfax.backends.jax.weights import packed_layouts
from hfax.backends.protocol import LoadOptions
from hfax.engine.config import EngineConfig
from hfax.engine.engine import Engine
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.exporting.folders import replacing
from hfax.load.save_pretrained import OWN_NAMES, save_model
from hfax.load.source import resolve_checkpoint
from hfax.parallelism import plan_over
from hfax.phases import phase
from hfax.programs.bundle import Bundle, runtime_of, sizes_of, specs_of
from hfax.programs.bundle_file import FILE, PROGRAMS
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import make_mesh, size_of
from hfax.stored.recording import store_in_bundle

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
    engine: EngineConfig | None = None,
    **options: Any,
) -> Bundle:
    """Write a bundle of sharded weights and compiled programs. Load it with `AutoModelForTPU.from_pretrained(folder)`.

    Args:
        model: the loaded model; on one device of this host if `topology` is given.
        folder: must not exist, or be an earlier bundle, which is kept until the new one is complete.
        batch_sizes: batch sizes of `generate` to compile for, see `JaxModel.compile`. Smaller requests use the smallest size that
            fits; larger ones are compiled when called.
        prompt_lengths: prompt lengths to compile for, in tokens.
        max_new_tokens: maximum number of new tokens to compile for.
        calls: inputs of additional forward passes to compile for; array values do not matter.
        topology: TPU topology to export for, such as "v5e:2x4"; None: the model's own devices.
        parallelism: parallelism over the topology's devices, see `from_pretrained`.
        engine: also make the programs of an `Engine` with this configuration, which are those of `hfax serve` with the same
            options. The model runs for it. None: none.
        **options: generation options of those calls. Which options are active determines the programs; their values do not.

    Returns:
        The contents of `bundle.json`.

    Raises:
        InvalidInputError: the folder has other contents.
        UnsupportedOptionError: several processes are running, the model does not take token ids and no `calls` are given, or an
            `engine` is given with a topology.
        BackendNotAvailableError: orbax (for several devices) or libtpu (for a topology) is not installed.
        HfaxError: the folder cannot be written.
    """
    _check(model, topology, engine)
    layout = model.parts.layout if topology is None else _layout_of(model, topology, parallelism)
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
                f"{type(model).__name__} does not generate text, and export() got no calls.",
                "Programs are compiled for specific input shapes.",
                'Pass calls=[{"input_ids": …, "attention_mask": …}], with arrays of the expected shapes.',
            )
        for inputs in calls:
            described(**inputs)
        (writing / PROGRAMS).mkdir(mode=0o700)
        devices = jax.devices() if topology is None else layout.devices
        bundle = Bundle(
            runtime=runtime_of(devices, is_one_device=layout.plan is None),
            device_ids=[device.id for device in layout.devices],
            mesh=sizes_of(layout.mesh),
            specs=specs_of(layout),
            attn_implementation=_attention(model),
            task=model.task,
            programs=described.parts.programs.store(writing / PROGRAMS),
            sizes=sorted({size.padded for size in warmed}),
        )
        bundle.write(writing)
        if layout.plan is None and model.task is None and _attention(model) is None:
            store_in_bundle(resolve_checkpoint(writing), described, model.buffers)
        if engine is not None:
            loaded = model_around(source, loading, model.params, dict(model.parts.tied), layout)
            with Engine(loaded, config=engine) as running:
                running.warm_up()
                bundle.programs.update(running.store(writing / PROGRAMS))
            bundle.write(writing)
    return bundle


def _check(model: JaxModel, topology: str | None, engine: EngineConfig | None) -> None:
    if engine is not None and topology is not None:
        raise UnsupportedOptionError(
            "export() cannot make an engine's programs for a topology.",
            "An engine measures its steps and its memory on the device.",
            "Export on a machine with these devices, without topology=; or without engine=.",
        )
    if jax.process_count() > 1:
        raise UnsupportedOptionError(
            "export() runs in one process.",
            "Several processes would each write the bundle.",
            "Export on one host; pass topology= for a multi-host slice.",
        )
    if not type(model.skeleton.module).__module__.startswith("transformers."):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not one of transformers' own classes.",
            "A bundle contains no modelling code.",
            "Load the model with trust_remote_code=True where it runs.",
        )


def _layout_of(model: JaxModel, topology: str, parallelism: Any) -> Layout:
    """The layout on a topology's devices, without hardware."""
    from hfax.planning.devices import topology_devices

    devices = topology_devices(topology)
    if devices[0].platform == "gpu":
        raise UnsupportedOptionError(
            f"export() cannot make programs for {topology!r}.",
            "XLA chooses a GPU program's tile sizes by running candidates on the device.",
            "Export on a machine with that GPU, without topology=.",
        )
    # a mesh even for one device: it tells Pallas the target chip
    mesh = make_mesh(parallelism, model.config, devices)
    return Layout.of(plan_over(model.skeleton, mesh, packed_layouts(model.params)))


def _write_checkpoint(model: JaxModel, folder: Path, layout: Layout) -> None:
    def parts(name: str) -> int:
        if layout.plan is None or name not in layout.plan.weights:
            return 1
        return math.prod(size_of(layout.plan.mesh, axes) for axes in layout.plan.weights[name].spec)

    format = OWN_NAMES if layout.plan is None else "orbax"
    save_model(folder, model.skeleton, model.params, model.generation_config, format, parts=parts)
    if model.folder is not None:
        for pattern in _TOKENIZER_FILES:
            for path in model.folder.glob(pattern):
                if path.is_file() and not (folder / path.name).exists():
                    shutil.copyfile(path, folder / path.name)


def _attention(model: JaxModel) -> str | None:
    """The `attn_implementation` passed to `from_pretrained`; for classes without another one, "eager" is the default."""
    is_chosen = model.skeleton.module._supports_sdpa and str(model.config._attn_implementation) == "eager"
    return "eager" if is_chosen else None
