"""`AutoModelForTPU`: a name becomes files on this machine, and a backend makes a model of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from hfax.backends.choice import choose_backend, require_capabilities
from hfax.backends.protocol import LoadOptions
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.known_words import reject_arguments
from hfax.phases import phase

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.backends.torch_xla.model import TorchXlaModel
    from hfax.parallelism import Parallelism


class AutoModelForTPU:
    """Any transformers model on XLA. Use `from_pretrained` or `from_config`; the class has no instances."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the class only holds constructors."""
        raise InvalidInputError(
            "AutoModelForTPU cannot be instantiated.",
            "It only chooses the model's class.",
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
        **others: Any,
    ) -> JaxModel | TorchXlaModel:
        """Load a checkpoint from a local folder or the Hugging Face Hub.

        Args:
            pretrained_model_name_or_path: a folder, a Hub id such as "Qwen/Qwen3-0.6B", or "demo" for the model that hfax carries.
            backend: "jax", "torch_xla", another package's, or "auto": the first that works here.
            task: a pipeline task name, to choose another class than the checkpoint's own, for instance
                "text-classification".
            dtype: "auto" for the checkpoint's own, or "float32", "bfloat16", "float16", or a torch dtype.
            revision: branch, tag or commit on the Hub.
            token: Hub token; None uses the one of `hf auth login`.
            cache_dir: Hub cache folder; None for huggingface_hub's own.
            local_files_only: never use the network.
            trust_remote_code: run modelling code that the checkpoint carries.
            attn_implementation: "eager" for transformers' own eager attention; None or "sdpa" for hfax's, which the platform and
                the shapes select.
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
            **others: names of transformers that mean the same here: `torch_dtype` (`dtype`), `device_map="auto"`
                (`parallelism="auto"`), `low_cpu_mem_usage=True` and `use_safetensors=True` (always so). Any other is refused.

        Returns:
            A model whose weights are where they will be used; nothing is compiled yet. From a folder that `hfax.export` wrote, and
            without `parallelism`: a model that starts with the programs in it, over the devices that they were made for.

        Raises:
            HfaxError: one of its subclasses, which says what to do.
        """
        aliases = _read_aliases(others, dtype=dtype, parallelism=parallelism)
        dtype, parallelism = aliases["dtype"], aliases["parallelism"]
        options = LoadOptions(
            task=task,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            strict=strict,
            quantization=quantization,
            parallelism=parallelism,
            plan=plan,
        )
        if plan is not None and (parallelism is not None or quantization is not None):
            raise InvalidInputError(
                "plan= was given beside parallelism= or quantization=.", "The plan says both.", "Leave the others out."
            )
        chosen = choose_backend(backend)
        require_capabilities(chosen, options)
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
            return chosen.load(source, options)

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
        """A model with random weights: the same that transformers draws after `torch.manual_seed(seed)`.

        Args:
            config: a transformers configuration.
            backend: "jax", "torch_xla", another package's, or "auto": the first that works here.
            task: a pipeline task name, to choose the class; else `config.architectures`, else a language model.
            dtype: "auto" for the config's dtype (float32 if it has none).
            seed: of torch's generator, which is put back afterwards.
            attn_implementation: as in `from_pretrained`.
            quantization: as in `from_pretrained`.
            parallelism: as in `from_pretrained`.
            **others: likewise.

        Raises:
            UnsupportedModelError: no class for this config, or it cannot be built.
        """
        aliases = _read_aliases(others, dtype=dtype, parallelism=parallelism)
        dtype, parallelism = aliases["dtype"], aliases["parallelism"]
        options = LoadOptions(
            task=task,
            dtype=dtype,
            attn_implementation=attn_implementation,
            quantization=quantization,
            parallelism=parallelism,
        )
        chosen = choose_backend(backend)
        require_capabilities(chosen, options)
        return chosen.from_config(config, options, seed)


_ARGUMENTS = (
    *("backend", "task", "dtype", "revision", "token", "cache_dir", "local_files_only", "trust_remote_code"),
    *("attn_implementation", "strict", "quantization", "parallelism", "plan"),
)


def _read_aliases(others: dict[str, Any], *, dtype: Any, parallelism: Any) -> dict[str, Any]:
    """`dtype` and `parallelism` after the names that transformers has for them; raises for every other name."""
    others = dict(others)
    if (given := others.pop("torch_dtype", None)) is not None:
        if dtype not in ("auto", given):
            raise InvalidInputError(
                f"torch_dtype={given!r} was given beside dtype={dtype!r}.",
                "torch_dtype is an older name of dtype.",
                "Leave torch_dtype out.",
            )
        dtype = given
    if (device_map := others.pop("device_map", None)) is not None:
        if device_map != "auto" or parallelism not in (None, "auto"):
            raise UnsupportedOptionError(
                f"device_map={device_map!r} is not available.",
                "Weights are split over the devices of a mesh, not layer by layer; JAX_PLATFORMS chooses the platform.",
                'Pass device_map="auto", or parallelism with sizes by axis such as {"tensor": 4}.',
            )
        parallelism = "auto"
    for name in ("low_cpu_mem_usage", "use_safetensors"):
        if (value := others.pop(name, None)) not in (None, True):
            raise UnsupportedOptionError(
                f"{name}={value!r} is not available.",
                "Weights are read one at a time, from safetensors first.",
                "Leave it out.",
            )
    reject_arguments("from_pretrained", others, _ARGUMENTS)
    return {"dtype": dtype, "parallelism": parallelism}
