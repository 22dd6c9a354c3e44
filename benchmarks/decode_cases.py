"""The ways to decode that `benchmarks/decode.py` measures, each as a function that makes a `generate(new_tokens) -> ids`.

hfax      AutoModelForTPU
eager     transformers, as it comes
static    transformers with its static cache, which compiles the forward pass with torch.compile
recipe    torchax's extract_jax, transformers' StaticCache as a pytree, one jitted step a token, weights as arguments
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

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


def static(folder: Path, prompt: torch.Tensor) -> Generate:
    from transformers import CompileConfig

    # Without disable_compile=False transformers compiles on accelerators only; the cache's length stays the same for every call.
    compile_config = CompileConfig(fullgraph=False, mode="default")
    compile_config._compile_all_devices = True
    return eager(folder, prompt, cache_implementation="static", disable_compile=False, compile_config=compile_config)


def recipe(folder: Path, prompt: torch.Tensor) -> Generate:
    import jax
    import jax.numpy as jnp
    import torchax
    from torch.utils import _pytree as torch_pytree
    from transformers import StaticCache

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = model.config
    env = torchax.default_env()
    capacity = prompt.shape[1] + 64

    def flatten(cache: Any) -> tuple[list[Any], None]:
        return [x for layer in cache.layers for x in (layer.keys, layer.values, layer.cumulative_length)], None

    def unflatten(leaves: Any, _: None = None) -> Any:
        cache = StaticCache(config=config, max_cache_len=capacity)
        for i, layer in enumerate(cache.layers):
            layer.keys, layer.values, layer.cumulative_length = leaves[3 * i : 3 * i + 3]
            layer.is_initialized, layer.device, layer.dtype = (
                True,
                torch.device("jax"),
                getattr(layer.keys, "dtype", None),
            )
        return cache

    torch_pytree.register_pytree_node(StaticCache, flatten, unflatten)
    weights, call = torchax.extract_jax(model)

    @jax.jit
    def step(weights: Any, ids: Any, positions: Any, leaves: list[Any]) -> tuple[Any, list[Any]]:
        with env:
            cache = unflatten(env.j2t_iso(leaves))
        out = call(weights, (ids,), {"position_ids": positions, "past_key_values": cache, "use_cache": True})
        return out.logits[:, -1].argmax(-1)[:, None].astype(jnp.int32), flatten(out.past_key_values)[0]

    shape = (1, config.num_key_value_heads, capacity, config.head_dim)
    dtype = jnp.bfloat16 if model.dtype == torch.bfloat16 else jnp.float32
    ids = jnp.array(prompt.numpy(), jnp.int32)

    def generate(new_tokens: int) -> list[int]:
        leaves: list[Any] = []
        for _ in range(config.num_hidden_layers):
            leaves += [jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0)]
        token, leaves = step(weights, ids, jnp.arange(ids.shape[1])[None], leaves)
        written = [token]
        for position in range(ids.shape[1], ids.shape[1] + new_tokens - 1):
            token, leaves = step(weights, token, jnp.array([[position]]), leaves)
            written.append(token)
        return [int(t[0, 0]) for t in written]

    return generate


CASES: dict[str, Callable[[Path, torch.Tensor], Generate]] = {
    "hfax": hfax,
    "eager": eager,
    "static": static,
    "recipe": recipe,
}
