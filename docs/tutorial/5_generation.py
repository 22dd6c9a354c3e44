# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 5. Generation
#
# A language model writes one token at a time. Each token attends to all before it, so the arrays grow. A compiled program has fixed
# shapes. This notebook shows the problem, the usual answer, and what it is worth.

# %% [markdown] tags=["setup"]
# #### Setup: installs hfax if this machine does not have it

# %% tags=["setup"]
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("hfax") is None:  # a new Colab machine
    extra = (
        "tpu"
        if Path("/dev/vfio").exists() or Path("/dev/accel0").exists()
        else "cuda"
        if shutil.which("nvidia-smi")
        else "cpu"
    )
    source = f"hfax[{extra},train,serve,bench] @ git+https://github.com/hfax/hfax"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import os
import tempfile
import time

os.environ["HFAX_HOME"] = tempfile.mkdtemp()  # no programs from earlier runs

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfax
from hfax.demo import demo_folder

torch.set_num_threads(1)  # a model this small gains nothing from more
tokenizer = AutoTokenizer.from_pretrained(demo_folder(), padding_side="left")
eager = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")
# Plain greedy decoding: no penalties, and no token that ends the text.
eager.generation_config = model.generation_config = transformers.GenerationConfig(pad_token_id=0)
prompt = tokenizer("Return a new list", return_tensors="pt")

# %% [markdown]
# ## Why shapes grow
#
# Attention needs the keys and values of all earlier tokens. A *KV cache* keeps them, so that a step computes only the new token's.
# transformers' default cache appends:

# %%
with torch.no_grad():
    output = eager(**prompt, use_cache=True)
    for _ in range(4):
        print("keys of a layer [batch, heads, tokens, width]:", tuple(output.past_key_values.layers[0].keys.shape))
        token = output.logits[:, -1:].argmax(-1)
        output = eager(token, past_key_values=output.past_key_values, use_cache=True)

# %% [markdown]
# Each step has another shape. With `jax.jit`, each would be traced and compiled.

# %% [markdown] tags=["by-hand"]
# #### By hand: a cache that grows, in a jitted step
#
# `hfax.register_pytrees()` makes transformers' caches pytrees: JAX can then take them apart into arrays, pass these to a compiled
# function, and rebuild them. The step works. It is traced once for each token.

# %% tags=["by-hand"]
hfax.register_pytrees()
weights, function = torchax.extract_jax(eager)
traces = []


@jax.jit
def growing_step(weights, cache, ids):
    traces.append(ids.shape)
    return function(weights, (), {"input_ids": ids, "cache": cache, "use_cache": True})


start = time.perf_counter()
ids = jnp.array(prompt["input_ids"].numpy())
output, tokens = growing_step(weights, None, ids), []
for _ in range(4):
    tokens.append(int(output.logits[0, -1].argmax()))
    output = growing_step(weights, output.past_key_values, jnp.array([[tokens[-1]]]))
print(f"{len(traces)} traces for {len(tokens)} tokens, {time.perf_counter() - start:.1f} s")
expected = eager.generate(**prompt, max_new_tokens=4)[0, ids.shape[1] :].tolist()
assert tokens == expected
print("the same tokens as transformers:", tokens)

# %% [markdown]
# ## A static cache
#
# A static cache has room for all tokens from the start. A step writes at its position, and a mask hides the empty places. No shape
# changes, so one program serves all steps.

# %% alt="Two grids of tokens over steps. The growing cache has one more column at each step. The static cache always has the same columns, of which more are filled."
steps, room = 8, 12
grow = np.full((steps, room), np.nan)
static = np.zeros((steps, room))
for step in range(steps):
    grow[step, : step + 3] = 1
    static[step, : step + 3] = 1
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
for axis, grid, title in zip(
    axes, (grow, static), ("growing: another shape each step", "static: one shape"), strict=True
):
    axis.pcolormesh(
        grid,
        cmap=plt.matplotlib.colors.ListedColormap(["#76808f44", "#4c8bf5"]),
        vmin=0,
        vmax=1,
        edgecolors="#76808f",
        lw=0.5,
    )
    axis.set(title=title, xlabel="place in the cache")
axes[0].set_ylabel("step")
axes[0].invert_yaxis()  # of both, which share it
figure.tight_layout()
plt.show()

# %% [markdown]
# The price is memory for places that stay empty, and on some devices the time to read them. hfax rounds the capacity up to a power of
# two, so that calls of similar lengths share a program.
#
# `model.generate` uses such a cache, and its loop runs inside the program: Python is not involved until the end.

# %%
ours = model.generate(**prompt, max_new_tokens=48)
theirs = eager.generate(**prompt, max_new_tokens=48)
assert ours.tolist() == theirs.tolist()
print(tokenizer.decode(ours[0], skip_special_tokens=True))

# %% [markdown] tags=["by-hand"]
# #### By hand: StaticCache as a pytree
#
# transformers has a static cache, too. The step takes it and returns it. `donate_argnums` lets XLA write into the old cache's memory.
# Here Python runs the loop, one call a token. hfax puts the loop into the program with `jax.lax.while_loop`.

# %% tags=["by-hand"]
cache = transformers.StaticCache(config=eager.config, max_cache_len=64)
heads, width = eager.config.num_key_value_heads, eager.config.head_dim
cache.early_initialization(1, heads, width, torch.float32, torch.device("cpu"))
cache = torchax.default_env().t2j_copy(cache)
traces.clear()


def static_step(weights, cache, ids):
    traces.append(ids.shape)
    output = function(weights, (), {"input_ids": ids, "cache": cache, "use_cache": True})
    return output.logits[:, -1:].argmax(-1), output.past_key_values


static_step = jax.jit(static_step, donate_argnums=1)
token, cache = static_step(weights, cache, ids)
tokens = [int(token[0, 0])]
for _ in range(47):
    token, cache = static_step(weights, cache, token)
    tokens.append(int(token[0, 0]))
assert tokens == ours[0, ids.shape[1] :].tolist()
print("48 tokens, the same as hfax's; traces:", traces)

# %% [markdown]
# ## Time
#
# The same lengths on one plot. Programs are compiled before; the previous notebooks measured first calls.

# %% alt="Seconds over the number of new tokens, for transformers in eager mode and for hfax."
lengths = (16, 32, 64, 96, 112)
times = {"transformers, eager": [], "hfax": []}
model.generate(**prompt, max_new_tokens=112)
for length in lengths:
    for name, generate in (("transformers, eager", eager.generate), ("hfax", model.generate)):
        start = time.perf_counter()
        generate(**prompt, max_new_tokens=length)
        times[name].append(time.perf_counter() - start)
for name, row in times.items():
    print(f"{name:20}", "  ".join(f"{n} tokens {s:.2f} s" for n, s in zip(lengths, row, strict=True)))
plt.figure(figsize=(6, 3))
for (name, row), mark in zip(times.items(), "os", strict=True):
    plt.plot(lengths, row, f"{mark}-", label=name)
plt.xlabel("new tokens")
plt.ylabel("seconds")
plt.legend()
plt.show()

# %% [markdown]
# A model this small spends most of eager mode's time in Python. Larger models gain less; [Performance](../performance.md) has their
# measurements.
#
# ## Batches of different lengths
#
# Pad prompts on the left. Each row gets the tokens that it gets alone:

# %%
prompts = ["Return", "If the file does not exist,"]
together = model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=12)
for row, text in zip(together, prompts, strict=True):
    alone = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12)[0]
    assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(alone, skip_special_tokens=True)
    print(tokenizer.decode(row, skip_special_tokens=True))

# %% [markdown]
# ## Sampling
#
# Options have transformers' names. A seed makes a sample repeatable:

# %%
samples = {}
for name, seed in (("first", 1), ("second", 2), ("again", 1)):
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=True, temperature=0.8, top_p=0.95, seed=seed)
    samples[name] = tokenizer.decode(ids[0], skip_special_tokens=True)
    print(f"seed {seed}: {samples[name]}")
assert samples["first"] == samples["again"] != samples["second"]

# %% [markdown]
# [Next](6_tensor_parallelism.md): a model on eight devices.
