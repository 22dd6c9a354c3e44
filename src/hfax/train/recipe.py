"""The recipe file of `hfax train`: model, data and options. Parses and validates YAML, then runs the training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfax.errors import BackendNotAvailableError, InvalidInputError
from hfax.known_words import has_word, reject_arguments
from hfax.lora.config import LoraConfig
from hfax.train.arguments import TrainingArguments
from hfax.train.data import PackedCollator, PaddingCollator, pack
from hfax.train.examples import tokenize_rows
from hfax.train.trainer import Trainer

_DEFAULT_LENGTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run of supervised fine-tuning.

    Args:
        model: a Hub id, a folder, or "demo".
        train_data: JSON Lines, a `datasets.save_to_disk` folder, or a data set's Hub id ("owner/name", "owner/name:split").
        eval_data: evaluation data, in the same formats as `train_data`.
        revision: model revision on the Hub.
        dtype: the model's compute dtype; trained weights are kept in float32.
        quantization: "int8" or "int4" quantization of the base weights under an adapter.
        parallelism: mesh sizes by axis, such as {"fsdp": 8}; or "auto".
        max_length: maximum row length, in tokens; longer rows are truncated.
        packing: pack several sequences per row.
        lora: adapter config, see `LoraConfig`; None: train all weights.
        trainable: name patterns of the weights to train.
        merge: merge the adapter and save the whole model.
        training: `TrainingArguments` options.
    """

    model: str
    train_data: str
    training: TrainingArguments
    eval_data: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    parallelism: Any = None
    max_length: int = _DEFAULT_LENGTH
    packing: bool = False
    lora: LoraConfig | None = None
    trainable: list[str] | None = None
    merge: bool = False


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe: fields of `Recipe` and `TrainingArguments` at the top level, and `LoraConfig` fields under `lora:`.

    Raises:
        InvalidInputError: no such file, invalid YAML, or an unknown, missing or mistyped field, which is named.
        UnsupportedOptionError: a training option of transformers that hfax lacks; the message names the alternative.
    """
    try:
        import yaml
        from pydantic import TypeAdapter, ValidationError
    except ImportError as error:
        raise BackendNotAvailableError(
            "hfax train requires pydantic and PyYAML.", str(error), "Install them: pip install 'hfax[train]'."
        ) from error
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} could not be read.", f"{type(error).__name__}: {error}", "Pass a YAML file; see docs/training.md."
        ) from error
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{path} is not a recipe.", "It has no fields.", "See docs/training.md for an example.")
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    own: dict[str, Any] = {name: value for name, value in given.items() if name not in names}
    own["training"] = {name: value for name, value in given.items() if name in names}
    try:
        return TypeAdapter(Recipe).validate_python(_checked_names(own, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "training")
        raise InvalidInputError(
            f"{path}: {where}: {first['msg']}.",
            f"It is {first.get('input')!r}." if where else "",
            "See docs/training.md for the fields.",
        ) from error


def _checked_names(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Raise for unknown field names, which would otherwise be ignored."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    of_adapters = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = [*sorted(set(given) - known), *(f"lora.{n}" for n in sorted(set(given.get("lora") or {}) - of_adapters))]
    if unknown:
        if has_word("TrainingArguments", unknown[0]):
            reject_arguments("TrainingArguments", unknown[:1], ())
        training = {field.name for field in dataclasses.fields(TrainingArguments)}
        raise InvalidInputError(
            f"{path} has an unknown field {unknown[0]!r}.",
            "hfax would ignore it.",
            f"Fields are {', '.join(sorted((known - {'training'}) | training))}; under lora: {', '.join(sorted(of_adapters))}.",
        )
    return given


def read_rows(where: str) -> Any:
    """Load data set rows from JSON Lines, a `datasets` folder, or a Hub id.

    Raises:
        InvalidInputError: the data cannot be found or read; for JSON Lines, names the line.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return list(_json_lines(path))
    try:
        import datasets
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{where} is not a file, and other data sets require the package datasets.",
            str(error),
            "Install it: pip install datasets; or pass a JSON Lines file.",
        ) from error
    name, _, split = where.partition(":")
    try:
        if path.is_dir():
            found: Any = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # many exception types, from several packages
        raise InvalidInputError(
            f"No data found at {where}.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Pass a JSON Lines file, a datasets.save_to_disk folder, or a Hub id.",
        ) from error
    return found["train"] if isinstance(found, Mapping) and "train" in found else found


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInputError(
                    f"{path}, line {number}, is not valid JSON.", str(error), "Write one JSON object per line."
                ) from error
            if not isinstance(row, dict):
                raise InvalidInputError(
                    f"{path}, line {number}, is not an object.",
                    f"It is {type(row).__name__}.",
                    "Write one JSON object per line.",
                )
            yield row


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool = False,
    accept_changes: Collection[str] = (),
    on_start: Callable[[], None] | None = None,
) -> tuple[Trainer, dict[str, float], Path]:
    """Train and save the result.

    Args:
        recipe: the recipe.
        resume: resume from the last whole checkpoint in `output_dir`.
        accept_changes: see `Trainer.train`.
        on_start: called when everything is loaded and training starts.

    Returns:
        The trainer, the last metrics, and the folder of the trained model (or unmerged adapter).
    """
    from transformers import AutoTokenizer

    from hfax.auto import AutoModelForTPU

    if recipe.quantization is not None and recipe.lora is None:
        raise InvalidInputError(
            f"quantization: {recipe.quantization} is set without lora.",
            "Integer weights have no gradients.",
            "Add lora: {r: 8}, or remove quantization.",
        )
    rows = read_rows(recipe.train_data)  # before the weights, which load slower
    eval_rows = None if recipe.eval_data is None else read_rows(recipe.eval_data)
    model: Any = AutoModelForTPU.from_pretrained(
        recipe.model,
        revision=recipe.revision,
        dtype=recipe.dtype,
        quantization=recipe.quantization,  # pyright: ignore[reportArgumentType]
        parallelism=recipe.parallelism,
    )
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    if recipe.lora is not None:
        model.add_adapter(recipe.lora, seed=recipe.training.seed)
    train = tokenize_rows(rows, tokenizer, max_length=recipe.max_length)
    held = None if eval_rows is None else tokenize_rows(eval_rows, tokenizer, max_length=recipe.max_length)
    if recipe.packing:
        train = pack(train, recipe.max_length)
        held = None if held is None else pack(held, recipe.max_length)
    padding = PaddingCollator(pad_token_id=tokenizer.pad_token_id or 0, max_length=recipe.max_length)
    trainer = Trainer(
        model,
        recipe.training,
        train,
        held,
        data_collator=PackedCollator() if recipe.packing else padding,
        trainable=recipe.trainable,
    )
    if on_start is not None:
        on_start()
    metrics = trainer.train(resume_from_checkpoint=resume, accept_changes=accept_changes)
    if recipe.merge and recipe.lora is not None:
        model.merge_adapter()
    folder = trainer.save()
    tokenizer.save_pretrained(folder)
    return trainer, metrics, folder
