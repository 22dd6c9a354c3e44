"""hfax: any Hugging Face transformers model on TPUs, GPUs and CPUs, through JAX and XLA.

    from hfax import AutoModelForTPU
    model = AutoModelForTPU.from_pretrained("demo")
    model.generate([[1, 2, 3]], max_new_tokens=20)

Importing this package imports neither jax nor torch; names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfax.auto import AutoModelForTPU
    from hfax.doctor import inspect
    from hfax.engine.engine import Engine, EngineConfig
    from hfax.engine.sampling_params import SamplingParams
    from hfax.errors import (
        BackendNotAvailableError,
        CheckpointAccessError,
        CheckpointCorruptError,
        CheckpointNotFoundError,
        HfaxError,
        InvalidInputError,
        OutOfMemoryError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from hfax.evaluation.verification import verify
    from hfax.exporting.bundle import export
    from hfax.exporting.stablehlo import export_stablehlo
    from hfax.flax_nnx import to_nnx
    from hfax.lora.config import LoraConfig
    from hfax.patches.registry import register_patch
    from hfax.pipelines import pipeline
    from hfax.synthetic.shrink import shrink_config
    from hfax.tracing.pytrees import register_pytrees
    from hfax.train.arguments import TrainingArguments
    from hfax.train.step import make_train_step
    from hfax.train.trainer import Trainer

__version__ = "0.1.0"
"""The one place where the version is written; the build reads it here."""

_HOMES = {
    "AutoModelForTPU": "hfax.auto",
    "BackendNotAvailableError": "hfax.errors",
    "CheckpointAccessError": "hfax.errors",
    "CheckpointCorruptError": "hfax.errors",
    "CheckpointNotFoundError": "hfax.errors",
    "Engine": "hfax.engine.engine",
    "EngineConfig": "hfax.engine.engine",
    "HfaxError": "hfax.errors",
    "InvalidInputError": "hfax.errors",
    "LoraConfig": "hfax.lora.config",
    "OutOfMemoryError": "hfax.errors",
    "SamplingParams": "hfax.engine.sampling_params",
    "Trainer": "hfax.train.trainer",
    "TrainingArguments": "hfax.train.arguments",
    "UnsupportedModelError": "hfax.errors",
    "UnsupportedOptionError": "hfax.errors",
    "export": "hfax.exporting.bundle",
    "export_stablehlo": "hfax.exporting.stablehlo",
    "inspect": "hfax.doctor",
    "make_train_step": "hfax.train.step",
    "pipeline": "hfax.pipelines",
    "register_patch": "hfax.patches.registry",
    "register_pytrees": "hfax.tracing.pytrees",
    "shrink_config": "hfax.synthetic.shrink",
    "to_nnx": "hfax.flax_nnx",
    "verify": "hfax.evaluation.verification",
}

__all__ = [
    "AutoModelForTPU",
    "BackendNotAvailableError",
    "CheckpointAccessError",
    "CheckpointCorruptError",
    "CheckpointNotFoundError",
    "Engine",
    "EngineConfig",
    "HfaxError",
    "InvalidInputError",
    "LoraConfig",
    "OutOfMemoryError",
    "SamplingParams",
    "Trainer",
    "TrainingArguments",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "__version__",
    "export",
    "export_stablehlo",
    "inspect",
    "make_train_step",
    "pipeline",
    "register_patch",
    "register_pytrees",
    "shrink_config",
    "to_nnx",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
