"""The plain torchax recipe with `hfax.register_pytrees()`: outputs and caches leave a jitted function, and go in again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
import transformers
from torchax import interop

import hfax

# torchax makes positions of 64 bits, which JAX narrows
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
_CACHE = "cache"  # `past_key_values` until transformers 5.24
_IDS = torch.arange(12).reshape(2, 6)
_NEXT = torch.tensor([[7], [9]])
_SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama() -> Any:
    config = transformers.LlamaConfig(**_SIZES, hidden_size=32, intermediate_size=64, num_key_value_heads=2)
    torch.manual_seed(0)
    return _registered(transformers.LlamaForCausalLM(config))


def _registered(model: Any) -> Any:
    hfax.register_pytrees()  # once the module with the model's outputs is imported
    return model.eval()


def _steps(model: Any, cache: Any = None, **inputs: torch.Tensor) -> list[np.ndarray]:
    """Logits of the prompt and of one more token, by torch."""
    with torch.no_grad():
        first = model(**inputs, use_cache=True, **{_CACHE: cache})
        name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        second = model(**{**inputs, name: _NEXT, _CACHE: first.past_key_values}, use_cache=True)
    return [first.logits.numpy(), second.logits.numpy()]


def _jitted_steps(model: Any, cache: Any = None, **inputs: torch.Tensor) -> tuple[list[np.ndarray], Any]:
    weights, forward = torchax.extract_jax(model)
    arrays = {name: jnp.asarray(value.numpy()) for name, value in inputs.items()}
    step = jax.jit(lambda w, cache, inputs: forward(w, (), {**inputs, _CACHE: cache, "use_cache": True}))
    first = step(weights, cache, arrays)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    second = step(weights, first.past_key_values, {**arrays, name: jnp.asarray(_NEXT.numpy())})
    return [np.asarray(first.logits), np.asarray(second.logits)], second


def _close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_dynamic_cache_leaves_a_jitted_forward_and_goes_into_the_next() -> None:
    model = _llama()
    found, output = _jitted_steps(model, input_ids=_IDS)
    assert type(output) is transformers.modeling_outputs.CausalLMOutputWithPast
    assert type(output.past_key_values) is transformers.DynamicCache
    assert isinstance(output.past_key_values.layers[0].keys, jax.Array)
    _close(found, _steps(model, input_ids=_IDS))


def test_encoder_decoder_cache_leaves_a_jitted_forward_and_goes_into_the_next() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    model = _registered(transformers.T5ForConditionalGeneration(config))
    inputs = {"input_ids": _IDS, "decoder_input_ids": _IDS[:, :3]}
    found, output = _jitted_steps(model, **inputs)
    assert type(output.past_key_values) is transformers.EncoderDecoderCache
    _close(found, _steps(model, **inputs))


def _static_cache(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    return cache


def test_static_cache_made_on_the_cpu_serves_a_jitted_step() -> None:
    """Its layers remember the CPU, and made their positions there: "mixed math between XLATensor and torch.Tensor"."""
    model = _llama()
    on_device = torchax.default_env().t2j_copy(_static_cache(model))
    found, output = _jitted_steps(model, on_device, input_ids=_IDS)
    assert type(output.past_key_values) is transformers.StaticCache
    _close(found, _steps(model, _static_cache(model), input_ids=_IDS))


def test_views_between_torch_and_jax_reach_into_a_cache() -> None:
    weights, forward = torchax.extract_jax(_llama())
    cache = forward(weights, (jnp.asarray(_IDS.numpy()),), {"use_cache": True}).past_key_values
    seen = interop.torch_view(cache)
    assert type(seen.layers[0].keys) is torchax.tensor.Tensor
    assert isinstance(interop.jax_view(seen).layers[0].keys, jax.Array)


_GLOBAL = """
import torch, torchax, transformers, hfax
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.arange(6)[None]
with torch.no_grad():
    theirs = model(ids, use_cache=True)
hfax.register_pytrees()
torchax.enable_globally()
model = model.to("jax")
compiled = torchax.compile(model)
ours = compiled(ids.to("jax"))  # use_cache=True would be traced as a number
assert type(ours.past_key_values) is transformers.DynamicCache
torch.testing.assert_close(ours.logits.to("cpu"), theirs.logits, atol=1e-5, rtol=1e-5)
print("equal")
"""


def test_torchax_compile_with_torchax_enabled_globally_returns_outputs_with_caches() -> None:
    """In a process of its own, since torchax's global mode changes torch for everyone."""
    done = subprocess.run([sys.executable, "-c", _GLOBAL], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]
