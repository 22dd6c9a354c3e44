# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 2. Eager against compiled
#
# PyTorch runs a model one operation at a time. XLA compiles the whole model first. This notebook measures both, and shows what the
# first call does and what later calls reuse.

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

# %% [markdown]
# hfax keeps compiled programs on disk. For a true first call, this notebook starts with an empty folder:

# %%
import logging
import os
import sys
import tempfile
import time

os.environ["HFAX_HOME"] = tempfile.mkdtemp()

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import torch
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfax
from hfax.demo import demo_folder

torch.set_num_threads(1)  # a model this small gains nothing from more
tokenizer = AutoTokenizer.from_pretrained(demo_folder())
eager = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")
ids = tokenizer("Return a new list", return_tensors="pt")["input_ids"]

# %% [markdown]
# ## See what is compiled
#
# hfax logs each trace and each compilation. The same lines appear with `hfax generate --verbose`.

# %%
log = logging.getLogger("hfax.phases")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(sys.stdout))

# %% [markdown]
# ## The first call and the next


# %%
def seconds(call, times):
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


with torch.no_grad():
    in_torch = seconds(lambda: eager(ids, use_cache=False).logits, 6)
in_hfax = seconds(lambda: model(ids, use_cache=False).logits, 6)
print(f"PyTorch: first {in_torch[0] * 1000:.1f} ms, last {in_torch[-1] * 1000:.1f} ms")
print(f"hfax:    first {in_hfax[0] * 1000:.1f} ms, last {in_hfax[-1] * 1000:.1f} ms")

# %% [markdown]
# The first call *traces* the model: it runs the PyTorch code once, on placeholders without values, and records the operations. Then XLA
# *compiles* them. The other five calls run the program. None of the model's Python code runs again.

# %% alt="Milliseconds of six calls in PyTorch and in hfax, on a logarithmic scale. The first call of hfax is far slower than the others."
plt.figure(figsize=(6, 3))
plt.plot(range(1, 7), [s * 1000 for s in in_torch], "o-", label="PyTorch, eager")
plt.plot(range(1, 7), [s * 1000 for s in in_hfax], "s-", label="hfax")
plt.yscale("log")
plt.xlabel("call")
plt.ylabel("milliseconds")
plt.legend()
plt.show()

# %% [markdown] tags=["by-hand"]
# #### By hand: jax.jit around a torchax function
#
# `jax.jit` does the tracing and calls XLA. The list `traces` grows when the Python function runs, so it counts traces. The flag
# `use_cache` is fixed inside the function: as an argument it would become an array, and the model's `if use_cache` would fail.

# %% tags=["by-hand"]
hfax.register_pytrees()
weights, function = torchax.extract_jax(eager)
traces = []


@jax.jit
def forward(weights, ids):
    traces.append(ids.shape)
    return function(weights, (ids,), {"use_cache": False}).logits


for _ in range(3):
    by_hand = forward(weights, jnp.array(ids.numpy()))
print("calls: 3, traces:", traces)
torch.testing.assert_close(torch.tensor(by_hand.__array__()), model(ids, use_cache=False).logits, atol=1e-3, rtol=1e-3)
print("the same logits")

# %% [markdown]
# ## A program has fixed shapes
#
# A compiled program knows the shape of every array. Another shape needs another program. Five tokens have one already:

# %%
for length in (4, 4, 5, 6):
    start = time.perf_counter()
    model(torch.ones(1, length, dtype=torch.long), use_cache=False)
    print(f"{length} tokens: {time.perf_counter() - start:.3f} s")

# %% [markdown]
# If every length compiled, generation would be slow: each prompt has another length. So `generate` pads prompts, and a group of
# lengths shares one program. Such a group is called a *bucket*. Prompt buckets are powers of two, from 16 tokens up:

# %%
for length in (3, 9, 16, 17, 30):
    start = time.perf_counter()
    model.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    print(f"prompt of {length} tokens: {time.perf_counter() - start:.3f} s")

# %% [markdown]
# Prompts of 3, 9 and 16 tokens use one pair of programs: one reads the prompt, one generates. Prompts of 17 and 30 tokens need a new
# program for the prompt. Padding goes to the left of the prompt and is masked, so the text does not change.

# %% [markdown] tags=["by-hand"]
# #### By hand: padding to a bucket
#
# For one forward pass, padding on the right is enough. Causal attention never looks ahead, so the prompt does not see the padding.
# Generation appends tokens on the right, so hfax pads on the left, with a mask and with positions that leave the padding out.

# %% tags=["by-hand"]
size = ids.shape[1]
padded = jnp.pad(jnp.array(ids.numpy()), ((0, 0), (0, 16 - size)))
traces.clear()
in_bucket = forward(weights, padded)
forward(weights, jnp.ones_like(padded))
assert jnp.allclose(in_bucket[:, :size], by_hand, atol=1e-3)
print("the same logits for the", size, "tokens of the prompt; traces:", traces)

# %% [markdown]
# ## Programs stay on disk
#
# The folder now holds the programs. A second process loads them. It neither traces nor compiles:

# %%
kept = sorted(Path(os.environ["HFAX_HOME"]).rglob("*"))
print(
    len([f for f in kept if f.is_file()]), "files,", sum(f.stat().st_size for f in kept if f.is_file()) // 1024, "KiB"
)
code = """
import logging, sys, time, torch, hfax
log = logging.getLogger("hfax.phases")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(sys.stdout))
model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")
start = time.perf_counter()
model.generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=4, min_new_tokens=4, do_sample=False)
print(f"first call of the second process: {time.perf_counter() - start:.3f} s")
"""
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
print(done.stdout)
assert "compile" not in done.stdout

# %% [markdown]
# The key of a program covers the versions of the libraries, the device, the model's configuration and the shapes. If one changes, hfax
# compiles again.
#
# ## Generation
#
# Eager generation returns to Python for every operation of every token. hfax's loop runs inside a compiled program. The prompt has five
# tokens, and its bucket was compiled above:

# %% alt="Seconds for 64 tokens: PyTorch's first and second call, hfax's first and second call."
options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
log.setLevel(logging.WARNING)
mask = torch.ones_like(ids)
times = [
    *seconds(lambda: eager.generate(ids, attention_mask=mask, **options), 2),
    *seconds(lambda: model.generate(ids, **options), 2),
]
labels = ["PyTorch, first", "PyTorch, second", "hfax, first", "hfax, second"]
for label, took in zip(labels, times, strict=True):
    print(f"{label:16} {took:6.2f} s  {64 / took:7.0f} tokens/s")
assert eager.generate(ids, attention_mask=mask, **options).tolist() == model.generate(ids, **options).tolist()
print("the same 64 tokens")
plt.figure(figsize=(6, 2.4))
plt.barh(labels, times, color=["#4c8bf5", "#4c8bf5", "#e07b39", "#e07b39"])
plt.gca().invert_yaxis()
plt.xlabel("seconds for 64 tokens")
plt.show()

# %% [markdown]
# [Next](3_when_it_compiles.md): compile before the first request, and find out why something compiled again.
