"""`AutoModelForTPU`: resolves a name to local checkpoint files and loads them with a backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from hfax.backends.choice import choose_backend, require_capabilities
from hfax.backends.protocol import Backend, LoadOptions
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.known_words import keywords, reject_arguments
from hfax.phases import phase

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.backends.torch_xla.model import TorchXlaModel
    from hfax.load.source import CheckpointSource
    from hfax.parallelism import Parallelism


class AutoModelForTPU:
    """Any transformers model on XLA. Use `from_pretrained` or `from_config`; the class cannot be instantiated."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: use the constructors instead."""
        raise InvalidInputError(
            "AutoModelForTPU cannot be instantiated.",
            "It only selects the model class.",
            "Call AutoModelForTPU.from_pretrained(name_or_path) or AutoModelForTPU.from_config(config).",
        )

    @overload
    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path, *, backend: Literal["jax"] = "jax", **options: Any
    ) -> JaxModel: ...

    @overload
    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path, *, backend: Literal["torch_xla"], **options: Any
    ) -> TorchXlaModel: ...

    @overload
    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | Path, *, backend: str, **options: Any) -> Any: ...

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
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
        num_labels: int | None = None,
        **others: Any,
    ) -> JaxModel | TorchXlaModel:
        """Load a checkpoint from a local folder or the Hugging Face Hub.

        Args:
            pretrained_model_name_or_path: a folder; a Hub id such as "Qwen/Qwen3-0.6B"; a GGUF file's path, or its name on the Hub
                ("owner/repo:Q4_K_M"); or "demo" for the model bundled with hfax.
            backend: "jax", "torch_xla", the name of a third-party backend, or "auto" for the first available one.
            task: a pipeline task name such as "text-classification", to load a class other than the checkpoint's own.
            dtype: "auto" for the checkpoint's dtype, or "float32", "bfloat16", "float16", or a torch dtype.
            revision: branch, tag or commit on the Hub.
            token: Hub token; None uses the one from `hf auth login`.
            cache_dir: Hub cache folder; None for huggingface_hub's default.
            local_files_only: never use the network.
            trust_remote_code: run modelling code from the checkpoint.
            attn_implementation: "eager" for transformers' eager attention; None or "sdpa" for hfax's attention, with kernels
                selected by platform and shapes.
            strict: raise on missing and unexpected tensors; False initialises missing ones as transformers does.
            quantization: "int8" or "int4": quantize the matrices of linear layers to integers with scales while loading; the rest
                stays in `dtype`. Not needed for a checkpoint that hfax saved quantized.
            parallelism: how the model is sharded over devices. None: one device, or "auto" if the weights do not fit its memory.
                "auto": all devices; heads and inner widths are split over as many as divide the heads, experts and batches over
                the rest. Also: sizes by axis, `{"data": 2, "fsdp": 1, "tensor": 4, "expert": 1}`; a `jax.sharding.Mesh` with
                such axes; or name patterns mapped to `PartitionSpec`s, `{"*.q_proj.weight": P("tensor", None)}`: the first match
                wins, other weights follow hfax's plan, and the key "mesh" sets the mesh.
            plan: a file written by `hfax plan --json-file`; its first plan for the number of available devices sets the mesh and
                quantization.
            num_labels: outputs of a classifier's head, in place of the config's; with `strict=False` a new head is initialised.
            **others: transformers' names for the same options: `torch_dtype` (`dtype`), `device_map="auto"`
                (`parallelism="auto"`), `low_cpu_mem_usage=True` and `use_safetensors=True` (always on). Others are rejected.

        Returns:
            A model with its weights on the devices; nothing is compiled yet. A folder written by `hfax.export`, loaded without
            `parallelism`, gives a model with the exported programs, on the devices they were compiled for.

        Raises:
            HfaxError: one of its subclasses; the message says what to do.
        """
        options = LoadOptions(
            task=task,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            strict=strict,
            quantization=quantization,
            parallelism=parallelism,
            plan=plan,
            num_labels=num_labels,
        )
        options = _with_aliases(options, others, AutoModelForTPU.from_pretrained)
        if plan is not None and (options.parallelism is not None or quantization is not None):
            raise InvalidInputError(
                "plan cannot be combined with parallelism or quantization.", "The plan sets both.", "Pass only plan."
            )
        from hfax.stored.records import is_recordable, is_useful

        may_be_stored = backend == "jax" and is_useful()
        chosen = None if may_be_stored else _choose(backend, options)
        from hfax.load.source import resolve_checkpoint

        source = resolve_checkpoint(
            pretrained_model_name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_code=trust_remote_code,
        )
        with phase("load", str(pretrained_model_name_or_path)):
            if (
                chosen is None
                and is_recordable(source, options)
                and (stored := _open_stored(source, options)) is not None
            ):
                return stored
            chosen = chosen or _choose(backend, options)
            model = chosen.load(source, options)
        if chosen.name == "jax":
            from hfax.stored.recording import store_start

            store_start(source, options, model)
        return model

    @overload
    @staticmethod
    def from_config(config: PretrainedConfig, *, backend: Literal["jax"] = "jax", **options: Any) -> JaxModel: ...

    @overload
    @staticmethod
    def from_config(config: PretrainedConfig, *, backend: Literal["torch_xla"], **options: Any) -> TorchXlaModel: ...

    @overload
    @staticmethod
    def from_config(config: PretrainedConfig, *, backend: str, **options: Any) -> Any: ...

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
        **others: Any,
    ) -> JaxModel | TorchXlaModel:
        """Create a model with random weights, identical to transformers' after `torch.manual_seed(seed)`.

        Args:
            config: a transformers configuration.
            backend: "jax", "torch_xla", the name of a third-party backend, or "auto" for the first available one.
            task: a pipeline task name that selects the class; default: `config.architectures`, else a language model.
            dtype: "auto" for the config's dtype (float32 if it has none).
            seed: seed of torch's generator; its state is restored afterwards.
            attn_implementation: as in `from_pretrained`.
            quantization: as in `from_pretrained`.
            parallelism: as in `from_pretrained`.
            **others: as in `from_pretrained`.

        Raises:
            UnsupportedModelError: there is no class for this config, or the model cannot be built.
        """
        options = LoadOptions(
            task=task,
            dtype=dtype,
            attn_implementation=attn_implementation,
            quantization=quantization,
            parallelism=parallelism,
        )
        options = _with_aliases(options, others, AutoModelForTPU.from_config)
        return _choose(backend, options).from_config(config, options, seed)


def _open_stored(source: CheckpointSource, options: LoadOptions) -> Any:
    """The model of a checkpoint that starts from its record; None if there is none. Weights are read while JAX is imported."""
    from hfax.stored.reader import WeightReader

    reader = WeightReader(source)
    if not reader.is_known:
        return None
    reader.start()
    try:
        from hfax.stored.model import open_stored

        return open_stored(source, options, reader)
    finally:
        reader.close()


def _choose(name: str, options: LoadOptions) -> Backend:
    backend = choose_backend(name)
    require_capabilities(backend, options)
    return backend


def _with_aliases(options: LoadOptions, others: dict[str, Any], function: Callable[..., Any]) -> LoadOptions:
    """The options with transformers' aliases applied; raises for any other name in `others`."""
    others, changed = dict(others), dict[str, Any]()
    if (given := others.pop("torch_dtype", None)) is not None:
        if options.dtype not in ("auto", given):
            raise InvalidInputError(
                f"torch_dtype={given!r} conflicts with dtype={options.dtype!r}.",
                "torch_dtype is a deprecated alias of dtype.",
                "Pass only dtype.",
            )
        changed["dtype"] = given
    if (device_map := others.pop("device_map", None)) is not None:
        if device_map != "auto" or options.parallelism not in (None, "auto"):
            raise UnsupportedOptionError(
                f"device_map={device_map!r} is not supported.",
                "Weights are sharded over the devices of a mesh, not placed layer by layer; JAX_PLATFORMS selects the platform.",
                'Pass device_map="auto", or parallelism with sizes by axis such as {"tensor": 4}.',
            )
        changed["parallelism"] = "auto"
    for name in ("low_cpu_mem_usage", "use_safetensors"):
        if (value := others.pop(name, None)) not in (None, True):
            raise UnsupportedOptionError(
                f"{name}={value!r} is not supported.",
                "Weights are read one at a time, from safetensors if present.",
                "Remove it.",
            )
    if options.attn_implementation == "sdpa":  # every backend's own stands for torch's
        changed["attn_implementation"] = None
    reject_arguments(function.__name__, others, keywords(function), like="from_pretrained")
    return options.changed(**changed)
