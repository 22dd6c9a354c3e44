"""The ways to decode that `benchmarks/decode.py` compares, and the measurement of one of them in this process.

hfax      AutoModelForTPU: two compiled programs, the loop on the device
eager     transformers, as it comes
static    transformers with its static cache, whose decoding steps it compiles with torch.compile
recipe    torchax's extract_jax, transformers' StaticCache as a pytree, one jitted step a token, weights as arguments

    python benchmarks/decode_cases.py eager FOLDER    # one line of JSON

A case is a function that loads the checkpoint in FOLDER and returns `generate(new_tokens) -> ids`; it does not know how it is
timed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PROMPT_TOKENS = 64
NEW_TOKENS = 64
WARM_UP_TOKENS = 4
"""Enough to compile all that a longer text needs; `measure` checks that."""
MIN_PAIRS, MIN_S, ENOUGH_S = 3, 1.0, 20.0
"""Pairs of calls, one for the first token and one for all: so many and for so long, unless it takes too long."""

Generate = Callable[[int], list[int]]
"""Writes that many tokens after the prompt and returns them."""


def hfax(folder: Path, prompt: torch.Tensor) -> Generate:
    from hfax import AutoModelForTPU

    model = AutoModelForTPU.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    return lambda n: model.generate(prompt, max_new_tokens=n, do_sample=False)[0, prompt.shape[1] :].tolist()


def eager(folder: Path, prompt: torch.Tensor, **options: Any) -> Generate:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(prompt)

    def generate(new_tokens: int) -> list[int]:
        ids = model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)
        return ids[0, prompt.shape[1] :].tolist()

    return generate


def static(folder: Path, prompt: torch.Tensor, backend: str = "inductor") -> Generate:
    # transformers compiles by itself on accelerators only, unless told that all devices count. max_cache_len keeps one shape
    # of the cache for calls of any length.
    compile_config = transformers.CompileConfig(mode="default", backend=backend)
    compile_config._compile_all_devices = True
    length = PROMPT_TOKENS + NEW_TOKENS
    return eager(
        folder,
        prompt,
        cache_implementation="static",
        max_cache_len=length,
        disable_compile=False,
        compile_config=compile_config,
    )


def recipe(folder: Path, prompt: torch.Tensor) -> Generate:
    import jax
    import jax.numpy as jnp
    import torchax

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    make_cache = _register_static_cache(config)
    weights, call = torchax.extract_jax(model)

    @jax.jit
    def step(weights: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        out = call(weights, (ids,), {"position_ids": positions, "past_key_values": cache, "use_cache": True})
        return out.logits[:, -1].argmax(-1)[:, None].astype(jnp.int32), out.past_key_values

    dtype = jnp.bfloat16 if model.dtype == torch.bfloat16 else jnp.float32
    ids = jnp.array(prompt.numpy(), jnp.int32)

    def generate(new_tokens: int) -> list[int]:
        zeros = jnp.zeros((1, heads, PROMPT_TOKENS + NEW_TOKENS, dim), dtype)
        cache = make_cache([zeros, zeros, jnp.int32(0)] * config.num_hidden_layers)
        token, cache = step(weights, ids, jnp.arange(PROMPT_TOKENS)[None], cache)
        written = [token]
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + new_tokens - 1):
            token, cache = step(weights, token, jnp.array([[position]]), cache)
            written.append(token)
        return [int(each[0, 0]) for each in written]

    return generate


def _register_static_cache(config: Any) -> Callable[[list[Any]], transformers.StaticCache]:
    """Register it with JAX, for jit, and with torch's pytrees, for extract_jax; returns what makes one of its leaves.

    The leaves of a layer are keys, values and the length so far: as a leaf, it is traced and no step traces again.
    """
    import jax
    from torch.utils import _pytree as torch_pytree

    pattern = transformers.StaticCache(config=config, max_cache_len=PROMPT_TOKENS + NEW_TOKENS)
    for layer in pattern.layers:
        layer.is_initialized, layer.device = True, torch.device("jax")

    def flatten(cache: Any) -> tuple[list[Any], None]:
        return [leaf for layer in cache.layers for leaf in (layer.keys, layer.values, layer.cumulative_length)], None

    def unflatten(leaves: Any, _: None = None) -> transformers.StaticCache:
        leaves = iter(leaves)
        cache = copy.copy(pattern)
        cache.layers = [copy.copy(layer) for layer in pattern.layers]
        for layer in cache.layers:
            layer.keys, layer.values, layer.cumulative_length = next(leaves), next(leaves), next(leaves)
        return cache

    jax.tree_util.register_pytree_node(transformers.StaticCache, flatten, lambda _, leaves: unflatten(leaves))
    torch_pytree.register_pytree_node(transformers.StaticCache, flatten, unflatten)
    return unflatten


CASES: dict[str, Callable[..., Generate]] = {"hfax": hfax, "eager": eager, "static": static, "recipe": recipe}


def peak_bytes() -> int:
    """Of this process; getrusage would count its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Compilations:
    """How many programs XLA and torch.compile make in this process, from now on. Imports neither: a case pays for what it uses."""

    def __init__(self) -> None:
        self._by_xla = 0
        if "jax" in sys.modules:
            import jax.monitoring

            jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self._by_xla += event == "/jax/core/compile/backend_compile_duration"

    @property
    def count(self) -> int:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return self._by_xla + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def _timed(generate: Generate, new_tokens: int) -> tuple[float, list[int]]:
    start = time.perf_counter()
    tokens = generate(new_tokens)
    seconds = time.perf_counter() - start
    if len(tokens) != new_tokens:
        raise RuntimeError(f"{len(tokens)} tokens were written, not {new_tokens}")
    return seconds, tokens


def measure(make: Callable[[torch.Tensor], Generate]) -> dict[str, Any]:
    """Load, warm up, and time pairs of calls: one that writes the first token only, and one that writes all."""
    prompt = torch.from_numpy(np.random.default_rng(0).integers(3, 190, (1, PROMPT_TOKENS)))
    start = time.perf_counter()
    generate = make(prompt)
    load_s = time.perf_counter() - start
    compilations = Compilations()
    first_call_s, _ = _timed(generate, WARM_UP_TOKENS)
    _timed(generate, 1)
    compiled = compilations.count
    short, whole, tokens = [], [], []
    start = time.perf_counter()
    while (passed := time.perf_counter() - start) < MIN_S or (len(whole) < MIN_PAIRS and passed < ENOUGH_S):
        short.append(_timed(generate, 1)[0])
        seconds, tokens = _timed(generate, NEW_TOKENS)
        whole.append(seconds)
    decode_s = statistics.median(whole) - statistics.median(short)
    if decode_s <= 0:
        raise RuntimeError("all tokens took no longer than the first: there is too much noise to measure")
    if compilations.count != compiled:
        raise RuntimeError(f"{compilations.count - compiled} programs were compiled while the clock ran")
    return {
        "tokens_per_second": (NEW_TOKENS - 1) / decode_s,
        "first_token_seconds": statistics.median(short),
        "first_call_seconds": round(first_call_s, 2),
        "load_seconds": round(load_s, 2),
        "peak_gb": round(peak_bytes() / 1e9, 3),
        "num_tokens": len(tokens),
        "num_distinct_tokens": len(set(tokens)),
        "tokens_sha256": hashlib.sha256(repr(tokens).encode()).hexdigest(),
    }


def main() -> None:
    """Measure one case and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    make = functools.partial(CASES[options.case], options.folder)
    if options.case == "static":
        make = functools.partial(make, backend=options.torch_backend)
    print(json.dumps(_with_phases(make) if options.case == "hfax" else measure(make)))


def _with_phases(make: Callable[[torch.Tensor], Generate]) -> dict[str, Any]:
    """`measure`, and the seconds that hfax says it traced and compiled."""
    from hfax.phases import PhaseEvent, listen

    seconds: dict[str, float] = defaultdict(float)

    def hear(event: PhaseEvent) -> None:
        seconds[event.name] += event.seconds or 0.0

    with listen(hear):
        figures = measure(make)
    return figures | {"trace_seconds": round(seconds["trace"], 2), "compile_seconds": round(seconds["compile"], 2)}


if __name__ == "__main__":
    main()
