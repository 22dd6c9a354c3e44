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

from hfax.backend import LoadOptions, resolve_dtype
from hfax.errors import BackendNotAvailableError, UnsupportedModelError, UnsupportedOptionError
from hfax.phases import phase

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.load.skeleton import Skeleton
    from hfax.load.source import CheckpointSource
    from hfax.model import JaxModel
    from hfax.programs.buckets import Size
    from hfax.programs.bundle import Bundle
    from hfax.sharding.layout import Layout


class JaxBackend:
    """See `hfax.backend.Backend`."""

    name = "jax"
    capabilities = frozenset({"apply", "quantization", "parallelism", "plan", "processes", "export", "guesses"})

    def problem(self) -> BackendNotAvailableError | None:
        """Why it cannot be used here; None if it can."""
        try:
            import hfax.backends.torchax  # noqa: F401  (it undoes the switch that torchax's own import throws)
        except ImportError as error:
            return BackendNotAvailableError(
                "The JAX backend is not installed.",
                str(error),
                "Install one of the extras: pip install 'hfax[tpu]', 'hfax[cuda]' or 'hfax[cpu]'.",
            )
        return None

    def devices(self) -> list[str]:
        """Each device in words."""
        import jax

        return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]

    def load(self, source: CheckpointSource, options: LoadOptions) -> JaxModel:
        """A model with the weights of a checkpoint."""
        from hfax.load.quantize import check_name
        from hfax.parallelism.saved import read_plan

        if options.plan is not None:
            parallelism, quantization = read_plan(options.plan)
            options = options.changed(parallelism=parallelism, quantization=quantization)
        check_name(options.quantization)
        return _load(
            source,
            options.task,
            options.dtype,
            options.trust_remote_code,
            options.attn_implementation,
            options.strict,
            options.quantization,
            options.parallelism,
        )

    def from_config(self, config: PretrainedConfig, options: LoadOptions, seed: int) -> JaxModel:
        """A model with random weights."""
        from hfax.load.quantize import check_name
        from hfax.load.random_weights import draw_weights
        from hfax.parallelism.choose import choose_layout

        check_name(options.quantization)
        config, packed = copy.deepcopy(config), options.quantization
        resolved = resolve_dtype(options.dtype, config, None)
        skeleton = make_skeleton(config, options.task, resolved, None, options.attn_implementation)
        layout = choose_layout(skeleton, options.parallelism, packed, _default_device())  # pyright: ignore[reportArgumentType]
        with phase("load", f"{type(skeleton.module).__name__} with random weights"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            params = draw_weights(skeleton, config, resolved, layout, packed)  # pyright: ignore[reportArgumentType]
        name = type(config).__name__
        return _finish(skeleton, params, skeleton.tied, layout, folder=None, name=name, task=options.task)


BACKEND = JaxBackend()


def _load(
    source: CheckpointSource,
    task: str | None,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
    strict: bool,
    quantization: Any,
    parallelism: Any,
) -> JaxModel:
    from hfax.load.config import read_config
    from hfax.load.store import open_store
    from hfax.load.weights import load_quantized, load_weights
    from hfax.parallelism.choose import choose_layout

    device = _default_device()
    if source.format == "orbax":
        if quantization is not None:
            raise UnsupportedOptionError(
                f"quantization={quantization!r} was given for a checkpoint that was saved by orbax.",
                "Weights are quantized one at a time as they are read from safetensors.",
                "Load the safetensors with it, and save that model by orbax.",
            )
        if parallelism is None and (bundle := read_bundle_of(source)) is not None:
            return _load_bundle(source, bundle, device)
        return load_saved(
            source,
            lambda skeleton, packed: choose_layout(skeleton, parallelism, packed, device),
            task=task,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    config = read_config(source, trust_remote_code=trust_remote_code)
    store = open_store(source)
    resolved = resolve_dtype(dtype, config, store.float_dtype)
    code_folder = str(source.folder) if trust_remote_code else None
    skeleton = make_skeleton(config, task, resolved, code_folder, attn_implementation)
    layout = choose_layout(skeleton, parallelism, quantization or _packed_by_hfax(config), device)
    if _is_quantized_by_hfax(config):
        if quantization is not None:
            raise UnsupportedOptionError(
                f"quantization={quantization!r} was given for a checkpoint that is quantized.",
                "Its full-precision weights are gone.",
                "Leave quantization out, or load the original checkpoint.",
            )
        params, tied = load_quantized(skeleton, store, layout, resolved), skeleton.tied
    else:
        params, tied = load_weights(skeleton, store, layout, resolved, strict=strict, quantization=quantization)
    return _finish(skeleton, params, tied, layout, folder=source.folder, name=str(source.name), task=task)


def load_saved(
    source: CheckpointSource,
    layout_of: Callable[[Skeleton, Any], Layout],
    *,
    task: str | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    programs: Path | None = None,
    sizes: Sequence[Size] = (),
) -> JaxModel:
    """The model of a folder of orbax weights; only described, if the layout is.

    Args:
        source: the folder.
        layout_of: where it goes, by its skeleton and the name of its quantization.
        task: as `AutoModelForTPU.from_pretrained` takes it.
        dtype: likewise.
        attn_implementation: likewise.
        trust_remote_code: likewise.
        programs: a folder of programs made for it.
        sizes: of prompts and caches that they were made for.
    """
    from hfax.load.config import read_config
    from hfax.load.orbax_checkpoint import OrbaxStore
    from hfax.load.weights import load_arrays

    config = read_config(source, trust_remote_code=trust_remote_code)
    resolved = resolve_dtype(dtype, config, None)
    code_folder = str(source.folder) if trust_remote_code else None
    skeleton = make_skeleton(config, task, resolved, code_folder, attn_implementation)
    layout = layout_of(skeleton, _packed_by_hfax(config))
    params, tied = load_arrays(skeleton, OrbaxStore(source.weight_files[0]), layout, resolved)
    return _finish(
        skeleton,
        params,
        tied,
        layout,
        folder=source.folder,
        name=str(source.name),
        task=task,
        programs=programs,
        sizes=sizes,
    )


def read_bundle_of(source: CheckpointSource) -> Bundle | None:
    """The bundle that a local folder is; bundles on the Hub are checkpoints, since programs are code."""
    from hfax.programs.bundle import read_bundle

    return read_bundle(source.folder) if source.revision is None else None


def _load_bundle(source: CheckpointSource, bundle: Bundle, device: Any) -> JaxModel:
    """The model of a bundle, over the devices that its programs were made for."""
    from hfax.parallelism.choose import plan_over
    from hfax.programs.bundle import PROGRAMS
    from hfax.sharding.layout import Layout

    mesh = bundle.make_mesh()

    def layout_of(skeleton: Skeleton, packed: Any) -> Layout:
        if mesh is None:
            return Layout.on(device)
        return Layout.of(plan_over(skeleton, mesh, packed, given=bundle.given_specs()))

    return load_saved(
        source,
        layout_of,
        task=bundle.task,
        attn_implementation=bundle.attn_implementation,
        programs=source.folder / PROGRAMS,
        sizes=bundle.sizes,
    )


def make_skeleton(
    config: PretrainedConfig,
    task: str | None,
    dtype: torch.dtype,
    code_folder: str | None,
    attn_implementation: str | None,
) -> Any:
    """The structure of a model without its weights, with hfax's attention and experts."""
    from hfax.backends.torchax import ADDITIVE_NAME, ATTENTION_NAME, register_interfaces
    from hfax.load.skeleton import build_skeleton, resolve_model_class

    if attn_implementation not in (None, "eager"):
        raise UnsupportedOptionError(
            f"attn_implementation={attn_implementation!r} is not available.",
            "Kernels written for torch devices do not run on XLA; hfax brings its own attention.",
            'Leave it out, or pass "eager" for transformers\' reference implementation.',
        )
    if getattr(config, "quantization_config", None) is not None and not _is_quantized_by_hfax(config):
        raise UnsupportedModelError(
            "The checkpoint is quantized.",
            "Its weights are packed for a kernel library that does not run on XLA.",
            "Use the unquantized checkpoint of the same model, with dtype='bfloat16'.",
        )
    register_interfaces()
    model_class = resolve_model_class(config, task, code_folder=code_folder)
    own = {"sdpa": ATTENTION_NAME, "eager": ADDITIVE_NAME}
    return build_skeleton(model_class, config, dtype, attention=attn_implementation or own, experts=ATTENTION_NAME)


def _packed_by_hfax(config: PretrainedConfig) -> Any:
    """The quantization of a checkpoint that hfax saved; None if it has none."""
    given: Any = config.quantization_config if _is_quantized_by_hfax(config) else None
    return None if given is None else f"int{given['bits']}"


def _is_quantized_by_hfax(config: PretrainedConfig) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "hfax"


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
    from hfax.load.config import read_generation_config
    from hfax.model import JaxModel
    from hfax.programs.buckets import Buckets

    # transformers' pipelines look at the class's name.
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


def _default_device() -> Any:
    import jax

    from hfax.launch.cluster import join

    join()
    try:
        return jax.local_devices()[0]
    except RuntimeError as error:
        raise BackendNotAvailableError(
            "JAX found no device.",
            str(error).splitlines()[0],
            "Check JAX_PLATFORMS and the installed extra (hfax[tpu], hfax[cuda] or hfax[cpu]); `hfax env` shows both.",
        ) from error
