"""What is measured: subjects and cases, as plain data that goes between processes as JSON. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

SubjectKind = Literal["hfax", "eager", "static", "recipe"]
"""hfax; transformers as it comes; with its static cache and torch.compile; torchax's extract_jax with one jitted step a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectSpec:
    """One way to run the model.

    Args:
        name: shown in tables.
        kind: what runs it.
        model: Hub id or folder; or a config.json, for random weights.
        dtype: "auto", "float32", "bfloat16" or "float16".
        quantization: of hfax: "int8", "int4" or None.
        torch_backend: of torch.compile.
    """

    name: str
    kind: SubjectKind
    model: str
    dtype: str = "auto"
    quantization: str | None = None
    torch_backend: str = "inductor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Args:
        kind: "decode": seconds of `tokens` steps after `context` tokens; "prefill": seconds from a prompt of `context` tokens to
            the first new token.
        batch_size: sequences side by side.
        context: tokens before the first measured one.
        capacity: of the cache, tokens; 0: as `generate` chooses it.
        tokens: steps that are timed.
        draft_tokens: of prompt lookup a round; 0: none.
        repeats: the prompt is a text that repeats itself.
    """

    kind: Literal["decode", "prefill"]
    batch_size: int = 1
    context: int = 128
    capacity: int = 0
    tokens: int = 32
    draft_tokens: int = 0
    repeats: bool = False

    @property
    def name(self) -> str:
        """For tables and JSON."""
        if self.kind == "prefill":
            return f"prefill {self.batch_size} x {self.context}"
        capacity = f" of {self.capacity}" if self.capacity else ""
        drafts = f", {self.draft_tokens} draft tokens" if self.draft_tokens else ""
        repeats = ", repeating" if self.repeats else ""
        return f"decode {self.batch_size} x {self.context}{capacity}{repeats}{drafts}"


def random_prompt(batch_size: int, length: int, vocab_size: int, *, repeats: bool = False) -> np.ndarray:
    """[batch, length] ids, the same for every subject; a text that repeats itself every 16 tokens, if asked for."""
    ids = np.random.default_rng(0).integers(3, min(vocab_size, 30000), (batch_size, length))
    return np.tile(ids[:, :16], (1, -(-length // 16)))[:, :length] if repeats else ids
