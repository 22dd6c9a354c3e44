"""The backend "jax": the model's torch code traced into a pure JAX function.

    name → source (files) → config → class → skeleton → weights on the device → model

Each arrow is a module of `hfax.load`; this one only puts them in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfax.backends.protocol import LoadOptions
from hfax.errors import BackendNotAvailableError, InvalidInputError, UnsupportedOptionError
from hfax.launch.cluster import default_device
from hfax.phases import phase
from hfax.programs.bundle_file import is_bundle

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.load.skeleton import Skeleton
    from hfax.load.source import CheckpointSource
    from hfax.programs.buckets import Size
    from hfax.programs.bundle import Bundle
    from hfax.sharding.layout import Layout


class JaxBackend:
    """The JAX implementation of `hfax.backends.protocol.Backend`."""

    name = "jax"
    capabilities = frozenset(
        {"apply", "quantization", "parallelism", "plan", "num_labels", "processes", "export", "speculation"}
    )

    def problem(self) -> BackendNotAvailableError | None:
        """Why the backend is not available; None if it is."""
        try:
            import hfax.tracing.torchax  # noqa: F401  (it reverts the global switch set by torchax's import)
        except ImportError as error:
            return BackendNotAvailableError(
                "The JAX backend is not installed.",
                str(error),
                "Install one of the extras: pip install 'hfax[tpu]', 'hfax[cuda]' or 'hfax[cpu]'.",
            )
        return None

    def devices(self) -> list[str]:
        """A description of each device."""
        import jax

        return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]

    def load(self, source: CheckpointSource, options: LoadOptions) -> JaxModel:
        """A model with the weights of a checkpoint."""
        from hfax.load.quantize import check_name
        from hfax.parallelism import read_plan

        if options.plan is not None:
            parallelism, quantization = read_plan(options.plan)
            options = options.changed(parallelism=parallelism, quantization=quantization)
        check_name(options.quantization)
        if source.format == "orbax" or is_bundle(source):
            return _load_arrays(source, options)
        return _load(source, options)

    def from_config(self, config: PretrainedConfig, options: LoadOptions, seed: int) -> JaxModel:
        """A model with random weights."""
        from hfax.load.quantize import check_name
        from hfax.load.random_weights import draw_weights

        check_name(options.quantization)
        config, packed = copy.deepcopy(config), options.quantization
        skeleton = _open_skeleton(config, options)
        layout = _choose_layout(skeleton, options, packed)
        with phase("load", f"{type(skeleton.module).__name__} with random weights"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            params = draw_weights(skeleton, config, layout, packed)  # pyright: ignore[reportArgumentType]
        name = type(config).__name__
        return _finish(skeleton, params, skeleton.tied, layout, folder=None, name=name, task=options.task)


BACKEND = JaxBackend()


def _load(source: CheckpointSource, options: LoadOptions) -> JaxModel:
    from hfax.load.config import read_config
    from hfax.load.formats import find_weights, is_quantized_by_hfax
    from hfax.load.saved_parts import saved_layouts
    from hfax.load.store import open_store
    from hfax.load.weights import load_quantized, load_weights, stored_layouts

    config = read_config(source, trust_remote_code=options.trust_remote_code)
    if options.num_labels is not None:
        if not isinstance(options.num_labels, int) or options.num_labels < 1:
            raise InvalidInputError(
                f"num_labels={options.num_labels!r} is not a number of outputs.", "It counts labels.", "Pass 1 or more."
            )
        config.num_labels = options.num_labels
    is_own = is_quantized_by_hfax(config)
    store = find_weights(config, open_store(source))
    skeleton = _open_skeleton(config, options, source, store.float_dtype)
    stored = (
        saved_layouts(skeleton.shapes, store.described())
        if is_own
        else stored_layouts(skeleton, store, default_device().platform)
    )
    layout = _choose_layout(skeleton, options, options.quantization or stored)
    if not is_own:
        params, tied = load_weights(
            skeleton,
            store,
            layout,
            strict=options.strict,
            quantization=options.quantization,  # pyright: ignore[reportArgumentType]
        )
    elif options.quantization is None:
        params, tied = load_quantized(skeleton, store, layout), skeleton.tied
    else:
        raise UnsupportedOptionError(
            f"quantization={options.quantization!r} was passed for a checkpoint that is already quantized.",
            "It no longer has full-precision weights.",
            "Remove quantization, or load the original checkpoint.",
        )
    return _finish(skeleton, params, tied, layout, folder=source.folder, name=str(source.name), task=options.task)


def model_around(
    source: CheckpointSource,
    options: LoadOptions,
    params: dict[str, Any],
    tied: dict[str, str],
    layout: Layout,
    *,
    programs: Path | None = None,
    sizes: Sequence[Size] = (),
) -> JaxModel:
    """The model of a safetensors checkpoint whose weights are already placed.

    Args:
        source: the checkpoint.
        options: how it was loaded.
        params: its weights by name.
        tied: alias mapped to name, for weights that share an array.
        layout: where they are.
        programs: folder of programs compiled for the model.
        sizes: prompt and cache sizes that the programs were compiled for.
    """
    from hfax.load.config import read_config
    from hfax.load.formats import find_weights
    from hfax.load.store import open_store

    config = read_config(source, trust_remote_code=options.trust_remote_code)
    stored_dtype = None if is_bundle(source) else find_weights(config, open_store(source)).float_dtype
    skeleton = _open_skeleton(config, options, source, stored_dtype)
    named = {"folder": source.folder, "name": str(source.name), "task": options.task}
    return _finish(skeleton, params, tied, layout, **named, programs=programs, sizes=sizes)


def _load_arrays(source: CheckpointSource, options: LoadOptions) -> JaxModel:
    """The model of an orbax checkpoint or a bundle; of a bundle, on the devices its programs were compiled for."""
    from hfax.programs.bundle_file import PROGRAMS
    from hfax.sharding.layout import Layout

    if options.quantization is not None:
        raise UnsupportedOptionError(
            f"quantization={options.quantization!r} was passed for {_kind_of(source)}.",
            "Weights are quantized one at a time while they are read from safetensors.",
            'Load the safetensors checkpoint with quantization, then save that model with format="orbax".',
        )
    if options.num_labels is not None:
        raise UnsupportedOptionError(
            f"num_labels={options.num_labels} was passed for {_kind_of(source)}.",
            "Its arrays are restored as they are, the head with them.",
            "Load the safetensors checkpoint with num_labels.",
        )
    bundle = None if options.parallelism is not None else read_bundle_of(source)
    if bundle is None:
        return load_saved(source, lambda skeleton, packed: _choose_layout(skeleton, options, packed), options)
    mesh, device = bundle.make_mesh(), default_device()

    def layout_of(skeleton: Skeleton, packed: Any) -> Layout:
        from hfax.parallelism import plan_over

        if mesh is None:
            return Layout.on(device)
        return Layout.of(plan_over(skeleton, mesh, packed, given=bundle.given_specs()))

    options = options.changed(task=bundle.task, attn_implementation=bundle.attn_implementation)
    return load_saved(source, layout_of, options, programs=source.folder / PROGRAMS, sizes=bundle.sizes)


def load_saved(
    source: CheckpointSource,
    layout_of: Callable[[Skeleton, Any], Layout],
    options: LoadOptions,
    *,
    programs: Path | None = None,
    sizes: Sequence[Size] = (),
) -> JaxModel:
    """The model of a folder of orbax weights, or of a bundle; abstract if the layout is.

    Args:
        source: the folder.
        layout_of: returns the layout from the skeleton and how its quantized weights are packed, by name.
        options: loading options.
        programs: folder of programs compiled for the model.
        sizes: prompt and cache sizes that the programs were compiled for.
    """
    from hfax.load.config import read_config
    from hfax.load.orbax_checkpoint import OrbaxStore
    from hfax.load.safetensors_arrays import SafetensorsArrays
    from hfax.load.saved_parts import saved_layouts
    from hfax.load.weights import load_arrays

    config = read_config(source, trust_remote_code=options.trust_remote_code)
    skeleton = _open_skeleton(config, options, source)
    is_orbax = source.format == "orbax"
    store = OrbaxStore(source.weight_files[0]) if is_orbax else SafetensorsArrays(source.safetensors_files)
    layout = layout_of(skeleton, saved_layouts(skeleton.shapes, store.arrays))
    params, tied = load_arrays(skeleton, store, layout)
    return _finish(
        skeleton,
        params,
        tied,
        layout,
        folder=source.folder,
        name=str(source.name),
        task=options.task,
        programs=programs,
        sizes=sizes,
    )


def _kind_of(source: CheckpointSource) -> str:
    return "an orbax checkpoint" if source.format == "orbax" else "a bundle"


def read_bundle_of(source: CheckpointSource) -> Bundle | None:
    """The bundle in a local folder; on the Hub, bundles are loaded as plain checkpoints, since programs are code."""
    from hfax.programs.bundle import read_bundle

    return read_bundle(source.folder) if source.revision is None else None


def _open_skeleton(
    config: PretrainedConfig,
    options: LoadOptions,
    source: CheckpointSource | None = None,
    stored_dtype: torch.dtype | None = None,
) -> Skeleton:
    from hfax.tracing.abstract import open_skeleton

    return open_skeleton(
        config,
        task=options.task,
        dtype=options.dtype,
        stored_dtype=stored_dtype,
        attn_implementation=options.attn_implementation,
        code_folder=options.code_folder(source),
    )


def _choose_layout(skeleton: Skeleton, options: LoadOptions, packed: Any) -> Layout:
    from hfax.parallelism import choose_layout

    return choose_layout(skeleton, options.parallelism, packed, default_device())


def _finish(
    skeleton: Any,
    params: dict[str, Any],
    tied: dict[str, str],
    layout: Layout,
    *,
    folder: Path | None,
    name: str,
    task: str | None,
    programs: Path | None = None,
    sizes: Sequence[Size] = (),
) -> JaxModel:
    from hfax.backends.jax.model import JaxModel
    from hfax.load.config import read_generation_config
    from hfax.programs.buckets import Buckets

    # transformers' pipelines check the class name.
    cls = type(
        type(skeleton.module).__name__, (JaxModel,), {"__doc__": JaxModel.__doc__, "__module__": JaxModel.__module__}
    )
    return cls(
        skeleton,
        params,
        tied,
        layout=layout,
        generation_config=read_generation_config(folder, skeleton.module),
        name_or_path=name,
        folder=folder,
        task=task,
        programs=programs,
        buckets=Buckets(made=tuple(sizes)),
    )
