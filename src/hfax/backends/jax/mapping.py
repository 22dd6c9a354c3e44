"""`model.map`: each batch of a dataset's rows becomes new tokens, or the outputs of a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig

from hfax.generation import batches
from hfax.generation.generation_request import as_ids_tuple


def map_dataset(
    dataset: Iterable[Any],
    forward: Callable[..., Any],
    generate: Callable[..., Any] | None,
    options: Mapping[str, Any],
    *,
    generation_config: GenerationConfig,
    is_encoder_decoder: bool,
    batch_size: int,
    tokenizer: Any,
    column: str,
    output: Path | None,
    select: Callable[[Any], Mapping[str, Any]] | None,
    progress: bool,
) -> list[Any]:
    """One result per row, in order.

    Args:
        dataset: texts, lists of token ids, or mappings with either under `column`.
        forward: the compiled forward pass.
        generate: the model's; None gives the outputs of `forward`.
        options: of `generate` or `forward`.
        generation_config: defaults of the options.
        is_encoder_decoder: the sequences of `generate` begin with a start token, not with the prompt.
        batch_size: rows per batch.
        tokenizer: required for texts.
        column: key of the text or ids in a mapping.
        output: a JSON Lines file; None: nothing is written.
        select: maps the outputs of `forward` to arrays by name, [batch, …]; None: all of them.
        progress: show a progress bar on a terminal.
    """
    is_left = generate is not None and not is_encoder_decoder
    pad: Any = generation_config.pad_token_id
    seen = 0

    def run(rows: list[Any]) -> list[Any]:
        nonlocal seen
        count, seen = len(rows), max(seen, len(rows))
        if generate is None:  # the last batch has the program of those before
            rows = [*rows, *rows[-1:] * (seen - count)]
        inputs = batches.encode(rows, column, tokenizer, is_left=is_left, pad_token_id=pad or 0)
        if generate is None:
            outputs = forward(**inputs, **options)
            return batches.as_rows(outputs if select is None else select(outputs), count)
        sequences = np.asarray(generate(**inputs, **options))
        start = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
        ends = as_ids_tuple(options.get("eos_token_id", generation_config.eos_token_id))
        return batches.new_tokens(sequences[:, start:], ends, tokenizer)

    total = len(dataset) if isinstance(dataset, Sized) else None
    length = functools.partial(batches.row_length, column=column) if generate is None else None
    given = {"batch_size": batch_size, "output": output, "total": total, "progress": progress, "length": length}
    return list(batches.map_rows(dataset, run, **given))
