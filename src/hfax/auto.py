"""`AutoModelForTPU`: the whole way from a name to a model that runs, on one screen.

    name → source (files) → config → class → skeleton → weights on the device → model

Each arrow is a module of `hfax.load`; this one only puts them in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hfax.errors import BackendNotAvailableError, InvalidInputError, UnsupportedModelError, UnsupportedOptionError
from hfax.phases import phase

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from hfax.load.skeleton import Skeleton
    from hfax.load.source import CheckpointSource
    from hfax.model import JaxModel
    from hfax.parallelism.choose import Parallelism
    from hfax.programs.buckets import Size
    from hfax.programs.bundle import Bundle
    from hfax.sharding.layout import Layout

_DTYPES = ("float32", "bfloat16", "float16")


class AutoModelForTPU:
    """Any transformers model on XLA. Use `from_pretrained` or `from_config`; the class has no instances."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the class only holds constructors."""
        raise InvalidInputError(
            "AutoModelForTPU cannot be instantiated.",
            "It only chooses the model's class.",
            "Call AutoModelForTPU.from_pretrained(name_or_path) or AutoModelForTPU.from_config(config).",
        )

    @staticmethod
    def from_pretrained(
        name_or_path: str | Path,
        *,
        backend: str = "jax",
        task: str | None = None,
        dtype: str | torch.dtype = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        strict: bool = True,
        quantization: str | None = None,
        parallelism: Parallelism = None,
        plan: str | Path | None = None,
    ) -> JaxModel:
        """Load a checkpoint from a local folder or the Hugging Face Hub.

        Args:
            name_or_path: a folder, a Hub id such as "Qwen/Qwen3-0.6B", or "demo" for the model that hfax carries.
            backend: "jax".
            task: a pipeline task name, to choose another class than the checkpoint's own, for instance
                "text-classification".
            dtype: "auto" for the checkpoint's own, or "float32", "bfloat16", "float16", or a torch dtype.
            revision: branch, tag or commit on the Hub.
            token: Hub token; None uses the one of `hf auth login`.
            cache_dir: Hub cache folder; None for huggingface_hub's own.
            local_files_only: never use the network.
            trust_remote_code: run modelling code that the checkpoint carries.
            attn_implementation: "eager" for transformers' own eager attention; None for hfax's.
            strict: missing and unexpected tensors are errors; False initialises the missing ones as transformers does.
            quantization: "int8" or "int4": the linear layers' matrices become integers with scales while they are loaded; the
                rest stays in `dtype`. A checkpoint that hfax saved quantized needs none.
            parallelism: over which devices the model is spread. None: one device, or, if the weights do not fit its memory, as
                "auto": all devices, heads and inner widths split among as many as divide the heads, experts and batches among
                the rest. Or sizes by axis, `{"data": 2, "fsdp": 1, "tensor": 4, "expert": 1}`; or a `jax.sharding.Mesh` with
                such axes; or name patterns to `PartitionSpec`s, `{"*.q_proj.weight": P("tensor", None)}`, of which the first
                that matches counts, beside hfax's own plan for the other weights ("mesh" in it says which mesh).
            plan: a file that `hfax plan --json-file` wrote; the first plan in it for as many devices as there are here says mesh
                and quantization.

        Returns:
            A model whose weights are where they will be used; nothing is compiled yet. From a folder that `hfax.export` wrote, and
            without `parallelism`: a model that starts with the programs in it, over the devices that they were made for.

        Raises:
            HfaxError: one of its subclasses, which says what to do.
        """
        _require_jax(backend)
        from hfax.load.quantize import check_name

        if plan is not None:
            parallelism, quantization = _planned(plan, parallelism, quantization)
        check_name(quantization)
        from hfax.load.source import resolve_checkpoint

        source = resolve_checkpoint(
            name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_code=trust_remote_code,
        )
        with phase("load", str(name_or_path)):
            return _load(source, task, dtype, trust_remote_code, attn_implementation, strict, quantization, parallelism)

    @staticmethod
    def from_config(
        config: PretrainedConfig,
        *,
        backend: str = "jax",
        task: str | None = None,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        attn_implementation: str | None = None,
        quantization: str | None = None,
        parallelism: Parallelism = None,
    ) -> JaxModel:
        """A model with random weights: the same that transformers draws after `torch.manual_seed(seed)`.

        Args:
            config: a transformers configuration.
            backend: "jax".
            task: a pipeline task name, to choose the class; else `config.architectures`, else a language model.
            dtype: "auto" for the config's dtype (float32 if it has none).
            seed: of torch's generator, which is put back afterwards.
            attn_implementation: as in `from_pretrained`.
            quantization: as in `from_pretrained`.
            parallelism: as in `from_pretrained`.

        Raises:
            UnsupportedModelError: no class for this config, or it cannot be built.
        """
        _require_jax(backend)
        import torch

        from hfax.load.quantize import check_name
        from hfax.load.random_weights import draw_weights
        from hfax.parallelism.choose import choose_layout

        check_name(quantization)
        config = copy.deepcopy(config)
        resolved = _resolve_dtype(dtype, config, None)
        skeleton = _skeleton(config, task, resolved, None, attn_implementation)
        layout = choose_layout(skeleton, parallelism, quantization, _default_device())  # pyright: ignore[reportArgumentType]
        with phase("load", f"{type(skeleton.module).__name__} with random weights"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            params = draw_weights(skeleton, config, resolved, layout, quantization)  # pyright: ignore[reportArgumentType]
        return _finish(skeleton, params, skeleton.tied, layout, folder=None, name=type(config).__name__, task=task)


def _load(
    source: CheckpointSource,
    task: str | None,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
    strict: bool,
    quantization: Any,
    parallelism: Parallelism,
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
    resolved = _resolve_dtype(dtype, config, store.float_dtype)
    code_folder = str(source.folder) if trust_remote_code else None
    skeleton = _skeleton(config, task, resolved, code_folder, attn_implementation)
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
    resolved = _resolve_dtype(dtype, config, None)
    code_folder = str(source.folder) if trust_remote_code else None
    skeleton = _skeleton(config, task, resolved, code_folder, attn_implementation)
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


def _planned(path: str | Path, parallelism: Parallelism, quantization: str | None) -> tuple[Parallelism, str | None]:
    """Mesh and quantization of a saved plan."""
    from hfax.parallelism.saved import read_plan

    if parallelism is not None or quantization is not None:
        raise InvalidInputError(
            "plan= was given beside parallelism= or quantization=.", "The plan says both.", "Leave the others out."
        )
    return read_plan(path)


def _skeleton(
    config: PretrainedConfig,
    task: str | None,
    dtype: torch.dtype,
    code_folder: str | None,
    attn_implementation: str | None,
) -> Any:
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


def _resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, stored: torch.dtype | None) -> torch.dtype:
    """The dtype asked for; for "auto" the config's, else that of the stored weights, else float32."""
    import torch

    if dtype == "auto":
        chosen: Any = getattr(config, "dtype", None) or stored or torch.float32
    else:
        chosen = dtype
    name = str(chosen).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidInputError(
            f"dtype={dtype!r} is not available.",
            "Models run in one of the floating-point types that every XLA device has.",
            f"Use 'auto' or one of {', '.join(_DTYPES)}.",
        )
    return getattr(torch, name)


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


def _require_jax(backend: str) -> None:
    if backend != "jax":
        raise UnsupportedOptionError(
            f"backend={backend!r} is not available.",
            "This version of hfax runs models through JAX.",
            'Use backend="jax".',
        )
    try:
        import hfax.backends.torchax  # noqa: F401  (it undoes the switch that torchax's own import throws)
    except ImportError as error:
        raise BackendNotAvailableError(
            "The JAX backend is not installed.",
            str(error),
            "Install one of the extras: pip install 'hfax[tpu]', 'hfax[cuda]' or 'hfax[cpu]'.",
        ) from error
