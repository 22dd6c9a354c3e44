"""`hfax train`'s file: which model, which data, how. Turns YAML into a checked recipe, and a recipe into a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfax.errors import BackendNotAvailableError, InvalidInputError
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
        train_data: JSON lines, a folder of `datasets.save_to_disk`, or a data set's Hub id ("owner/name", "owner/name:split").
        eval_data: likewise.
        revision: of the model.
        dtype: in which the model computes; what is trained is held in float32.
        quantization: "int8" or "int4", of weights under an adapter.
        parallelism: sizes by axis, such as {"fsdp": 8}; or "auto".
        max_length: longer rows are cut.
        packing: several texts a row.
        lora: an adapter's config, as `LoraConfig` has it; None: all weights are trained.
        trainable: patterns of the weights to train.
        merge: add the adapter to the weights before they are saved, and save the whole model.
        training: options of `TrainingArguments`.
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
    """The recipe of a YAML file: the fields of `Recipe`, those of `TrainingArguments` beside them, and `lora:` with an adapter's.

    Raises:
        InvalidInputError: no such file, no YAML, fields that are unknown, missing or of another type; each is named.
    """
    try:
        import yaml
        from pydantic import TypeAdapter, ValidationError
    except ImportError as error:
        raise BackendNotAvailableError(
            "hfax train reads its file by pydantic and PyYAML.", str(error), "Install them: pip install 'hfax[train]'."
        ) from error
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} could not be read.", f"{type(error).__name__}: {error}", "Pass a YAML file; see docs/training.md."
        ) from error
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{path} is no recipe.", "It has no fields.", "See docs/training.md for one.")
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
    """Raise for names that mean nothing, which would otherwise be passed over."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    of_adapters = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = [*sorted(set(given) - known), *(f"lora.{n}" for n in sorted(set(given.get("lora") or {}) - of_adapters))]
    if unknown:
        training = {field.name for field in dataclasses.fields(TrainingArguments)}
        raise InvalidInputError(
            f"{path} has the field {unknown[0]!r}.",
            "It means nothing to hfax, so it would not be followed.",
            f"Fields are {', '.join(sorted((known - {'training'}) | training))}; of lora: {', '.join(sorted(of_adapters))}.",
        )
    return given


def read_rows(where: str) -> Any:
    """Rows of a data set: JSON lines, a folder of `datasets`, or a Hub id.

    Raises:
        InvalidInputError: it cannot be found or read; of JSON lines the line is named.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return list(_json_lines(path))
    try:
        import datasets
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{where} is no file, and data sets need the package datasets.",
            str(error),
            "Install it: pip install datasets; or pass a file of JSON lines.",
        ) from error
    name, _, split = where.partition(":")
    try:
        if path.is_dir():
            found: Any = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # many kinds, of several packages
        raise InvalidInputError(
            f"There are no data at {where}.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Pass a file of JSON lines, a folder of datasets.save_to_disk, or a Hub id.",
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
                    f"{path}, line {number}, is no JSON.", str(error), "Each line is one object."
                ) from error
            if not isinstance(row, dict):
                raise InvalidInputError(
                    f"{path}, line {number}, is no object.", f"It is {type(row).__name__}.", "Each line is one object."
                )
            yield row


def run_recipe(
    recipe: Recipe, *, resume: bool = False, on_start: Callable[[], None] | None = None
) -> tuple[Trainer, dict[str, float], Path]:
    """Train, and save what came of it.

    Args:
        recipe: what to do.
        resume: go on after the last checkpoint in its `output_dir`.
        on_start: called when all is read and training begins.

    Returns:
        The trainer, the last metrics, and the folder of the trained model (of an adapter, unless it is merged).
    """
    from transformers import AutoTokenizer

    from hfax.auto import AutoModelForTPU

    if recipe.quantization is not None and recipe.lora is None:
        raise InvalidInputError(
            f"quantization: {recipe.quantization} is given without lora.",
            "Integers take no gradients.",
            "Add lora: {r: 8}, or leave quantization out.",
        )
    rows = read_rows(recipe.train_data)  # before the weights, which take longer
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
    metrics = trainer.train(resume_from_checkpoint=resume)
    if recipe.merge and recipe.lora is not None:
        model.merge_adapter()
    folder = trainer.save()
    tokenizer.save_pretrained(folder)
    return trainer, metrics, folder
