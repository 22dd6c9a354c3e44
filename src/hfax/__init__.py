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
    from hfax.backends.jax.model import JaxModel
    from hfax.backends.torch_xla.model import TorchXlaModel
    from hfax.doctor import Diagnosis, diagnose
    from hfax.engine.config import EngineConfig
    from hfax.engine.engine import Engine
    from hfax.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
    from hfax.engine.request import PreparedPrompt
    from hfax.engine.sampling_params import SamplingParams, StructuredOutputsParams
    from hfax.engine.sequence import FinishReason, TokenLogprob
    from hfax.errors import (
        BackendNotAvailableError,
        CheckpointAccessError,
        CheckpointCorruptError,
        CheckpointNotFoundError,
        EngineBusyError,
        EngineDeadError,
        HfaxError,
        InvalidInputError,
        OutOfMemoryError,
        UnsupportedAttributeError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from hfax.evaluation.verification import Verification, verify
    from hfax.exporting.bundle import export
    from hfax.exporting.stablehlo import export_stablehlo
    from hfax.flax_nnx import to_nnx
    from hfax.generation.device_processor import device_processor
    from hfax.lora.config import LoraConfig
    from hfax.patches.patch import ForwardPatch, FunctionPatch, InputPatch, OpPatch
    from hfax.patches.registry import register_patch
    from hfax.pipelines import pipeline
    from hfax.programs.bundle import Bundle
    from hfax.quantization.checkpoint import QuantizationReport, quantize
    from hfax.sharding.partition import ShardingPlan
    from hfax.synthetic.shrink import shrink_config
    from hfax.tracing.pytrees import register_pytrees
    from hfax.train.arguments import TrainingArguments
    from hfax.train.grpo import GRPOLoss
    from hfax.train.grpo_trainer import GRPOTrainer
    from hfax.train.rollouts import RolloutConfig
    from hfax.train.step import TrainState, TrainStep, make_train_step
    from hfax.train.streaming import StreamingDataset
    from hfax.train.trainer import Trainer

__version__ = "0.1.0"
"""The one place where the version is written; the build reads it here."""

_HOMES = {
    "AutoModelForTPU": "hfax.auto",
    "BackendNotAvailableError": "hfax.errors",
    "Bundle": "hfax.programs.bundle",
    "CheckpointAccessError": "hfax.errors",
    "CheckpointCorruptError": "hfax.errors",
    "CheckpointNotFoundError": "hfax.errors",
    "CompletionOutput": "hfax.engine.outputs",
    "Diagnosis": "hfax.doctor",
    "Engine": "hfax.engine.engine",
    "EngineBusyError": "hfax.errors",
    "EngineConfig": "hfax.engine.config",
    "EngineDeadError": "hfax.errors",
    "FinishReason": "hfax.engine.sequence",
    "ForwardPatch": "hfax.patches.patch",
    "FunctionPatch": "hfax.patches.patch",
    "GRPOLoss": "hfax.train.grpo",
    "GRPOTrainer": "hfax.train.grpo_trainer",
    "HfaxError": "hfax.errors",
    "InputPatch": "hfax.patches.patch",
    "InvalidInputError": "hfax.errors",
    "JaxModel": "hfax.backends.jax.model",
    "LoraConfig": "hfax.lora.config",
    "OpPatch": "hfax.patches.patch",
    "OutOfMemoryError": "hfax.errors",
    "OutputDelta": "hfax.engine.outputs",
    "PreparedPrompt": "hfax.engine.request",
    "QuantizationReport": "hfax.quantization.checkpoint",
    "RequestOutput": "hfax.engine.outputs",
    "RolloutConfig": "hfax.train.rollouts",
    "SamplingParams": "hfax.engine.sampling_params",
    "ShardingPlan": "hfax.sharding.partition",
    "StreamingDataset": "hfax.train.streaming",
    "StructuredOutputsParams": "hfax.engine.sampling_params",
    "TokenLogprob": "hfax.engine.sequence",
    "TorchXlaModel": "hfax.backends.torch_xla.model",
    "TrainState": "hfax.train.step",
    "TrainStep": "hfax.train.step",
    "Trainer": "hfax.train.trainer",
    "TrainingArguments": "hfax.train.arguments",
    "UnsupportedAttributeError": "hfax.errors",
    "UnsupportedModelError": "hfax.errors",
    "UnsupportedOptionError": "hfax.errors",
    "Verification": "hfax.evaluation.verification",
    "device_processor": "hfax.generation.device_processor",
    "diagnose": "hfax.doctor",
    "export": "hfax.exporting.bundle",
    "export_stablehlo": "hfax.exporting.stablehlo",
    "make_train_step": "hfax.train.step",
    "pipeline": "hfax.pipelines",
    "quantize": "hfax.quantization.checkpoint",
    "register_patch": "hfax.patches.registry",
    "register_pytrees": "hfax.tracing.pytrees",
    "shrink_config": "hfax.synthetic.shrink",
    "to_nnx": "hfax.flax_nnx",
    "verify": "hfax.evaluation.verification",
}

__all__ = [
    "AutoModelForTPU",
    "BackendNotAvailableError",
    "Bundle",
    "CheckpointAccessError",
    "CheckpointCorruptError",
    "CheckpointNotFoundError",
    "CompletionOutput",
    "Diagnosis",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "ForwardPatch",
    "FunctionPatch",
    "GRPOLoss",
    "GRPOTrainer",
    "HfaxError",
    "InputPatch",
    "InvalidInputError",
    "JaxModel",
    "LoraConfig",
    "OpPatch",
    "OutOfMemoryError",
    "OutputDelta",
    "PreparedPrompt",
    "QuantizationReport",
    "RequestOutput",
    "RolloutConfig",
    "SamplingParams",
    "ShardingPlan",
    "StreamingDataset",
    "StructuredOutputsParams",
    "TokenLogprob",
    "TorchXlaModel",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainingArguments",
    "UnsupportedAttributeError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "Verification",
    "__version__",
    "device_processor",
    "diagnose",
    "export",
    "export_stablehlo",
    "make_train_step",
    "pipeline",
    "quantize",
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
