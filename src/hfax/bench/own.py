"""hfax as a benchmark subject: its prefill and decode programs, run as in `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax import AutoModelForTPU
from hfax.bench.spec import Case, SubjectSpec, random_prompt

_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "eos_token_id": []}
"""Options of every call; no token ends it."""


def load(spec: SubjectSpec) -> Any:
    """Load the model, with random weights for a config.json."""
    if spec.model.endswith(".json"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(Path(spec.model))
        return AutoModelForTPU.from_config(config, dtype=spec.dtype, quantization=spec.quantization)
    return AutoModelForTPU.from_pretrained(spec.model, dtype=spec.dtype, quantization=spec.quantization)


class HfaxSubject:
    """hfax in this process."""

    def __init__(self, spec: SubjectSpec) -> None:
        self.model = load(spec)
        jax.block_until_ready(jax.tree.leaves(self.model.params))
        self._cache_bytes_per_token: float | None = None

    def prepare(self, case: Case) -> Callable[[], tuple[float, list[int]]]:
        """Implements `Subject`."""
        vocab_size = self.model.vocabulary_size or self.model.config.get_text_config().vocab_size
        prompt = random_prompt(case.batch_size, case.context, vocab_size, repeats=case.repeats)
        if case.kind == "prefill":
            return self._prefill(prompt)
        # room for warm-up and timed tokens; max_new_tokens sets the cache capacity
        most = max(case.capacity - prompt.shape[1] - case.draft_tokens - 1, case.tokens + 2)
        drafts = {"prompt_lookup_num_tokens": case.draft_tokens} if case.draft_tokens else {}
        loop, inputs, prompts = self.model.open_call(prompt, max_new_tokens=most, **_GREEDY, **drafts)
        first = jax.block_until_ready(loop.advance(loop.start(inputs), 2))
        before = int(first["step"])
        self._note_cache(first)

        def run() -> tuple[float, list[int]]:
            state = jax.block_until_ready(jax.tree.map(jnp.copy, first))  # the program donates its state
            start = time.perf_counter()
            state = jax.block_until_ready(loop.advance(state, before + case.tokens))
            seconds = time.perf_counter() - start
            at = prompts.padded_length
            steps = int(state["step"])
            tokens = np.array(state["tokens"])[0, at : at + before + case.tokens].tolist()
            # a speculative round can overshoot the requested tokens, up to the limit
            return seconds * case.tokens / (steps - before), tokens

        run()
        return run

    def _prefill(self, prompt: np.ndarray) -> Callable[[], tuple[float, list[int]]]:
        def run() -> tuple[float, list[int]]:
            start = time.perf_counter()
            loop, inputs, _ = self.model.open_call(prompt, max_new_tokens=1, **_GREEDY)
            state = jax.block_until_ready(loop.start(inputs))
            seconds = time.perf_counter() - start
            return seconds, np.array(state["tokens"])[0, prompt.shape[1] : prompt.shape[1] + 1].tolist()

        run()
        return run

    def _note_cache(self, state: dict[str, Any]) -> None:
        batch, capacity = state["tokens"].shape
        arrays = [a for a in jax.tree.leaves(state["cache"]) if a.ndim > 2 and a.shape[-2] == capacity]
        self._cache_bytes_per_token = sum(a.nbytes for a in arrays) / (batch * capacity)

    def facts(self) -> dict[str, Any]:
        """Implements `Subject`."""
        device = self.model.jax_device
        stats = device.memory_stats() or {} if device.platform != "cpu" else {}
        return {
            "device": f"{device.platform} {device.device_kind}",
            "dtype_of_weights": str(self.model.dtype).removeprefix("torch."),
            "num_parameters": self.model.num_parameters(),
            "weight_bytes": sum(p.nbytes for p in self.model.params.values()),
            "weight_bytes_a_step": self._weight_bytes_a_step(),
            "cache_bytes_a_token": self._cache_bytes_per_token,
            "product_parameters": self._product_parameters(),
            "device_peak_bytes": stats.get("peak_bytes_in_use"),
        }

    def _weight_bytes_a_step(self) -> int | None:
        """Weight bytes read per step: all except untied embedding tables; None for mixture-of-experts models."""
        import torch

        module = self.model.skeleton.module
        if any(p.ndim > 2 for p in self.model.params.values()):
            return None
        tables = {
            f"{path}.weight" for path, part in module.named_modules() if isinstance(part, torch.nn.Embedding)
        } - set(self.model.parts.tied.values())
        return sum(p.nbytes for n, p in self.model.params.items() if n not in tables)

    def _product_parameters(self) -> int:
        """Parameters of the linear layers without the LM head, used for every prompt token."""
        import torch

        module = self.model.skeleton.module
        head = module.get_output_embeddings()
        parts = (p for p in module.modules() if isinstance(p, torch.nn.Linear) and p is not head)
        return sum(p.in_features * p.out_features for p in parts)
