# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 3. When it compiles
#
# A server should not compile while a user waits. This notebook compiles ahead of time. Then it changes one thing after another, to see
# which of them need a new program.

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

os.environ["HFAX_HOME"] = tempfile.mkdtemp()  # no programs from earlier runs

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import torch
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
from transformers import AutoModelForCausalLM

import hfax
from hfax.demo import demo_folder
from hfax.phases import listen

model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")


def prompt(rows, length):
    return torch.randint(20, 4000, (rows, length), generator=torch.Generator().manual_seed(length))


# %% [markdown]
# ## Compile ahead of time
#
# `model.compile` takes batch sizes, prompt lengths, and the options that later calls will use. Its calls generate two tokens for each
# combination:

# %%
for made in model.compile(batch_sizes=(1, 4), prompt_lengths=(16, 64), max_new_tokens=32, do_sample=False):
    programs = ", ".join(f"{name} {s:.2f} s" for name, s in made.compiled.items())
    print(
        f"{made.batch_size} x {made.prompt_length} tokens, padded to (rows, prompt, cache) = {made.padded}: {programs}"
    )

# %% [markdown]
# `padded` says which program serves a call: the number of rows, the padded prompt length, and the capacity of the KV cache. Calls that
# fit these sizes compile nothing.
#
# ## Watch a call
#
# `listen` receives an event for each trace and compilation. This helper returns the programs that a call compiled:


# %%
def compiled(call):
    events = []
    with listen(events.append):
        call()
    return [e.detail for e in events if e.name == "compile" and e.seconds is not None]


def generate(ids, **options):
    return model.generate(ids, **{"max_new_tokens": 32, "do_sample": False, **options})


assert compiled(lambda: generate(prompt(1, 12))) == []
assert compiled(lambda: generate(prompt(3, 50))) == []
print("no compilation")

# %% [markdown]
# ## Change one thing at a time

# %%
cases = {
    "a prompt of 20 tokens, not 12": lambda: generate(prompt(1, 20)),
    "a prompt of 31 tokens": lambda: generate(prompt(1, 31)),
    "200 new tokens, not 32": lambda: generate(prompt(1, 12), max_new_tokens=200),
    "150 new tokens": lambda: generate(prompt(1, 12), max_new_tokens=150),
    "5 rows, not 1": lambda: generate(prompt(5, 12)),
    "8 rows": lambda: generate(prompt(8, 12)),
    "sampling": lambda: generate(prompt(1, 12), do_sample=True, temperature=0.7, seed=1),
    "another temperature and seed": lambda: generate(prompt(1, 12), do_sample=True, temperature=1.2, seed=2),
    "sampling with top_k=20": lambda: generate(prompt(1, 12), do_sample=True, temperature=0.7, top_k=20, seed=1),
    "top_k=5, not 20": lambda: generate(prompt(1, 12), do_sample=True, temperature=0.7, top_k=5, seed=1),
    "a presence penalty": lambda: generate(prompt(1, 12), presence_penalty=0.5),
    "another penalty": lambda: generate(prompt(1, 12), presence_penalty=0.9),
}
new = {name: compiled(call) for name, call in cases.items()}
for name, programs in new.items():
    print(f"{name:32} {', '.join(programs) or '-'}")
for name in ("a prompt of 31 tokens", "8 rows", "another temperature and seed", "another penalty"):
    assert new[name] == [], name

# %% alt="A bar chart: the number of programs that each change compiles. Other values compile none, other sizes and other active options do."
plt.figure(figsize=(6, 3.6))
plt.barh(list(new), [len(programs) for programs in new.values()])
plt.gca().invert_yaxis()
plt.xlabel("programs compiled")
plt.show()

# %% [markdown]
# The rule: *which* options are active shapes a program, and their *values* do not. `top_k` is an exception: it is the size of an array.
# Rows, prompts and caches count only when they leave their bucket.
#
# ## Where the buckets end

# %% alt="Two step plots: the padded prompt length over the prompt's length, and the cache's capacity over the number of tokens in total."
from hfax.programs.buckets import capacity_bucket, prompt_bucket

lengths = range(1, 1500)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
left.step(lengths, [prompt_bucket(n) for n in lengths])
left.set(xlabel="tokens of the prompt", ylabel="padded length")
right.step(lengths, [capacity_bucket(n) for n in lengths], color="#e07b39")
right.set(xlabel="tokens in total", ylabel="capacity of the cache")
figure.tight_layout()
plt.show()

# %% [markdown]
# A call of the model itself, `model(ids)`, is not padded: each shape is a program. Pad such batches yourself, to few lengths.

# %%
shapes = [(1, 10), (1, 11), (1, 10), (2, 10)]
for shape in shapes:
    print(shape, compiled(lambda shape=shape: model(prompt(*shape), use_cache=False)) or "-")

# %% [markdown] tags=["by-hand"]
# #### By hand: what makes jax.jit trace again
#
# `jax.jit` keeps one program for each combination of shapes, dtypes and static arguments. A static argument is a Python value that is
# part of the program. A number that changes with each call should therefore be an array.

# %% tags=["by-hand"]
hfax.register_pytrees()
weights, function = torchax.extract_jax(AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval())
traces = []


def next_token(weights, ids, temperature, top_k):
    traces.append((ids.shape, temperature if isinstance(temperature, float) else "array", top_k))
    logits = function(weights, (ids,), {"use_cache": False}).logits[:, -1] / temperature
    return jax.lax.top_k(logits, top_k)


good = jax.jit(next_token, static_argnames="top_k")
bad = jax.jit(next_token, static_argnames=("temperature", "top_k"))
ids = jnp.array(prompt(1, 12).numpy())
for temperature in (0.7, 0.8, 0.9):
    good(weights, ids, jnp.float32(temperature), top_k=5)
assert len(traces) == 1
for temperature in (0.7, 0.8, 0.9):
    bad(weights, ids, temperature=temperature, top_k=5)
print("temperature as an array: 1 trace; as a static number:", len(traces) - 1)
values, _ = good(weights, ids, jnp.float32(1.0), top_k=5)
expected = model(prompt(1, 12), use_cache=False).logits[:, -1].topk(5).values
torch.testing.assert_close(torch.tensor(values.__array__()), expected, atol=1e-3, rtol=1e-3)
print("the same logits as hfax's")

# %% [markdown]
# ## Find out why
#
# On the command line, `hfax generate --verbose` prints each trace and compilation with its sizes. In a program, the logger is
# `hfax.phases`. `hfax export` stores the programs in a folder that another machine of the same kind can use.
#
# [Next](4_classification.md): train a small classifier.
