"""Benchmark subjects and cases: plain data, exchanged between processes as JSON. Has no heavy imports."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

SubjectKind = Literal["hfax", "eager", "static", "recipe"]
"""hfax; eager transformers; transformers with static cache and torch.compile; torchax's extract_jax with one jit call per token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectSpec:
    """An implementation to benchmark.

    Args:
        name: name in tables.
        kind: the implementation.
        model: Hub id or folder; or a config.json, for random weights.
        dtype: "auto", "float32", "bfloat16" or "float16".
        quantization: hfax only: "int8", "int4" or None.
        torch_backend: the torch.compile backend.
    """

    name: str
    kind: SubjectKind
    model: str
    dtype: str = "auto"
    quantization: str | None = None
    torch_backend: str = "inductor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Args:
        kind: "decode": time of `tokens` steps after `context` tokens; "prefill": time to the first new token for a prompt of
            `context` tokens.
        batch_size: number of sequences.
        context: tokens before the first measured one.
        capacity: cache capacity in tokens; 0: as chosen by `generate`.
        tokens: number of timed steps.
        draft_tokens: prompt-lookup draft tokens per round; 0: no speculative decoding.
        repeats: use a prompt with a repeating pattern.
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
        """Name in tables and JSON."""
        if self.kind == "prefill":
            return f"prefill {self.batch_size} x {self.context}"
        capacity = f" of {self.capacity}" if self.capacity else ""
        drafts = f", {self.draft_tokens} draft tokens" if self.draft_tokens else ""
        repeats = ", repeating" if self.repeats else ""
        return f"decode {self.batch_size} x {self.context}{capacity}{repeats}{drafts}"


def random_prompt(batch_size: int, length: int, vocab_size: int, *, repeats: bool = False) -> np.ndarray:
    """Random token ids, [batch, length], the same for every subject; with `repeats`, a pattern of 16 tokens repeats."""
    ids = np.random.default_rng(0).integers(3, min(vocab_size, 30000), (batch_size, length))
    return np.tile(ids[:, :16], (1, -(-length // 16)))[:, :length] if repeats else ids
