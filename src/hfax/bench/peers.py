"""Peers to compare with: transformers in two modes, and the plain torchax recipe.

Decode time runs from the second token of a generate call to its last, so it includes the per-step overhead of a user's call.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from hfax.bench.spec import Case, SubjectKind, SubjectSpec, random_prompt

Run = Callable[[], tuple[float, list[int]]]
Note = Callable[[int], None]
"""Takes the number of tokens of each sequence that have been computed since the last call."""


def _load(spec: SubjectSpec) -> Any:
    if spec.model.endswith(".json"):
        config = transformers.AutoConfig.from_pretrained(Path(spec.model))
        dtype = config.dtype or torch.float32 if spec.dtype == "auto" else getattr(torch, spec.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random weights as in hfax
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=spec.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = model.eval()
    model = model.to(device)
    model.generation_config.eos_token_id = None
    return model


class _Peer:
    """Shared by all peers: the model, its sizes, and timing by difference."""

    def __init__(self, spec: SubjectSpec) -> None:
        self.spec = spec
        self.model = _load(spec)

    def facts(self) -> dict[str, Any]:
        """Implements `Subject`."""
        return {"weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters())}

    def _prompt(self, case: Case) -> torch.Tensor:
        vocab_size = self.model.config.get_text_config().vocab_size
        ids = random_prompt(case.batch_size, case.context, vocab_size, repeats=case.repeats)
        return torch.from_numpy(ids).to(self.model.device)

    def generate(self, case: Case, ids: torch.Tensor) -> Callable[[int, Note], list[int]]:
        """Return a function that generates a number of tokens, notes those it waited for, and returns the first sequence's."""
        raise NotImplementedError

    def prepare(self, case: Case) -> Run:
        """Implements `Subject`."""
        generate = self.generate(case, self._prompt(case))

        def prefill() -> tuple[float, list[int]]:
            _synchronize()
            start = time.perf_counter()
            written = generate(1, lambda _: None)
            _synchronize()
            return time.perf_counter() - start, written

        def decode() -> tuple[float, list[int]]:
            times: list[tuple[float, int]] = []  # when tokens were there, and how many were then
            written = generate(2 + case.tokens, lambda count: times.append((time.perf_counter(), count)))
            (start, _), *later = times[1:]
            return (later[-1][0] - start) * case.tokens / sum(count for _, count in later), written

        run = prefill if case.kind == "prefill" else decode
        generate(4, lambda _: None)
        run()
        return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Steps(BaseStreamer):
    """Notes the tokens of each step of `generate`, which puts the prompt first."""

    def __init__(self, note: Note) -> None:
        self._note, self._prompt_is_next = note, True

    def put(self, value: torch.Tensor) -> None:
        """Implements `BaseStreamer`: (batch,) of a step, or (1, tokens) of an assisted one."""
        if not self._prompt_is_next:
            self._note(value.shape[1] if value.ndim > 1 else 1)
        self._prompt_is_next = False

    def end(self) -> None:
        """Implements `BaseStreamer`."""


class Eager(_Peer):
    """transformers in eager mode."""

    def generate(self, case: Case, ids: torch.Tensor, **options: Any) -> Callable[[int, Note], list[int]]:
        """Implements `_Peer`."""
        mask = torch.ones_like(ids)
        if case.draft_tokens:
            options["prompt_lookup_num_tokens"] = case.draft_tokens

        def write(new_tokens: int, note: Note) -> list[int]:
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, streamer=_Steps(note), **options
            )
            return out[0, ids.shape[1] :].tolist()

        return write


class Static(Eager):
    """transformers with its static cache and decoding steps compiled by torch.compile."""

    def generate(self, case: Case, ids: torch.Tensor, **options: Any) -> Callable[[int, Note], list[int]]:
        """Implements `_Peer`."""
        # transformers compiles only on accelerators by default; _compile_all_devices overrides this. max_cache_len keeps the cache
        # shape fixed for calls of any length.
        compile_config: Any = transformers.CompileConfig(mode="default", backend=self.spec.torch_backend)
        compile_config._compile_all_devices = True
        return super().generate(
            case,
            ids,
            cache_implementation="static",
            max_cache_len=case.capacity or case.context + case.tokens + 8,
            disable_compile=False,
            compile_config=compile_config,
        )


class Recipe(_Peer):
    """torchax's extract_jax, transformers' StaticCache as a pytree, one jitted step per token, weights as arguments."""

    def __init__(self, spec: SubjectSpec) -> None:
        import torchax

        super().__init__(spec)
        self.model = self.model.cpu()
        self._weights, self._call = torchax.extract_jax(self.model)

    def generate(self, case: Case, ids: torch.Tensor) -> Callable[[int, Note], list[int]]:
        """Implements `_Peer`."""
        import jax
        import jax.numpy as jnp

        config = self.model.config
        capacity = case.capacity or case.context + case.tokens + 8
        make_cache = _register_static_cache(config, capacity)
        call, weights = self._call, self._weights

        @jax.jit
        def step(weights: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
            out = call(weights, (ids,), {"position_ids": positions, "cache": cache, "use_cache": True})
            return out.logits[:, -1].argmax(-1)[:, None].astype(jnp.int32), out.cache

        dtype = jnp.dtype(str(self.model.dtype).removeprefix("torch."))
        prompt = jnp.array(ids.numpy(), jnp.int32)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

        def write(new_tokens: int, note: Note) -> list[int]:
            zeros = jnp.zeros((case.batch_size, config.num_key_value_heads, capacity, head_dim), dtype)
            cache = make_cache([zeros, zeros, jnp.int32(0)] * config.num_hidden_layers)
            positions = jnp.broadcast_to(jnp.arange(case.context)[None], prompt.shape)
            token, cache = step(weights, prompt, positions, cache)
            written = [token]
            for position in range(case.context, case.context + new_tokens - 1):
                token, cache = step(weights, token, jnp.full((case.batch_size, 1), position), cache)
                written.append(token)
                if len(written) == 2:  # steps are dispatched ahead, so only the first two and all are waited for
                    token.block_until_ready()
                    note(1)
                    note(1)
            token.block_until_ready()
            note(len(written) - 2)
            return [int(each[0, 0]) for each in written]

        return write


_patterns: dict[str, Any] = {}


def _register_static_cache(config: Any, capacity: int) -> Callable[[list[Any]], transformers.StaticCache]:
    """Register StaticCache as a pytree with JAX (for jit) and torch (for extract_jax); returns its unflatten function.

    A layer's leaves are its keys, values and current length; as a leaf, the length is traced, so steps do not retrace.
    """
    import jax
    from torch.utils import _pytree as torch_pytree

    pattern: Any = transformers.StaticCache(config=config, max_cache_len=capacity)
    for layer in pattern.layers:
        layer.is_initialized, layer.device = True, torch.device("jax")
    first = not _patterns
    _patterns["of the case"] = pattern

    def flatten(cache: Any) -> tuple[list[Any], None]:
        return [leaf for layer in cache.layers for leaf in (layer.keys, layer.values, layer.cumulative_length)], None

    def unflatten(leaves: Any, _: None = None) -> transformers.StaticCache:
        leaves = iter(leaves)
        pattern = _patterns["of the case"]
        cache = copy.copy(pattern)
        cache.layers = [copy.copy(layer) for layer in pattern.layers]
        for layer in cache.layers:
            layer.keys, layer.values, layer.cumulative_length = next(leaves), next(leaves), next(leaves)
        return cache

    if first:
        jax.tree_util.register_pytree_node(transformers.StaticCache, flatten, lambda _, leaves: unflatten(leaves))
        torch_pytree.register_pytree_node(transformers.StaticCache, flatten, unflatten)
    return unflatten


PEERS: dict[SubjectKind, Callable[[SubjectSpec], Any]] = {"eager": Eager, "static": Static, "recipe": Recipe}
