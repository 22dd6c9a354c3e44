"""Verifies a checkpoint against plain transformers: same outputs and same text, or the first difference.

Turns a loaded model and prompts into a `Verification`. Images, audio and other inputs besides text are random
(`verification_inputs`). The model and transformers' own class (`reference`) run forward and generate from the same inputs; if a
forward pass differs by more than rounding, `first_difference` finds the module and the operation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
import transformers

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.evaluation.first_difference import Difference, first_difference
from hfax.evaluation.reference import (
    TOLERANCE,
    Inputs,
    Reference,
    is_rounding,
    output_tensors,
    relative_error,
    run_plain,
)
from hfax.evaluation.verification_inputs import (
    Call,
    beside_text,
    encode,
    extended,
    left_padded,
    random_call,
    with_positions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The result of one prompt.

    Args:
        prompt: prompt text; for random inputs their names and shapes.
        prompt_tokens: prompt length, in tokens; 0 for inputs without text.
        forward_error: largest difference of an output, relative to that output's largest value.
        rounding: the reference's own error in its dtype against the next wider one; None if not computed because
            `forward_error` is within tolerance.
        new_tokens: number of tokens the reference generated.
        parted_at: index of the first new token that differs, from 0; None if all match.
        margin: difference between the reference's logits of the two tokens there, relative to its largest logit.
        outcome: "agrees"; "tie" (the texts diverge where the reference's two best tokens are within rounding); "forward
            differs"; "text differs" (although a forward pass over the same text agrees: caches, masks or positions).
    """

    prompt: str
    prompt_tokens: int
    forward_error: float
    rounding: float | None = None
    new_tokens: int = 0
    parted_at: int | None = None
    margin: float | None = None
    outcome: str = "agrees"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a comparison with plain transformers.

    Args:
        class_name: model class name.
        dtype: weight and compute dtype, on both sides.
        agrees: whether no prompt differs.
        prompts: one result per prompt.
        padded_error: largest logit difference with all prompts in one left-padded batch, relative to the largest logit; None for a
            single prompt, and for models that do not support it.
        not_verified: why images or audio were not verified beside the prompts; None if they were, or the model takes none.
        difference: location of the first forward difference; None if there is none.
        patches: names of the applied patches.
        versions: library versions.
    """

    class_name: str
    dtype: str
    agrees: bool
    prompts: tuple[PromptResult, ...]
    padded_error: float | None
    not_verified: str | None
    difference: Difference | None
    patches: tuple[str, ...]
    versions: dict[str, str]


def verify(
    model: JaxModel, tokenizer: Any = None, prompts: Sequence[str] = (), *, max_new_tokens: int = 32
) -> Verification:
    """Compare a model with plain transformers: forward pass and greedy generation.

    A model that takes images, audio or anything else besides text is also run on random inputs of the sizes in its config.

    Args:
        model: a model loaded from a folder, without quantization, a mesh or adapters.
        tokenizer: the checkpoint's tokenizer; None without prompts.
        prompts: prompts for a model that takes text.
        max_new_tokens: tokens to generate greedily per prompt, if the model generates.

    Returns:
        The comparison. A model that differs is a result, not an error.

    Raises:
        InvalidInputError: prompts for a model that takes no text, or none for a model that takes text alone.
        UnsupportedModelError: plain transformers cannot run the model, or random inputs cannot be made.
    """
    if model.quantization is not None or model.mesh is not None or model.folder is None:
        raise UnsupportedModelError(
            "Only an unmodified checkpoint on one device can be verified.",
            "Plain transformers has no counterpart for quantized or sharded weights.",
            "Load the model without quantization and parallelism.",
        )
    cls = type(model.module)
    if prompts and not takes_prompts(cls):
        raise InvalidInputError(
            f"{cls.__name__} does not take prompts.",
            f"It takes {', '.join(sorted(beside_text(cls))) or model.main_input_name}, not text alone.",
            "Omit the prompts: it is verified on random inputs.",
        )
    reference = Reference(model)
    calls = [encode(tokenizer, reference.plain, prompt) for prompt in prompts]
    not_verified = None
    if not takes_prompts(cls) or beside_text(cls):
        try:
            calls.append(random_call(reference.plain))
        except UnsupportedModelError as error:
            if not calls:
                raise
            not_verified = error.why
    if not calls:
        raise InvalidInputError(
            "There is nothing to verify.", f"{type(model.module).__name__} takes text.", "Pass one or more prompts."
        )
    results = []
    first: Inputs | None = None
    for call in calls:
        result = _compare(model, reference, call, max_new_tokens)
        results.append(result)
        if result.outcome == "forward differs" and first is None:
            first = call.forward
    padded_error = None
    if len(prompts) > 1 and model.can_generate() and not reference.plain.config.is_encoder_decoder:
        batch = with_positions(reference.plain, left_padded([call.forward for call in calls[: len(prompts)]]))
        error, rounding = _forward_error(model, reference, batch)
        padded_error = error
        if not is_rounding(error, rounding) and first is None:
            first = batch
    return Verification(
        class_name=type(model.module).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        agrees=first is None and all(r.outcome in ("agrees", "tie") for r in results),
        prompts=tuple(results),
        padded_error=padded_error,
        not_verified=not_verified,
        difference=None if first is None else first_difference(model, reference, first),
        patches=tuple(sorted(model.patches_used)),
        versions={"transformers": transformers.__version__, "torch": torch.__version__, "jax": jax.__version__},
    )


def takes_prompts(model_class: Any) -> bool:
    """Whether a transformers class can be verified with text alone."""
    if model_class.main_input_name != "input_ids":
        return False
    return model_class.can_generate() or not beside_text(model_class)


def _forward_error(model: JaxModel, reference: Reference, inputs: Inputs) -> tuple[float, float | None]:
    """Largest error of the outputs over non-padding tokens: hfax's, and the reference's own if hfax's exceeds the tolerance."""
    expected = run_plain(reference.plain, inputs)

    def largest(found: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> float:
        if len(found) != len(true):
            return float("inf")
        return max(relative_error(a, b, _mask_for(b, inputs)) for a, b in zip(found, true, strict=True))

    error = largest(output_tensors(model(**inputs)), expected)
    if error <= TOLERANCE:
        return error, None
    return error, largest(expected, run_plain(reference.wider, inputs))


def _mask_for(output: torch.Tensor, inputs: Inputs) -> torch.Tensor | None:
    """The mask of tokens that are not padding, for an output with a value for each."""
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and output.shape[: mask.ndim] == mask.shape else None


def _compare(model: JaxModel, reference: Reference, call: Call, max_new_tokens: int) -> PromptResult:
    error, rounding = _forward_error(model, reference, call.forward)
    result = PromptResult(prompt=call.label, prompt_tokens=call.num_tokens, forward_error=error, rounding=rounding)
    if not is_rounding(error, rounding):
        return dataclasses.replace(result, outcome="forward differs")
    if not model.can_generate() or max_new_tokens < 1:
        return result
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        plain = reference.plain.generate(**call.generate, **options)
    written = torch.as_tensor(np.asarray(model.generate(**call.generate, **options).sequences))
    rows = [_compare_row(model, reference, call, result, plain, written, row) for row in range(len(plain.sequences))]
    return max(rows, key=lambda one: _SEVERITY.index(one.outcome))


_SEVERITY = ("agrees", "tie", "text differs", "forward differs")


def _compare_row(
    model: JaxModel,
    reference: Reference,
    call: Call,
    result: PromptResult,
    plain: Any,
    written: torch.Tensor,
    row: int,
) -> PromptResult:
    """The result with what a row of the generated text says.

    Args:
        model: hfax's.
        reference: the reference.
        call: the inputs.
        result: that of the forward pass.
        plain: what transformers' `generate` gave.
        written: [rows, length] what hfax wrote.
        row: the row to compare.
    """
    expected, found = plain.sequences[row], written[row]
    start = len(expected) - len(plain.scores)
    result = dataclasses.replace(result, new_tokens=len(plain.scores))
    width = min(len(expected), len(found))
    parted = torch.nonzero(expected[:width] != found[:width])
    if not len(parted) and len(expected) == len(found):
        return result
    place = int(parted[0]) if len(parted) else width
    result = dataclasses.replace(result, parted_at=place - start)
    if place >= width:  # one of them stopped
        return dataclasses.replace(result, outcome="text differs")
    scores = plain.scores[place - start][row].double()
    margin = float(scores[expected[place]] - scores[found[place]]) / float(scores[torch.isfinite(scores)].abs().max())
    if not math.isfinite(margin):
        return dataclasses.replace(result, outcome="text differs")
    result = dataclasses.replace(result, margin=margin)
    error, rounding = result.forward_error, result.rounding
    if len(plain.sequences) == 1 and set(call.generate) <= {
        "input_ids",
        "attention_mask",
    }:  # the text so far, in one pass
        error, rounding = _forward_error(model, reference, extended(call.forward, expected[None, :place]))
        if not is_rounding(error, rounding):
            return dataclasses.replace(result, outcome="forward differs")
    is_tie = margin <= 2 * max(TOLERANCE, error, rounding or 0.0)
    return dataclasses.replace(result, outcome="tie" if is_tie else "text differs")
