# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 1. A first forward pass
#
# This notebook loads a model, runs it once, and looks at what was run. You need to know PyTorch and transformers. You do not need to
# know JAX.

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
# ## Load and call
#
# `"demo"` is a small Llama that ships with hfax, so nothing is downloaded. A Hub id or a folder works the same way.

# %%
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
from transformers import AutoTokenizer

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

tokenizer = AutoTokenizer.from_pretrained(demo_folder())
model = AutoModelForTPU.from_pretrained("demo", dtype="float32")
batch = tokenizer("Return a new list containing", return_tensors="pt")
logits = model(**batch).logits
print(type(logits).__name__, tuple(logits.shape), logits.dtype)

# %% [markdown]
# You pass torch tensors and get torch tensors. The shape is `[batch, tokens, vocabulary]`. The last token's logits say what comes next:

# %% alt="A bar chart of the probabilities of the five most likely next tokens."
import matplotlib.pyplot as plt

probabilities = logits[0, -1].softmax(-1)
best = probabilities.topk(5)
plt.figure(figsize=(5, 2.4))
plt.barh([repr(tokenizer.decode(token)) for token in best.indices], best.values)
plt.gca().invert_yaxis()
plt.xlabel("probability of the next token")
plt.show()

# %% [markdown]
# Plain transformers gives the same numbers, up to rounding in float32:

# %%
import torch
from transformers import AutoModelForCausalLM

plain = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
with torch.no_grad():
    expected = plain(**batch).logits
torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
print("largest difference:", f"{(logits - expected).abs().max():.1e}")

# %% [markdown]
# ## The weights are JAX arrays
#
# `model.params` maps the checkpoint's names to `jax.Array`s. A JAX array is like a tensor that cannot be modified: an operation returns
# a new one.

# %%
for name, array in list(model.params.items())[:4]:
    print(f"{name:45} {array.dtype} {array.shape}")
print(f"{len(model.params)} arrays, {model.num_parameters():,} parameters, on {model.jax_device}")

# %% [markdown]
# ## The model is a function
#
# A torch module holds its weights. JAX wants a function of them instead: same arguments, same result, and nothing changed on the way.
# `model.apply` is that function. It takes the weights as its first argument.

# %%
import jax
import jax.numpy as jnp

ids = jnp.array(batch["input_ids"].numpy())
output = model.apply(model.params, input_ids=ids, use_cache=False)
print(type(output).__name__, type(output.logits).__name__, output.logits.shape)

# %% [markdown] tags=["by-hand"]
# #### By hand: the same function with torchax
#
# [torchax](https://github.com/google/torchax) is the library underneath. It gives a tensor class whose operations are JAX's.
# `extract_jax` takes a module apart into its weights and a function. The flag `use_cache` is passed inside the call: it decides which
# Python code runs, so it cannot be an array.

# %% tags=["by-hand"]
import hfax

hfax.register_pytrees()  # lets JAX take apart and rebuild transformers' output classes
weights, function = torchax.extract_jax(plain)
by_hand = function(weights, (ids,), {"use_cache": False}).logits
assert jnp.allclose(by_hand, output.logits, atol=1e-3)
print("the same logits:", by_hand.shape)

# %% [markdown]
# ## What tracing is
#
# `jax.jit` calls a function with *tracers* in place of arrays. A tracer has a shape and a dtype, and no values. Each operation on a
# tracer is written down. The result is a *jaxpr*: a list of operations on arrays of fixed shapes. Here is one for a small function:

# %%
print(jax.make_jaxpr(lambda x: jnp.tanh(x @ x.T).sum())(jnp.zeros((2, 3))))

# %% [markdown]
# hfax traces the model's own PyTorch code in the same way. Python loops over layers disappear: what remains are the operations of all
# layers, one after the other. Here are the most frequent of the demo model:

# %% alt="A bar chart of the number of operations of each kind in the traced demo model."
from collections import Counter


def operations(jaxpr):
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        inner = [getattr(p, "jaxpr", p) for p in leaves if hasattr(p, "jaxpr") or hasattr(p, "eqns")]
        if inner:
            for part in inner:
                yield from operations(part)
        else:
            yield equation.primitive.name


traced = jax.make_jaxpr(lambda params, ids: model.apply(params, input_ids=ids, use_cache=False).logits)(
    model.params, ids
)
counts = Counter(operations(traced.jaxpr))
names, numbers = zip(*counts.most_common(8), strict=True)
print(f"{sum(counts.values())} operations; {counts['dot_general']} are matrix products")
plt.figure(figsize=(5, 2.8))
plt.barh(names, numbers)
plt.gca().invert_yaxis()
plt.xlabel("times in the traced model")
plt.show()

# %% [markdown]
# XLA compiles this list for the device, which the [next notebook](2_eager_and_compiled.md) measures.
#
# ## What else can be done with a function
#
# `jax.grad` gives the function of its derivatives, and `jax.vmap` one over a further axis. Both compose with `jax.jit`:

# %%
loss = lambda params: model.apply(params, input_ids=ids, labels=ids).loss
value, gradients = jax.jit(jax.value_and_grad(loss))(model.params)
print(f"loss {value:.3f}, {len(gradients)} gradients")

plain.zero_grad()
expected_loss = plain(**batch, labels=batch["input_ids"]).loss
expected_loss.backward()
name = "model.layers.0.self_attn.q_proj.weight"
torch.testing.assert_close(
    torch.tensor(gradients[name].__array__()), plain.get_parameter(name).grad, atol=1e-3, rtol=1e-2
)
print("PyTorch's gradient of", name, "is the same")

# %% [markdown]
# ## What a traced function must not do
#
# A tracer has no value, so Python cannot decide by it. Code such as `if x.sum() > 0` stops the trace:

# %%
try:
    jax.jit(lambda x: x if x.sum() > 0 else -x)(jnp.ones(3))
except jax.errors.TracerBoolConversionError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Most models never do this. Where transformers' code does, hfax replaces that piece, and `hfax doctor MODEL -v` lists them.
