"""The structure of a model without its weights: a transformers module whose parameters are on torch's meta device.

Turns a config into a module ready to be traced, the list of the names its weights go by, and the values of the buffers that no
checkpoint holds (rotary frequencies, causal masks). It does not read checkpoints and knows nothing of jax.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hfax.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError

TASK_TO_AUTO_CLASS: dict[str, tuple[str, ...]] = {
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "summarization": ("AutoModelForSeq2SeqLM",),
    "translation": ("AutoModelForSeq2SeqLM",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "sentiment-analysis": ("AutoModelForSequenceClassification",),
    "zero-shot-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "ner": ("AutoModelForTokenClassification",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "feature-extraction": ("AutoModel",),
    "image-feature-extraction": ("AutoModel",),
    "image-classification": ("AutoModelForImageClassification",),
    "zero-shot-image-classification": ("AutoModelForZeroShotImageClassification",),
    "object-detection": ("AutoModelForObjectDetection",),
    "zero-shot-object-detection": ("AutoModelForZeroShotObjectDetection",),
    "image-segmentation": (
        "AutoModelForImageSegmentation",
        "AutoModelForSemanticSegmentation",
        "AutoModelForInstanceSegmentation",
        "AutoModelForUniversalSegmentation",
    ),
    "depth-estimation": ("AutoModelForDepthEstimation",),
    "video-classification": ("AutoModelForVideoClassification",),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "image-to-text": ("AutoModelForImageTextToText",),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC"),
    "audio-classification": ("AutoModelForAudioClassification",),
}
"""transformers' pipeline task names, and the auto classes that each stands for."""


FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A module without weights.

    Args:
        module: in eval mode; every parameter is on the meta device, every buffer holds its real values on the CPU.
        dtype: that its floating-point weights are to have.
        shapes: name to meta tensor, for everything a checkpoint is expected to hold, tied names left out.
        tied: alias to the name in `shapes` whose array it shares.
        buffers: name to value, for the buffers that a checkpoint does not hold.
        derived: what was computed from the module and is not to be computed twice, by name.
    """

    module: PreTrainedModel
    dtype: torch.dtype
    shapes: dict[str, torch.Tensor]
    tied: dict[str, str]
    buffers: dict[str, torch.Tensor]
    derived: dict[str, Any] = dataclasses.field(default_factory=dict)


def resolve_model_class(
    config: PretrainedConfig, task: str | None, *, code_folder: str | None
) -> type[PreTrainedModel]:
    """The transformers class for a config: its `architectures` entry, or the auto class that `task` names.

    Args:
        config: the model's configuration.
        task: a pipeline task name of `TASK_TO_AUTO_CLASS`, or None for the checkpoint's own architecture.
        code_folder: where to import custom modelling code from; None if such code is not trusted.

    Raises:
        UnsupportedOptionError: `task` is not a pipeline name, or this model type has no class for it.
        UnsupportedModelError: the config names no architecture that transformers has, and no trusted code provides it.
    """
    if task is not None and task not in TASK_TO_AUTO_CLASS:
        raise UnsupportedOptionError(
            f"Unknown task {task!r}.",
            "task= takes a pipeline name of transformers.",
            f"Use one of: {', '.join(sorted(TASK_TO_AUTO_CLASS))}; or leave it out for the checkpoint's own class.",
        )
    auto_names = TASK_TO_AUTO_CLASS[task] if task else ()
    architectures = getattr(config, "architectures", None) or []
    if (
        code_folder is not None
        and (remote := _remote_class(config, auto_names, architectures, code_folder)) is not None
    ):
        return remote
    if auto_names:
        mappings = [getattr(transformers, name)._model_mapping for name in auto_names]
        found = [c for m in mappings if type(config) in m for c in _as_tuple(m[type(config)])]
        if not found:
            raise UnsupportedOptionError(
                f"task={task!r} does not fit a {config.model_type!r} model.",
                f"transformers has no {' or '.join(auto_names)} class for {type(config).__name__}.",
                f"Leave task out to use {', '.join(architectures) or 'the default class'}.",
            )
        return next((c for c in found if c.__name__ in architectures), found[0])
    for name in architectures:
        if (cls := getattr(transformers, name, None)) is not None:
            return cls
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if not architectures and type(config) in mapping:
            return _as_tuple(mapping[type(config)])[0]
    raise UnsupportedModelError(
        f"No model class for architectures {architectures} (model type {config.model_type!r}).",
        f"transformers {transformers.__version__} has no class of that name, and custom code was not trusted or is not there.",
        "Update transformers, or, if the repository carries its own modelling code and you trust it, pass "
        "trust_remote_code=True.",
    )


def _as_tuple(classes: Any) -> tuple[Any, ...]:
    return classes if isinstance(classes, tuple) else (classes,)


def _remote_class(
    config: PretrainedConfig, auto_names: tuple[str, ...], architectures: list[str], code_folder: str
) -> type[PreTrainedModel] | None:
    """The class that the checkpoint's own code provides (`auto_map`), if it does."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map = getattr(config, "auto_map", None) or {}
    wanted = auto_names or [n for n in auto_map if n.startswith("AutoModel")]
    references = [auto_map[n] for n in wanted if n in auto_map]
    if not references:
        return None
    own = [r for r in references if r.rpartition(".")[2] in architectures]
    return get_class_from_dynamic_module((own or references)[0], code_folder)


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, stored: torch.dtype | None) -> torch.dtype:
    """The dtype asked for; for "auto" the config's, else that of the stored weights, else float32.

    Raises:
        InvalidInputError: it is none that every XLA device has.
    """
    if dtype == "auto":
        chosen: Any = getattr(config, "dtype", None) or stored or torch.float32
    else:
        chosen = dtype
    name = str(chosen).removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        raise InvalidInputError(
            f"dtype={dtype!r} is not available.",
            "Models run in one of the floating-point types that every XLA device has.",
            f"Use 'auto' or one of {', '.join(FLOAT_DTYPES)}.",
        )
    return getattr(torch, name)


def build_skeleton(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    attention: str | Mapping[str, str],
    experts: str,
) -> Skeleton:
    """Build `model_class(config)` without allocating its weights.

    Args:
        model_class: the transformers class.
        config: copied, not changed.
        dtype: of the floating-point parameters.
        attention: the name of the attention function to use; or what stands for each of those that transformers chooses, which
            differ between the parts of some models, where these go through its interface.
        experts: the name of the experts function, likewise.

    Raises:
        UnsupportedModelError: the class cannot be built from this config.
    """
    config = copy.deepcopy(config)
    try:
        with _parameters_on_meta(), no_init_weights():
            module = model_class._from_config(
                config,
                dtype=dtype,
                attn_implementation=attention if isinstance(attention, str) else None,
                experts_implementation=experts,
            )
            if not isinstance(attention, str):
                _rename_attention(module, attention)
    except Exception as error:
        raise UnsupportedModelError(
            f"{model_class.__name__} could not be built from its config.",
            f"{type(error).__name__}: {error}",
            "Check config.json against the version of transformers (`hfax env` shows it); custom code may need another one.",
        ) from error
    module.eval()
    module.requires_grad_(False)
    tied = _tied_names(module)
    persistent = module.state_dict(keep_vars=True)
    held = {name: t for name, t in persistent.items() if name not in tied and isinstance(t, torch.Tensor)}
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in persistent}
    return Skeleton(module=module, dtype=dtype, shapes=held, tied=tied, buffers=buffers)


def with_dtype(skeleton: Skeleton, dtype: torch.dtype) -> Skeleton:
    """The same module for weights of another floating-point dtype; modules that transformers keeps in float32 stay so.

    The skeleton that is given must not be used any more: its module is changed.
    """
    from transformers.core_model_loading import build_glob_alternation

    module = skeleton.module
    plan = module._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    shapes = dict(skeleton.shapes)
    for name, tensor in skeleton.shapes.items():
        if tensor.dtype == skeleton.dtype and (kept is None or not kept.search(name)):
            tensor.data = tensor.data.to(dtype)
            shapes[name] = tensor
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.config.dtype = dtype
    return dataclasses.replace(skeleton, dtype=dtype, shapes=shapes, derived={})


def _rename_attention(module: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Have each part that goes through transformers' attention interface use what stands for the function chosen for it.

    A class outside the interface looks its own names up, so it keeps transformers' names.
    """
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part._supports_attention_backend:
            config = part.config
            chosen = config._attn_implementation
            config._attn_implementation_internal = names.get(chosen or "", chosen)


def _tied_names(module: PreTrainedModel) -> dict[str, str]:
    """Alias to canonical name, for weights that transformers ties and for modules that are shared objects."""
    tied = dict(getattr(module, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in tied and (canonical := first.setdefault(id(parameter), name)) != name:
            tied[name] = canonical
    for alias in tied:
        while tied[alias] in tied:
            tied[alias] = tied[tied[alias]]
    return tied


_local = threading.local()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send every parameter that this thread registers to the meta device; buffers keep their real values.

    torch's own `torch.device("meta")` context would lose the buffers too, and with them every table a model computes in its
    constructor.
    """
    original = torch.nn.Module.register_parameter

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and getattr(_local, "depth", 0) and param.device.type != "meta":
            flags = dict(param.__dict__)
            meta = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            for flag, value in flags.items():
                setattr(meta, flag, value)
            self._parameters[name] = meta

    with _install_lock:
        _installed.append(original)
        torch.nn.Module.register_parameter = register_parameter
        _local.depth = getattr(_local, "depth", 0) + 1
        try:
            yield
        finally:
            _local.depth -= 1
            torch.nn.Module.register_parameter = _installed.pop()


_install_lock = threading.RLock()
_installed: list[Any] = []
