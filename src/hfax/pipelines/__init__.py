"""`hfax.pipeline`: transformers' pipelines, from raw text, images and sound to answers, with a model of hfax inside.

transformers 5 removed some tasks that many models are still made for; those that hfax adds are modules of this package.
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
"""What reads inputs, and the class of transformers that loads it."""
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
        task: a pipeline task of transformers, such as "text-generation", "text-classification", "token-classification",
            "fill-mask", "feature-extraction", "zero-shot-classification", "image-classification", "image-text-to-text" or
            "automatic-speech-recognition"; or "question-answering", which transformers 5 no longer has.
        model: a folder, a Hub id or "demo", loaded for the task; or a model of hfax.
        backend: as in `AutoModelForTPU.from_pretrained`, like the next seven; they are for models that are loaded here.
        dtype: of the weights.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: Hub cache folder.
        local_files_only: never use the network.
        trust_remote_code: run code that the checkpoint carries.
        strict: missing and unexpected tensors are errors.
        **options: for the pipeline, as transformers names them: `tokenizer`, `processor`, `image_processor`,
            `feature_extractor` (objects or names; else they come from the model's folder), `batch_size`, `top_k`, and the
            other defaults of its calls.

    Returns:
        transformers' pipeline object for the task. Text is written with one beam, where transformers takes five for some tasks
        (speech recognition). A program is compiled for each shape of its inputs; with text, pass
        `padding="max_length"` and `max_length` to the pipelines that take them, so that all texts share one.

    Raises:
        UnsupportedOptionError: no such task, or the model is of another kind.
        CheckpointNotFoundError: the model's folder has no tokenizer or processor for the task.
        HfaxError: the model cannot be loaded.

    Example:
        >>> classify = hfax.pipeline("text-classification", "distilbert/…-sst-2-english")  # doctest: +SKIP
        >>> classify("what a day")  # doctest: +SKIP
    """
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    if wrong := sorted(set(_PLACING) & set(options)):
        raise UnsupportedOptionError(
            f"pipeline() does not take {', '.join(wrong)}.",
            "hfax places the weights when the model is loaded, on the platform that JAX_PLATFORMS names.",
            "Leave it out; dtype chooses the weights' type.",
        )
    own = _own_pipelines()
    if (pipeline_class := own.get(task)) is None:
        try:
            implementation = PIPELINE_REGISTRY.check_task(task)[1]["impl"]
            pipeline_class = pkgutil.resolve_name(implementation) if isinstance(implementation, str) else implementation
        except KeyError as error:
            known = sorted({*PIPELINE_REGISTRY.get_supported_tasks(), *own})
            raise UnsupportedOptionError(
                f"Unknown task {task!r}.",
                "pipeline() takes the names of transformers' tasks.",
                f"Use one of: {', '.join(known)}.",
            ) from error
    if isinstance(model, (str, Path)):
        from hfax.auto import AutoModelForTPU
        from hfax.load.skeleton import TASK_TO_AUTO_CLASS

        loaded = AutoModelForTPU.from_pretrained(
            model,
            backend=backend,
            task=task if task in TASK_TO_AUTO_CLASS else None,
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
    if getattr(pipeline_class, "_pipeline_calls_generate", False):
        options = {"num_beams": 1, **options}
    parts = _parts(pipeline_class, loaded, options, trust_remote_code)
    try:
        if task in own:
            return pipeline_class(model=loaded, device="cpu", **parts, **options)
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
            "The model is of another kind, or an option is not one of the pipeline's.",
            "Choose the task that the checkpoint was made for, and options of that task.",
        ) from error


def _parts(pipeline_class: Any, model: JaxModel, options: dict[str, Any], trust_remote_code: bool) -> dict[str, Any]:
    """The tokenizer and processors that the task needs: objects that were given, or loaded from a name or the model's folder."""
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
                    f"Pass {name}=…, the name of a checkpoint that has one, or the object itself.",
                ) from error
    return found


def _require_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Raise if a folder holds none of the files a tokenizer is read from: transformers then makes an empty one."""
    names = {*tokenizer.vocab_files_names.values(), "tokenizer.json", "tokenizer_config.json", "tekken.json"}
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise OSError(f"It holds none of {', '.join(sorted(names))}.")


def _checked(model: Any) -> JaxModel:
    from hfax.backends.jax.model import JaxModel

    if not isinstance(model, JaxModel):
        raise InvalidInputError(
            f"pipeline() got {type(model).__name__} as its model.",
            "It takes the name of a checkpoint, or a model that hfax has loaded.",
            "Pass a folder or Hub id, or AutoModelForTPU.from_pretrained(…); plain torch models go to transformers.pipeline.",
        )
    return model


def _own_pipelines() -> dict[str, Any]:
    from hfax.pipelines.question_answering import QuestionAnsweringPipeline

    return {"question-answering": QuestionAnsweringPipeline}
