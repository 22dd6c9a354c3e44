"""`hfax.pipeline`: transformers pipelines for raw text, images and audio, running an hfax model.

transformers 5 removed some tasks that are still widely used; this package adds them back.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfax.errors import CheckpointNotFoundError, InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch
    from transformers import Pipeline

    from hfax.backends.jax.model import JaxModel

_PARTS = {
    "tokenizer": "AutoTokenizer",
    "feature_extractor": "AutoFeatureExtractor",
    "image_processor": "AutoImageProcessor",
    "video_processor": "AutoVideoProcessor",
    "processor": "AutoProcessor",
}
"""Preprocessors, and the transformers class that loads each."""
_PLACING = ("device", "device_map", "torch_dtype", "model_kwargs")


def pipeline(
    task: str,
    model: str | Path | JaxModel,
    *,
    backend: str = "jax",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    strict: bool = True,
    **options: Any,
) -> Pipeline:
    """A transformers pipeline whose model runs on XLA.

    Args:
        task: a transformers pipeline task, such as "text-generation", "text-classification", "token-classification",
            "fill-mask", "feature-extraction", "zero-shot-classification", "image-classification", "image-text-to-text" or
            "automatic-speech-recognition"; or one that transformers 5 no longer has: "question-answering", "summarization",
            "translation", "translation_xx_to_yy" with two language codes, and "text2text-generation".
        model: a folder, a Hub id or "demo", loaded for the task; or a loaded hfax model.
        backend: see `AutoModelForTPU.from_pretrained`. This and the next seven arguments apply only if the model is loaded here.
        dtype: weight dtype.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: Hub cache folder.
        local_files_only: never use the network.
        trust_remote_code: run the checkpoint's own code.
        strict: treat missing and unexpected tensors as errors.
        **options: transformers pipeline options: `tokenizer`, `processor`, `image_processor`, `feature_extractor` (objects or
            names; default: from the model's folder), `batch_size`, `top_k`, and other call defaults.

    Returns:
        transformers' pipeline object for the task. Its defaults are transformers', such as five beams for speech recognition. Texts
        of any length share programs where the model allows it (`JaxModel.pads_inputs`); otherwise, and for images, a program is
        compiled for each input shape.

    Raises:
        UnsupportedOptionError: an unknown task, or one that does not fit the model.
        CheckpointNotFoundError: the model's folder has no tokenizer or processor for the task.
        HfaxError: the model cannot be loaded.

    Examples:
        >>> write = hfax.pipeline("text-generation", "demo")
        >>> len(write("def add(a, b):", max_new_tokens=4))
        1
    """
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    if wrong := sorted(set(_PLACING) & set(options)):
        raise UnsupportedOptionError(
            f"pipeline() does not take {', '.join(wrong)}.",
            "hfax places the weights at load time, on the platform set by JAX_PLATFORMS.",
            "Omit it; use dtype to set the weight dtype.",
        )
    own = _own_pipelines()
    general = "translation" if _names_languages(task) else task
    if (pipeline_class := own.get(general)) is None:
        try:
            implementation = PIPELINE_REGISTRY.check_task(task)[1]["impl"]
            pipeline_class = pkgutil.resolve_name(implementation) if isinstance(implementation, str) else implementation
        except KeyError as error:
            known = sorted({*PIPELINE_REGISTRY.get_supported_tasks(), *own})
            raise UnsupportedOptionError(
                f"Unknown task {task!r}.",
                "pipeline() takes transformers task names.",
                f"Use one of: {', '.join(known)}.",
            ) from error
    if isinstance(model, (str, Path)):
        from hfax.auto import AutoModelForTPU
        from hfax.load.skeleton import TASK_TO_AUTO_CLASS

        loaded = AutoModelForTPU.from_pretrained(
            model,
            backend=backend,
            task=general if general in TASK_TO_AUTO_CLASS else None,
            dtype=dtype,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
            strict=strict,
        )
    else:
        loaded = _checked(model)
    parts = _parts(pipeline_class, loaded, options, trust_remote_code)
    try:
        if general in own:
            return pipeline_class(model=loaded, task=task, device="cpu", **parts, **options)
        return transformers.pipeline(  # pyright: ignore[reportCallIssue]
            task,  # pyright: ignore[reportArgumentType]
            model=loaded,  # type: ignore[arg-type]
            config=loaded.config,
            trust_remote_code=trust_remote_code,
            device="cpu",  # where torch's tensors are; the weights stay where they were loaded
            **parts,
            **options,
        )
    except (OSError, ValueError, RuntimeError, ImportError, TypeError) as error:
        raise UnsupportedOptionError(
            f"transformers could not make a {task!r} pipeline for {type(loaded).__name__}: {str(error).splitlines()[0]}",
            "The model does not fit the task, or the pipeline does not support an option.",
            "Use the task that the checkpoint was trained for, and options of that task.",
        ) from error


def _parts(pipeline_class: Any, model: JaxModel, options: dict[str, Any], trust_remote_code: bool) -> dict[str, Any]:
    """The tokenizer and processors that the task needs: passed objects, or loaded by name or from the model's folder."""
    import transformers

    found: dict[str, Any] = {}
    for name, loader in _PARTS.items():
        given, is_needed = options.pop(name, None), getattr(pipeline_class, f"_load_{name}", False)
        if given is not None and not isinstance(given, (str, Path)):
            found[name] = given
            continue
        source = given if given is not None else model.folder if is_needed is not False else None
        if source is None:
            continue
        try:
            found[name] = getattr(transformers, loader).from_pretrained(
                str(source), trust_remote_code=trust_remote_code
            )
            if name == "tokenizer":
                _require_vocabulary(found[name], Path(source))
        except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
            if is_needed or given is not None:
                raise CheckpointNotFoundError(
                    f"{source} has no {name.replace('_', ' ')} that transformers can load.",
                    str(error).splitlines()[0],
                    f"Pass {name}=…: a checkpoint that has one, or the object itself.",
                ) from error
    return found


def _require_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Raise if a folder has no tokenizer files: transformers would create an empty tokenizer."""
    names = {*tokenizer.vocab_files_names.values(), "tokenizer.json", "tokenizer_config.json", "tekken.json"}
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise OSError(f"It has none of {', '.join(sorted(names))}.")


def _checked(model: Any) -> JaxModel:
    from hfax.backends.jax.model import JaxModel

    if not isinstance(model, JaxModel):
        raise InvalidInputError(
            f"pipeline() got {type(model).__name__} as its model.",
            "It takes a checkpoint name or a model loaded by hfax.",
            "Pass a folder, a Hub id or AutoModelForTPU.from_pretrained(…); use transformers.pipeline for plain torch models.",
        )
    return model


def _own_pipelines() -> dict[str, Any]:
    from hfax.pipelines.question_answering import QuestionAnsweringPipeline
    from hfax.pipelines.text_to_text import TextToTextPipeline

    to_text = ("summarization", "translation", "text2text-generation")
    return {"question-answering": QuestionAnsweringPipeline, **dict.fromkeys(to_text, TextToTextPipeline)}


def _names_languages(task: str) -> bool:
    """Whether a task is "translation_xx_to_yy"."""
    parts = task.split("_")
    return len(parts) == 4 and parts[0] == "translation" and parts[2] == "to"
