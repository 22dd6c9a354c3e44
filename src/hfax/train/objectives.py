"""The kinds of recipes: what each trains for, the fields that it has beside those of all, and how its rows become batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.train.data import Collator, PackedCollator, PaddingCollator
from hfax.train.distillation import DistillationLoss
from hfax.train.distillation_trainer import DistillationTexts
from hfax.train.dpo import DPOLoss
from hfax.train.examples import tokenize_examples
from hfax.train.grpo import GRPOLoss
from hfax.train.preference_collators import PairCollator, VerdictCollator
from hfax.train.preference_losses import KTOLoss, ORPOLoss, RewardLoss
from hfax.train.preference_rows import pair_rows, reward_rows, verdict_rows
from hfax.train.rollouts import RolloutConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """A kind of recipe.

    Args:
        loss: its loss, whose fields are those of the recipe; None: the model's own.
        fields: fields of `Recipe` that only some kinds have.
        rollouts: the options of its completions, whose fields are those of the recipe, too; None: it generates none.
        training: defaults of `TrainingArguments`, as in trl.
    """

    loss: type[Any] | None
    fields: tuple[str, ...] = ()
    rollouts: type[Any] | None = None
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def loss_fields(self) -> tuple[str, ...]:
        """Names of the loss's fields."""
        return _names(self.loss)

    @property
    def rollout_fields(self) -> tuple[str, ...]:
        """Names of the fields of its completions' options."""
        return _names(self.rollouts)


def _names(kind: type[Any] | None) -> tuple[str, ...]:
    return () if kind is None else tuple(field.name for field in dataclasses.fields(kind))


_SLOW = {"learning_rate": 1e-6, "dropout": False}
OBJECTIVES: dict[str, Objective] = {
    "sft": Objective(loss=None, fields=("packing", "packing_strategy")),
    "dpo": Objective(
        loss=DPOLoss,
        fields=("ref_model", "precompute_ref_log_probs", "precompute_ref_batch_size", "truncation_mode"),
        training=_SLOW,
    ),
    "orpo": Objective(loss=ORPOLoss, training=_SLOW),
    "kto": Objective(loss=KTOLoss, fields=("ref_model",), training=_SLOW),
    "reward": Objective(loss=RewardLoss, training={**_SLOW, "learning_rate": 1e-4}),
    "distill": Objective(
        loss=DistillationLoss, fields=("teacher_model_name_or_path",), rollouts=DistillationTexts, training=_SLOW
    ),
    "grpo": Objective(
        loss=GRPOLoss, fields=("ref_model", "reward_funcs"), rollouts=RolloutConfig, training={"learning_rate": 1e-6}
    ),
}
"""By the value of a recipe's field `recipe`."""


def tokenized(recipe: Any, rows: Any, tokenizer: Any) -> Any:
    """Rows of a data set as token ids.

    Args:
        recipe: the `Recipe`.
        rows: from `hfax.train.sources.open_rows`, or some of them.
        tokenizer: the model's.

    Raises:
        InvalidInputError: rows in a format that the recipe does not read.
    """
    length = recipe.max_length
    match recipe.recipe:
        case "dpo":
            return pair_rows(rows, tokenizer, max_length=length, truncation_mode=recipe.truncation_mode)
        case "orpo":
            return pair_rows(rows, tokenizer, max_length=length)
        case "kto":
            return verdict_rows(rows, tokenizer, max_length=length)
        case "reward":
            return reward_rows(rows, tokenizer, max_length=length)
        case _:
            strategy = recipe.packing_strategy if recipe.packing else None
            return tokenize_examples(rows, tokenizer, max_length=length, packing_strategy=strategy)


def make_collator(recipe: Any, pad_token_id: int, rows_per_pass: int) -> Collator:
    """The collator of a recipe's rows.

    Args:
        recipe: the `Recipe`.
        pad_token_id: token id for padding.
        rows_per_pass: rows of a forward pass.

    Raises:
        InvalidInputError: KTO with a single row per pass, which has no other completion to compare with.
    """
    match recipe.recipe:
        case "dpo" | "orpo" | "reward":
            return PairCollator(pad_token_id=pad_token_id)
        case "kto":
            if recipe.loss.has_kl and rows_per_pass < 2:
                raise InvalidInputError(
                    "KTO needs at least 2 rows per forward pass.",
                    "Its KL term compares a prompt with the completion of another row.",
                    "Raise per_device_train_batch_size, or use loss_type: apo_zero_unpaired.",
                )
            return VerdictCollator(
                group=rows_per_pass,
                has_kl=recipe.loss.has_kl,
                max_length=recipe.max_length,
                pad_token_id=pad_token_id,
            )
        case _ if recipe.packing:
            return PackedCollator()
        case _:
            return PaddingCollator(pad_token_id=pad_token_id, max_length=recipe.max_length)


def check_model(kind: str, model: Any) -> None:
    """Raise for a model that a kind of recipe cannot train.

    Raises:
        UnsupportedOptionError: it has an encoder and a decoder; only their own loss is supported.
    """
    if kind != "sft" and model.config.is_encoder_decoder:
        raise UnsupportedOptionError(
            f"recipe: {kind} does not train {type(model).__name__}.",
            "It has an encoder and a decoder; prompts and completions are one sequence here.",
            "Use a decoder-only model, or recipe: sft.",
        )
