"""The caller's Python between two tokens: logits processors over torch tensors, and the tokens that a prefix allows.

Turns what a loop reads off the device (tokens, scores) into what transformers would pass, and results into host arrays. It does
not know backends.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.processor_set import CustomProcessors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@functools.cache
def warn_of_cost(what: str) -> None:
    """Say once what Python between two tokens costs."""
    logger.warning(
        "%s runs on the host: after every token the device waits for it. Options, transformers' own processors and "
        "hfax.device_processor run on the device.",
        what,
    )


class TextSoFar:
    """The ids of every sequence as transformers shows them: the prompts as passed, padding included, then the new tokens.

    Args:
        given: [batch, length], the prompts as passed.
        padded_length: padded length of the prompts, in tokens.
        repeats: sequences of each prompt.
    """

    def __init__(self, given: np.ndarray, padded_length: int, repeats: int) -> None:
        self.given = np.repeat(given, repeats, axis=0)
        self._first = padded_length

    def ids(self, tokens: np.ndarray, steps: int) -> torch.Tensor:
        """[sequences, length] int64.

        Args:
            tokens: [rows, capacity], the buffer of a program.
            steps: tokens generated so far.
        """
        import torch

        new = tokens[: len(self.given), self._first : self._first + steps]
        return torch.from_numpy(np.concatenate([self.given, new], axis=1).astype(np.int64))


class HostProcessors:
    """Runs the caller's processors.

    Args:
        custom: the processors.
        text: the ids of every sequence.
        repeats: sequences of each prompt.
        vocab_size: vocabulary size of the logits.
    """

    def __init__(self, custom: CustomProcessors, text: TextSoFar, repeats: int, vocab_size: int) -> None:
        self._text, self._repeats, self._vocab = text, repeats, vocab_size
        self._processors = custom.on_host
        for processor in custom.on_host:
            warn_of_cost(f"The logits processor {name_of(processor)}")
        self._prefix: Any = None
        self._watermark: Any = custom.watermark
        if custom.watermark is not None:
            warn_of_cost("watermarking_config")
        if custom.prefix_allowed_tokens_fn is not None:
            from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

            warn_of_cost("prefix_allowed_tokens_fn")
            self._prefix = PrefixConstrainedLogitsProcessor(custom.prefix_allowed_tokens_fn, repeats)

    def process(self, tokens: np.ndarray, steps: int, scores: np.ndarray) -> np.ndarray:
        """The scores after the caller's processors, [rows, vocab] float32; rows that pad the batch stay as they are.

        Raises:
            InvalidInputError: a processor returns something else than scores.
        """
        import torch

        ids = self._text.ids(tokens, steps)
        before = torch.from_numpy(np.array(scores[: len(ids)], np.float32))
        shape, held = before.shape, before
        for processor in self._processors:
            held = processor(ids, held)
            if not isinstance(held, torch.Tensor) or held.shape != shape:
                what = f"shape {tuple(held.shape)}" if isinstance(held, torch.Tensor) else type(held).__name__
                raise InvalidInputError(
                    f"The logits processor {name_of(processor)} returns {what}.",
                    f"A processor returns scores of the shape that it gets, here {tuple(shape)}.",
                    "Return the new scores.",
                )
        return np.concatenate([held.float().numpy(), scores[len(ids) :]])

    def values(self, tokens: np.ndarray | None, steps: int, rows: int) -> dict[str, np.ndarray]:
        """Values of processors on the device that depend on the text: `allowed` [prompts, sequences, vocab] bool, `watermark`
        [rows, vocab] float32. Rows that pad the batch may write anything.

        Args:
            tokens: [rows, capacity], the buffer of a program; None before the prompts are read.
            steps: tokens generated so far.
            rows: rows of the batch.

        Raises:
            InvalidInputError: `prefix_allowed_tokens_fn` allows no token.
        """
        if self._prefix is None and self._watermark is None:
            return {}
        import torch

        ids = self._text.ids(np.zeros((len(self._text.given), 0)) if tokens is None else tokens, steps)
        found = {}
        if self._prefix is not None:
            allowed = np.ones((rows, self._vocab), bool)
            allowed[: len(ids)] = self._allowed(ids)
            found["allowed"] = allowed.reshape(-1, self._repeats, self._vocab)
        if self._watermark is not None:
            found["watermark"] = np.zeros((rows, self._vocab), np.float32)
            found["watermark"][: len(ids)] = self._watermark(ids, torch.zeros(len(ids), self._vocab)).numpy()
        return found

    def _allowed(self, ids: torch.Tensor) -> np.ndarray:
        import torch

        try:
            return (self._prefix(ids, torch.zeros(len(ids), self._vocab)) == 0).numpy()
        except ValueError as error:
            raise InvalidInputError(
                "prefix_allowed_tokens_fn allows no token.", str(error), "Return at least one token, such as the end's."
            ) from error


def name_of(processor: Any) -> str:
    """The name of a function, or of an object's class."""
    return getattr(processor, "__name__", type(processor).__name__)
