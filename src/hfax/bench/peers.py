"""What else a user could run: transformers in two forms, and the plain recipe with torchax.

Each takes the time of a call that writes all tokens less that of one that writes the first token only, so that a step is what the
user's call pays for it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from hfax.bench.spec import Case, SubjectKind, SubjectSpec, random_prompt

_ENOUGH_S, _MOST_PAIRS = 1.0, 9
"""A difference is of medians over so many seconds of calls, and no more than so many pairs of them."""
Run = Callable[[], tuple[float, list[int]]]


def _load(spec: SubjectSpec) -> Any:
    if spec.model.endswith(".json"):
        config = transformers.AutoConfig.from_pretrained(Path(spec.model))
        dtype = config.dtype or torch.float32 if spec.dtype == "auto" else getattr(torch, spec.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the weights that hfax draws
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=spec.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = model.eval()
    model = model.to(device)
    model.generation_config.eos_token_id = None
    return model


class _Peer:
    """Common: the model, its sizes, and measuring by difference."""

    def __init__(self, spec: SubjectSpec) -> None:
        self.spec = spec
        self.model = _load(spec)

    def facts(self) -> dict[str, Any]:
        """See `Subject`."""
        return {"weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters())}

    def _prompt(self, case: Case) -> torch.Tensor:
        vocab_size = self.model.config.get_text_config().vocab_size
        ids = random_prompt(case.batch_size, case.context, vocab_size, repeats=case.repeats)
        return torch.from_numpy(ids).to(self.model.device)

    def generate(self, case: Case, ids: torch.Tensor) -> Callable[[int], list[int]]:
        """What writes that many tokens after the prompts; gives those of the first."""
        raise NotImplementedError

    def prepare(self, case: Case) -> Run:
        """See `Subject`."""
        generate = self.generate(case, self._prompt(case))

        def timed(tokens: int) -> tuple[float, list[int]]:
            _synchronize()
            start = time.perf_counter()
            written = generate(tokens)
            _synchronize()
            return time.perf_counter() - start, written

        def run() -> tuple[float, list[int]]:
            if case.kind == "prefill":
                return timed(1)
            short, whole, written = [], [], []
            while not whole or (sum(whole) < _ENOUGH_S and len(whole) < _MOST_PAIRS):
                short.append(timed(2)[0])
                seconds, written = timed(2 + case.tokens)
                whole.append(seconds)
            difference = statistics.median(whole) - statistics.median(short)
            if difference <= 0:
                raise RuntimeError("all tokens took no longer than the first: there is too much noise to measure")
            return difference, written

        generate(4)
        run()
        return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Eager(_Peer):
    """transformers as it comes."""

    def generate(self, case: Case, ids: torch.Tensor, **options: Any) -> Callable[[int], list[int]]:
        """See `_Peer`."""
        mask = torch.ones_like(ids)
        if case.draft_tokens:
            options["prompt_lookup_num_tokens"] = case.draft_tokens

        def write(new_tokens: int) -> list[int]:
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)
            return out[0, ids.shape[1] :].tolist()

        return write


class Static(Eager):
    """transformers with its static cache, whose decoding steps it compiles with torch.compile."""

    def generate(self, case: Case, ids: torch.Tensor, **options: Any) -> Callable[[int], list[int]]:
        """See `_Peer`."""
        # transformers compiles by itself on accelerators only, unless told that all devices count. max_cache_len keeps one shape
        # of the cache for calls of any length.
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
    """torchax's extract_jax, transformers' StaticCache as a pytree, one jitted step a token, weights as arguments."""

    def __init__(self, spec: SubjectSpec) -> None:
        import torchax

        super().__init__(spec)
        self.model = self.model.cpu()
        self._weights, self._call = torchax.extract_jax(self.model)

    def generate(self, case: Case, ids: torch.Tensor) -> Callable[[int], list[int]]:
        """See `_Peer`."""
        import jax
        import jax.numpy as jnp

        config = self.model.config
        capacity = case.capacity or case.context + case.tokens + 8
        make_cache = _register_static_cache(config, capacity)
        call, weights = self._call, self._weights

        @jax.jit
        def step(weights: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
            out = call(weights, (ids,), {"position_ids": positions, "past_key_values": cache, "use_cache": True})
            return out.logits[:, -1].argmax(-1)[:, None].astype(jnp.int32), out.past_key_values

        dtype = jnp.dtype(str(self.model.dtype).removeprefix("torch."))
        prompt = jnp.array(ids.numpy(), jnp.int32)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

        def write(new_tokens: int) -> list[int]:
            zeros = jnp.zeros((case.batch_size, config.num_key_value_heads, capacity, head_dim), dtype)
            cache = make_cache([zeros, zeros, jnp.int32(0)] * config.num_hidden_layers)
            positions = jnp.broadcast_to(jnp.arange(case.context)[None], prompt.shape)
            token, cache = step(weights, prompt, positions, cache)
            written = [token]
            for position in range(case.context, case.context + new_tokens - 1):
                token, cache = step(weights, token, jnp.full((case.batch_size, 1), position), cache)
                written.append(token)
            return [int(each[0, 0]) for each in written]

        return write


_patterns: dict[str, Any] = {}


def _register_static_cache(config: Any, capacity: int) -> Callable[[list[Any]], transformers.StaticCache]:
    """Register it with JAX, for jit, and with torch's pytrees, for extract_jax; returns what makes one of its leaves.

    The leaves of a layer are keys, values and the length so far: as a leaf, it is traced and no step traces again.
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
