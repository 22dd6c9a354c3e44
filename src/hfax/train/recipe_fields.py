"""Sorts the fields of a recipe file into those of the recipe, its loss and its training, and names those that are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.known_words import has_word, reject_arguments, words
from hfax.lora.config import LoraConfig
from hfax.train.arguments import TrainingArguments
from hfax.train.objectives import OBJECTIVES, Objective

Fields = dict[str, Any]
_OF_SOME = {name for objective in OBJECTIVES.values() for name in objective.fields}


def sort_fields(given: Mapping[str, Any], own_fields: set[str], where: str) -> tuple[Fields, Fields, Fields, Fields]:
    """The fields of the recipe itself, of its loss, of its completions, and of its training.

    Args:
        given: the file's contents.
        own_fields: names of `Recipe`'s fields.
        where: the file, for errors.

    Raises:
        InvalidInputError: an unknown kind of recipe or field, or a field of another kind.
        UnsupportedOptionError: a field of trl or transformers that hfax lacks; the message names the alternative.
    """
    kind = given.get("recipe", "sft")
    if kind not in OBJECTIVES:
        raise InvalidInputError(
            f"{where}: recipe: {kind!r} is unknown.", "It says what is trained for.", f"Use {', '.join(OBJECTIVES)}."
        )
    objective = OBJECTIVES[kind]
    in_file = own_fields - _OF_SOME - {"training", "loss", "rollouts"} | set(objective.fields)
    in_training = {field.name for field in dataclasses.fields(TrainingArguments)}
    _check_names(given, kind, in_file, in_training, where)
    training = {**objective.training, **{n: value for n, value in given.items() if n in in_training}}
    if "disable_dropout" in given:
        if "dropout" in given:
            raise InvalidInputError(
                f"{where} has dropout and disable_dropout.",
                "One is the opposite of the other.",
                "Leave one of them out.",
            )
        training["dropout"] = not given["disable_dropout"]
    return (
        {n: value for n, value in given.items() if n in in_file},
        {n: value for n, value in given.items() if n in objective.loss_fields},
        {n: value for n, value in given.items() if n in objective.rollout_fields},
        training,
    )


def _check_names(given: Mapping[str, Any], kind: str, in_file: set[str], in_training: set[str], where: str) -> None:
    """Raise for field names that would otherwise be ignored."""
    objective = OBJECTIVES[kind]
    in_loss = {*objective.loss_fields, *objective.rollout_fields}
    known = in_file | in_training | in_loss | (set() if kind == "sft" else {"disable_dropout"})
    of_adapters = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = [*sorted(set(given) - known), *(f"lora.{n}" for n in sorted(set(given.get("lora") or {}) - of_adapters))]
    if not unknown:
        return
    name = unknown[0]
    if (word := words()["arguments"]["recipe"].get(name)) is not None:
        raise UnsupportedOptionError(f"{where} does not take {name}.", word["why"], word["fix"])
    if kinds := [other for other, one in OBJECTIVES.items() if _has(one, name)]:
        raise InvalidInputError(
            f"{where} has the field {name!r}, which recipe: {kind} does not use.",
            "A field is honoured or refused, never ignored.",
            f"Leave it out, or set recipe: {' or '.join(kinds)}.",
        )
    if has_word("TrainingArguments", name):
        reject_arguments("TrainingArguments", [name], ())
    raise InvalidInputError(
        f"{where} has an unknown field {name!r}.",
        "hfax would ignore it.",
        f"Fields are {', '.join(sorted(known))}; under lora: {', '.join(sorted(of_adapters))}.",
    )


def _has(objective: Objective, name: str) -> bool:
    return name in (*objective.fields, *objective.loss_fields, *objective.rollout_fields)
