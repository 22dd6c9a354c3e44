"""The recipe file of `hfax train`: model, data and options. Parses and validates YAML, then runs the training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import torch

from hfax.errors import BackendNotAvailableError, InvalidInputError, UnsupportedOptionError
from hfax.lora.config import LoraConfig
from hfax.sharding.mesh import BATCH_AXES, size_of
from hfax.train.arguments import TrainingArguments
from hfax.train.data import Collator, PackingStrategy, check_packing_strategy, in_batches
from hfax.train.distillation_trainer import DistillationTrainer
from hfax.train.grpo_trainer import GRPOTrainer
from hfax.train.objectives import OBJECTIVES, check_model, make_collator, tokenized
from hfax.train.preference_rows import Truncation
from hfax.train.recipe_fields import sort_fields
from hfax.train.rewards import load_reward_functions
from hfax.train.sources import open_rows
from hfax.train.step import make_train_step
from hfax.train.streaming import StreamingDataset
from hfax.train.trainer import Trainer

_DEFAULT_LENGTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run of `hfax train`.

    Args:
        recipe: what is trained for: "sft", "dpo", "orpo", "kto", "reward", "distill" or "grpo".
        model: a Hub id, a folder, or "demo". For "reward" it gets a head with one output, if it has none.
        train_data: JSON Lines or Parquet files (a path, a pattern such as "data/*.jsonl", or several), a `datasets.save_to_disk`
            folder, or a data set's Hub id ("owner/name", "owner/name:split").
        eval_data: evaluation data, in the same formats as `train_data`; it is read whole.
        streaming: read and tokenize `train_data` during training, see `StreamingDataset`.
        buffer_size: rows that are tokenized, packed and shuffled together with `streaming`; None: 1000.
        revision: model revision on the Hub.
        dtype: the model's compute dtype; trained weights are kept in float32.
        quantization: "int8" or "int4" quantization of the base weights under an adapter.
        parallelism: mesh sizes by axis, such as {"fsdp": 8}; or "auto".
        max_length: maximum row length, in tokens; longer rows are truncated ("reward": dropped). None: no maximum.
        packing: pack several sequences per row ("sft").
        packing_strategy: as in trl, what happens to sequences longer than `max_length`: "bfd" truncates them, "bfd_split" splits
            them; "wrapped" joins all sequences and cuts the text into rows.
        loss: the loss with its fields, which stand at the top level of the file: `DPOLoss`, `ORPOLoss`, `KTOLoss`, `RewardLoss` or
            `DistillationLoss`, `GRPOLoss`; None for "sft": the model's own.
        rollouts: what is generated during training: `RolloutConfig` ("grpo") or `DistillationTexts` ("distill"), whose fields stand
            at the top level of the file, too.
        reward_funcs: one or several reward functions ("grpo"): "file.py:function", or "package.module.function". The code runs.
        ref_model: the reference ("dpo", "kto", "grpo"), a Hub id or a folder; None: `model`, without the adapter.
        precompute_ref_log_probs: run the reference over all rows before training, not at each step ("dpo").
        precompute_ref_batch_size: rows per forward pass of that; None: those of training.
        truncation_mode: what `max_length` keeps of prompt and completion: "keep_start" or "keep_end" ("dpo").
        teacher_model_name_or_path: the teacher ("distill"), a Hub id or a folder.
        lora: adapter config, see `LoraConfig`; None: train all weights.
        trainable: name patterns of the weights to train.
        merge: merge the adapter and save the whole model.
        training: `TrainingArguments` options.
    """

    model: str
    train_data: str | list[str]
    training: TrainingArguments
    recipe: Literal["sft", "dpo", "orpo", "kto", "reward", "distill", "grpo"] = "sft"
    eval_data: str | list[str] | None = None
    streaming: bool = False
    buffer_size: int | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    parallelism: Any = None
    max_length: int | None = _DEFAULT_LENGTH
    packing: bool = False
    packing_strategy: PackingStrategy = "bfd"
    loss: Any = None
    rollouts: Any = None
    reward_funcs: str | list[str] | None = None
    ref_model: str | None = None
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    truncation_mode: Truncation = "keep_start"
    teacher_model_name_or_path: str | None = None
    lora: LoraConfig | None = None
    trainable: list[str] | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        if self.recipe == "distill" and self.teacher_model_name_or_path is None:
            raise InvalidInputError(
                "recipe: distill has no teacher.", "The model learns its outputs.", "Add teacher_model_name_or_path."
            )
        if self.recipe == "grpo" and not self.reward_funcs:
            raise InvalidInputError(
                "recipe: grpo has no reward_funcs.",
                "The model learns from the rewards of its completions.",
                "Add reward_funcs: rewards.py:function.",
            )
        if self.packing and self.max_length is None:
            raise InvalidInputError("packing has no max_length.", "Rows are filled up to it.", "Add max_length: 1024.")
        check_packing_strategy(self.packing_strategy, is_packing=self.packing)
        if self.precompute_ref_batch_size is not None and not self.precompute_ref_log_probs:
            raise InvalidInputError(
                "precompute_ref_batch_size is set without precompute_ref_log_probs.",
                "At a step, the reference has the rows of the step.",
                "Add precompute_ref_log_probs: true, or leave it out.",
            )
        if self.buffer_size is not None and not self.streaming:
            raise InvalidInputError(
                "buffer_size is set without streaming.",
                "Rows are then tokenized before training, all together.",
                "Add streaming: true, or leave buffer_size out.",
            )
        if self.buffer_size is not None and self.recipe == "grpo":
            raise InvalidInputError(
                "recipe: grpo has no buffer_size.", "The engine tokenizes the prompts of each step.", "Leave it out."
            )
        if self.streaming and self.precompute_ref_log_probs:
            raise InvalidInputError(
                "streaming does not go with precompute_ref_log_probs.",
                "The reference would run over all rows before training.",
                "Leave one of them out; without it, the reference runs at each step.",
            )
        if self.streaming and self.training.max_steps is None:
            raise InvalidInputError(
                "streaming has no max_steps.",
                "The number of rows that are left after tokenization is not known before.",
                "Add max_steps: 1000.",
            )
        for name in ("max_length", "precompute_ref_batch_size", "buffer_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInputError(f"{name}={value} is too small.", "It is a count.", f"Pass another {name}.")


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe: fields of `Recipe`, its loss and `TrainingArguments` at the top level, of `LoraConfig` under `lora:`.

    Raises:
        InvalidInputError: no such file, invalid YAML, or an unknown, missing or mistyped field, which is named.
        UnsupportedOptionError: an option of transformers or trl that hfax lacks; the message names the alternative.
    """
    try:
        import yaml
    except ImportError as error:
        raise _missing_package(error) from error
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} could not be read.", f"{type(error).__name__}: {error}", "Pass a YAML file; see docs/training.md."
        ) from error
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{path} is not a recipe.", "It has no fields.", "See docs/training.md for an example.")
    return make_recipe(given, str(path))


def make_recipe(given: Mapping[str, Any], where: str = "The recipe") -> Recipe:
    """A recipe from the contents of a file.

    Args:
        given: fields by name, see `read_recipe`.
        where: the file, for errors.
    """
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError as error:
        raise _missing_package(error) from error
    own, of_loss, of_rollouts, training = sort_fields(
        given, {field.name for field in dataclasses.fields(Recipe)}, where
    )
    kind = OBJECTIVES[own.get("recipe", "sft")]
    try:
        loss = None if kind.loss is None else TypeAdapter(kind.loss).validate_python(of_loss)
        rollouts = None if kind.rollouts is None else TypeAdapter(kind.rollouts).validate_python(of_rollouts)
        return TypeAdapter(Recipe).validate_python({**own, "training": training, "loss": loss, "rollouts": rollouts})
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"] if part != "training")
        raise InvalidInputError(
            f"{where}: {at}: {first['msg']}.",
            f"It is {first.get('input')!r}." if at else "",
            "See docs/training.md for the fields.",
        ) from error


def _missing_package(error: ImportError) -> BackendNotAvailableError:
    return BackendNotAvailableError(
        "hfax train requires pydantic and PyYAML.", str(error), "Install them: pip install 'hfax[train]'."
    )


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

    if recipe.quantization is not None and recipe.lora is None:
        raise InvalidInputError(
            f"quantization: {recipe.quantization} is set without lora.",
            "Integer weights have no gradients.",
            "Add lora: {r: 8}, or remove quantization.",
        )
    functions = load_reward_functions(recipe.reward_funcs or ())  # before the weights, which load slower
    rows = open_rows(recipe.train_data, streaming=recipe.streaming)
    eval_rows = None if recipe.eval_data is None else open_rows(recipe.eval_data)
    model = _load(recipe, recipe.model, is_trained=True)
    check_model(recipe.recipe, model)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    if recipe.recipe == "reward":
        _make_pad_token(model, tokenizer)
    if recipe.lora is not None:
        model.add_adapter(_adapter(recipe), seed=recipe.training.seed)
    other = recipe.ref_model or recipe.teacher_model_name_or_path
    reference = None if other is None else _load(recipe, other, is_trained=False)
    training = dataclasses.replace(recipe.training, push_to_hub=False, hub_model_id=None)  # after the adapter is merged
    if recipe.recipe == "grpo":
        trainer: Trainer = GRPOTrainer(
            model,
            functions,
            training,
            rows,
            eval_rows,
            processing_class=tokenizer,
            loss=recipe.loss,
            rollouts=recipe.rollouts,
            max_length=recipe.max_length,
            ref_model=reference,
            trainable=recipe.trainable,
        )
    else:
        trainer = _make_trainer(recipe, model, reference, tokenizer, training, (rows, eval_rows))
    if on_start is not None:
        on_start()
    metrics = trainer.train(resume_from_checkpoint=resume, accept_changes=accept_changes)
    if recipe.merge and recipe.lora is not None:
        model.merge_adapter()
    folder = trainer.save()
    tokenizer.save_pretrained(folder)
    if recipe.training.push_to_hub:
        trainer.args = recipe.training
        trainer.push_to_hub(folder=folder)
    return trainer, metrics, folder


def _make_trainer(
    recipe: Recipe, model: Any, reference: Any, tokenizer: Any, training: TrainingArguments, data: tuple[Any, Any]
) -> Trainer:
    """The trainer of a recipe whose rows are there before it starts.

    Args:
        recipe: the recipe.
        model: the model to train.
        reference: its reference or teacher; None: the model itself, or none.
        tokenizer: the model's.
        training: training options.
        data: rows to train on, and to evaluate on, or None.
    """
    per_pass = training.per_device_train_batch_size * (1 if model.mesh is None else size_of(model.mesh, BATCH_AXES))
    collator = make_collator(recipe, tokenizer.pad_token_id or 0, per_pass)
    sets = [_tokenized(recipe, data[0], tokenizer), None if data[1] is None else tokenized(recipe, data[1], tokenizer)]
    if recipe.precompute_ref_log_probs:
        size = recipe.precompute_ref_batch_size or per_pass
        sets = [None if each is None else _referenced(recipe, model, reference, each, collator, size) for each in sets]
        reference = None
    options: dict[str, Any] = {"data_collator": collator, "loss": recipe.loss, "trainable": recipe.trainable}
    if recipe.recipe == "distill":
        return DistillationTrainer(
            model, training, *sets, teacher=reference, texts=recipe.rollouts, max_length=recipe.max_length, **options
        )
    return Trainer(model, training, *sets, ref_model=reference, **options)


def _tokenized(recipe: Recipe, rows: Any, tokenizer: Any) -> Any:
    """The rows to train on."""
    if not recipe.streaming:
        return tokenized(recipe, rows, tokenizer)
    kind = dataclasses.replace(recipe, loss=None, rollouts=None)  # what is sent to the processes that tokenize
    prepare = functools.partial(_prepared, kind, tokenizer)
    options = {} if recipe.buffer_size is None else {"buffer_size": recipe.buffer_size}
    return StreamingDataset(
        rows,
        max_length=recipe.max_length,
        packing=recipe.packing,
        packing_strategy=recipe.packing_strategy,
        prepare=prepare,
        **options,
    )


def _prepared(recipe: Recipe, tokenizer: Any, rows: Any) -> Any:
    return tokenized(recipe, rows, tokenizer)


def _load(recipe: Recipe, name: str, *, is_trained: bool) -> Any:
    """The model to train, or its reference."""
    from hfax.auto import AutoModelForTPU

    of_trained: dict[str, Any] = {"revision": recipe.revision, "quantization": recipe.quantization}
    of_reward = {"task": "text-classification", "num_labels": 1, "strict": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)  # draws a new head
        return AutoModelForTPU.from_pretrained(
            name,
            dtype=recipe.dtype,
            parallelism=recipe.parallelism,
            **(of_trained if is_trained else {}),
            **(of_reward if recipe.recipe == "reward" else {}),
        )


def _adapter(recipe: Recipe) -> LoraConfig:
    """The adapter; of a reward model it also trains the new head."""
    assert recipe.lora is not None
    if recipe.recipe != "reward" or recipe.lora.task_type == "SEQ_CLS":
        return recipe.lora
    if recipe.lora.task_type is not None:
        raise InvalidInputError(
            f"lora: task_type: {recipe.lora.task_type} does not train a reward model's head.",
            "The head is new, and has random weights.",
            "Use SEQ_CLS, or leave task_type out.",
        )
    return dataclasses.replace(recipe.lora, task_type="SEQ_CLS")


def _make_pad_token(model: Any, tokenizer: Any) -> None:
    """A classifier reads its output at the last token that is no padding, by the id in its config."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id


def _referenced(recipe: Recipe, model: Any, reference: Any, rows: Any, collator: Collator, size: int) -> list[Any]:
    """Rows with what the loss reads of the reference.

    Raises:
        UnsupportedOptionError: several processes, each of which would have the results of its own rows only.
    """
    if jax.process_count() > 1:
        raise UnsupportedOptionError(
            f"precompute_ref_log_probs is not supported in a run of {jax.process_count()} processes.",
            "Each process has the results of its own rows only.",
            "Leave it out: the reference then runs at each step.",
        )
    step = make_train_step(model, optax.identity(), recipe.loss, ref_model=reference, trainable=recipe.trainable)
    found: list[Any] = []
    for some in in_batches(rows, size):
        columns = {name: np.asarray(array) for name, array in step.reference(collator(some)).items()}
        found += [{**row, **{n: float(c[i]) for n, c in columns.items()}} for i, row in enumerate(some)]
    return found
