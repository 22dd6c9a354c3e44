"""The backend "torch_xla": the model's own torch module, on a device of PyTorch/XLA."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hfax.backends.protocol import LoadOptions
from hfax.backends.torch_xla import runtime
from hfax.errors import BackendNotAvailableError, UnsupportedModelError, UnsupportedOptionError
from hfax.load.config import read_config, read_generation_config
from hfax.load.formats import find_weights
from hfax.load.skeleton import Skeleton, build_skeleton, resolve_dtype, resolve_model_class
from hfax.load.store import open_store

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.backends.torch_xla.model import TorchXlaModel
    from hfax.backends.torch_xla.sharding import Spread
    from hfax.load.source import CheckpointSource


class TorchXlaBackend:
    """The torch_xla implementation of `hfax.backends.protocol.Backend`."""

    name = "torch_xla"
    capabilities: frozenset[str] = frozenset({"parallelism"})

    def problem(self) -> BackendNotAvailableError | None:
        """Why the backend is not available; None if it is."""
        try:
            runtime.require()
        except BackendNotAvailableError as error:
            return error
        return None

    def devices(self) -> list[str]:
        """A description of each device."""
        return [f"{runtime.kind()}: {runtime.device()}"]

    def load(self, source: CheckpointSource, options: LoadOptions) -> TorchXlaModel:
        """A model with the weights of a checkpoint."""
        from hfax.backends.torch_xla.weights import load_weights

        if source.format == "orbax":
            raise UnsupportedOptionError(
                f"{source.name} is an orbax checkpoint.",
                "The backend torch_xla reads safetensors and pytorch_model.bin.",
                'Save the model with format="safetensors", or use backend="jax".',
            )
        config = read_config(source, trust_remote_code=options.trust_remote_code)
        store = find_weights(config, open_store(source))
        skeleton = _open_skeleton(config, options, source, store.float_dtype)
        spread = _spread(skeleton, options)
        device = runtime.device()
        load_weights(skeleton, store, device, strict=options.strict, placed=_marker(spread))
        return _finish(skeleton, device, spread, source.folder, str(source.name), options.task)

    def from_config(self, config: PretrainedConfig, options: LoadOptions, seed: int) -> TorchXlaModel:
        """A model with the same random weights as transformers."""
        from hfax.backends.torch_xla.weights import put_in

        config = copy.deepcopy(config)
        skeleton = _open_skeleton(config, options)
        spread = _spread(skeleton, options)
        device = runtime.device()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = type(skeleton.module)._from_config(copy.deepcopy(config), dtype=skeleton.dtype)
        held = drawn.state_dict(keep_vars=True)
        put_in(skeleton, {name: held[name].detach().to(device) for name in skeleton.shapes}, skeleton.tied, device)
        if spread is not None:
            spread.mark_weights(skeleton)
        return _finish(skeleton, device, spread, None, type(config).__name__, options.task)


def _open_skeleton(
    config: PretrainedConfig,
    options: LoadOptions,
    source: CheckpointSource | None = None,
    stored_dtype: torch.dtype | None = None,
) -> Skeleton:
    """Like `hfax.tracing.abstract.open_skeleton`, with torch_xla's attention and experts."""
    from hfax.backends.torch_xla.kernels import ADDITIVE_NAME, NAME, register_interfaces

    if options.attn_implementation not in (None, "eager"):
        raise UnsupportedOptionError(
            f"attn_implementation={options.attn_implementation!r} is not supported.",
            "Kernels written for other torch devices do not run on XLA.",
            'Remove it, or pass "eager" for transformers\' reference implementation.',
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "The checkpoint was quantized by hfax.",
            "Its packed weights do not run on torch_xla.",
            'Use the unquantized checkpoint, or backend="jax".',
        )
    register_interfaces()
    attention: Any = options.attn_implementation or {"sdpa": NAME, "eager": ADDITIVE_NAME}
    model_class = resolve_model_class(config, options.task, code_folder=options.code_folder(source))
    dtype = resolve_dtype(options.dtype, config, stored_dtype)
    return build_skeleton(model_class, config, dtype, attention=attention, experts=NAME)


def _spread(skeleton: Skeleton, options: LoadOptions) -> Spread | None:
    if options.parallelism is None:
        return None
    from hfax.backends.torch_xla.sharding import Spread

    return Spread(skeleton, options.parallelism)


def _marker(spread: Spread | None) -> Any:
    return None if spread is None else spread.mark


def _finish(
    skeleton: Skeleton, device: torch.device, spread: Spread | None, folder: Any, name: str, task: str | None
) -> TorchXlaModel:
    from hfax.backends.torch_xla.model import TorchXlaModel

    # transformers' pipelines check the class name
    cls = type(type(skeleton.module).__name__, (TorchXlaModel,), {"__doc__": TorchXlaModel.__doc__})
    generation_config = read_generation_config(folder, skeleton.module)
    return cls(
        skeleton, device, spread, generation_config=generation_config, name_or_path=name, folder=folder, task=task
    )


BACKEND = TorchXlaBackend()
