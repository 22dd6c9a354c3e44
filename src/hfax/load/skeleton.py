"""A model's structure without its weights: a transformers module with parameters on torch's meta device.

Turns a config into a module ready for tracing, its weight names, and the values of non-persistent buffers (rotary frequencies,
causal masks). It reads no checkpoints and does not use jax.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import sys
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
"""transformers pipeline task names and their auto classes."""


FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A module without weights.

    Args:
        module: in eval mode; parameters are on the meta device, buffers have real values on the CPU.
        dtype: target dtype of floating-point weights.
        shapes: name to meta tensor, for every tensor expected in a checkpoint, without tied aliases.
        tied: alias to the name in `shapes` that it shares an array with.
        buffers: name to value, for buffers that checkpoints do not store.
        untrained: names in `shapes` that torch does not train: buffers that checkpoints store, and parameters that the class
            freezes (tables of sinusoids).
        derived: cache of values computed from the module, by name.
        lock: held while a trace uses the module.
    """

    module: PreTrainedModel
    dtype: torch.dtype
    shapes: dict[str, torch.Tensor]
    tied: dict[str, str]
    buffers: dict[str, torch.Tensor]
    untrained: frozenset[str] = frozenset()
    derived: dict[str, Any] = dataclasses.field(default_factory=dict)
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)


def resolve_model_class(
    config: PretrainedConfig, task: str | None, *, code_folder: str | None
) -> type[PreTrainedModel]:
    """The transformers class for a config: its `architectures` entry, or the auto class that `task` names.

    Args:
        config: the model's configuration.
        task: a key of `TASK_TO_AUTO_CLASS`, or None for the checkpoint's own architecture.
        code_folder: folder to import custom modelling code from; None if it is not trusted.

    Raises:
        UnsupportedOptionError: `task` is unknown, or this model type has no class for it.
        UnsupportedModelError: neither transformers nor trusted code has the config's architecture.
    """
    if task is not None and task not in TASK_TO_AUTO_CLASS:
        raise UnsupportedOptionError(
            f"Unknown task {task!r}.",
            "task= takes a transformers pipeline task.",
            f"Use one of: {', '.join(sorted(TASK_TO_AUTO_CLASS))}; or omit task for the checkpoint's own class.",
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
                f"task={task!r} is not available for a {config.model_type!r} model.",
                f"transformers has no {' or '.join(auto_names)} class for {type(config).__name__}.",
                f"Omit task to use {', '.join(architectures) or 'the default class'}.",
            )
        return next((c for c in found if c.__name__ in architectures), found[0])
    for name in architectures:
        if (cls := getattr(transformers, name, None) or _registered_class(config, name)) is not None:
            return cls
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if not architectures and type(config) in mapping:
            return _as_tuple(mapping[type(config)])[0]
    raise UnsupportedModelError(
        f"No model class for architectures {architectures} (model type {config.model_type!r}).",
        f"transformers {transformers.__version__} has no such class, and custom code is missing or not trusted.",
        "Update transformers; if you trust the repository's own modelling code, pass trust_remote_code=True; a class of your own: "
        "import its module, which must call AutoConfig.register and AutoModelForCausalLM.register (or another AutoModel).",
    )


def _registered_class(config: PretrainedConfig, name: str) -> type[PreTrainedModel] | None:
    """The class of this name that `AutoModel….register` gave for the config's class."""
    for auto in ("AutoModel", *itertools.chain.from_iterable(TASK_TO_AUTO_CLASS.values())):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            for cls in _as_tuple(mapping[type(config)]):
                if cls.__name__ == name:
                    return cls
    return None


def _as_tuple(classes: Any) -> tuple[Any, ...]:
    return classes if isinstance(classes, tuple) else (classes,)


def _remote_class(
    config: PretrainedConfig, auto_names: tuple[str, ...], architectures: list[str], code_folder: str
) -> type[PreTrainedModel] | None:
    """The class provided by the checkpoint's own code (`auto_map`), if any."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map = getattr(config, "auto_map", None) or {}
    wanted = auto_names or [n for n in auto_map if n.startswith("AutoModel")]
    references = [auto_map[n] for n in wanted if n in auto_map]
    if not references:
        return None
    own = [r for r in references if r.rpartition(".")[2] in architectures]
    return get_class_from_dynamic_module((own or references)[0], code_folder)


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, stored: torch.dtype | None) -> torch.dtype:
    """The requested dtype; for "auto" the config's, else the stored weights', else float32.

    Raises:
        InvalidInputError: the dtype is not supported on every XLA device.
    """
    if dtype == "auto":
        chosen: Any = getattr(config, "dtype", None) or stored or torch.float32
    else:
        chosen = dtype
    name = str(chosen).removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        raise InvalidInputError(
            f"dtype={dtype!r} is not supported.",
            "Models run in a floating-point dtype that every XLA device supports.",
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
        config: copied, not modified.
        dtype: dtype of floating-point parameters.
        attention: the attention function to use; or a mapping from each function that transformers chooses (some models use
            several) to its replacement, applied to parts that use transformers' attention interface.
        experts: the experts function to use.

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
            "Check config.json against the transformers version (see `hfax env`); custom code may require another version.",
        ) from error
    module.eval()
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    module.requires_grad_(False)
    tied = _tied_names(module)
    trained |= {tied[name] for name in trained if name in tied}
    persistent = module.state_dict(keep_vars=True)
    held = {name: t for name, t in persistent.items() if name not in tied and isinstance(t, torch.Tensor)}
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in persistent}
    return Skeleton(
        module=module,
        dtype=dtype,
        shapes=held,
        tied=tied,
        buffers=buffers,
        untrained=frozenset(held.keys() - trained),
    )


def with_dtype(skeleton: Skeleton, dtype: torch.dtype) -> Skeleton:
    """The same module built for another floating-point dtype; `hfax.load.rules.dtype_rule` tells which weights differ from it.

    The skeleton that is given must not be used any more: its module is changed.
    """
    for tensor in skeleton.shapes.values():
        if tensor.dtype == skeleton.dtype:
            tensor.data = tensor.data.to(dtype)
    for part in skeleton.module.modules():
        if isinstance(part, PreTrainedModel):
            part.config.dtype = dtype
    return dataclasses.replace(skeleton, dtype=dtype, derived={})


def _rename_attention(module: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Replace the attention function of each part that uses transformers' attention interface.

    Classes outside the interface look up transformers' names themselves, so they keep them.
    """
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and _uses_interface(type(part)):
            config = part.config
            chosen = config._attn_implementation
            config._attn_implementation_internal = names.get(chosen or "", chosen)


def _uses_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class asks transformers' attention interface for a function, and takes any.

    Many that do have no `_supports_attention_backend`: their module imports the interface. Those that set it to False need what no
    other function has (Inkling 2's sinks, one for each token).
    """
    own = model_class.__mro__[: model_class.__mro__.index(PreTrainedModel)]
    told = next((vars(c)["_supports_attention_backend"] for c in own if "_supports_attention_backend" in vars(c)), None)
    if told is not None:
        return bool(told)
    return hasattr(sys.modules.get(model_class.__module__), "ALL_ATTENTION_FUNCTIONS")


def _tied_names(module: PreTrainedModel) -> dict[str, str]:
    """Alias to canonical name, for weights that transformers ties and for shared modules."""
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
    """Move every parameter this thread registers to the meta device; buffers keep their real values.

    torch's `torch.device("meta")` context would also lose the buffers, including tables computed in the constructor.
    """

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and getattr(_local, "depth", 0) and param.device.type != "meta":
            flags = dict(param.__dict__)
            meta = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            for flag, value in flags.items():
                setattr(meta, flag, value)
            self._parameters[name] = meta

    with _install_lock:
        original = torch.nn.Module.register_parameter
        torch.nn.Module.register_parameter = register_parameter
        _local.depth = getattr(_local, "depth", 0) + 1
        try:
            yield
        finally:
            _local.depth -= 1
            torch.nn.Module.register_parameter = original


_install_lock = threading.RLock()
