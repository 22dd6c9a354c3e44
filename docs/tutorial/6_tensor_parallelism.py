# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 6. Tensor parallelism
#
# A model that does not fit on one device is split over several. This notebook splits one over eight, looks at what each device holds and
# what the devices send each other, and then plans a TPU pod slice.

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
# You need no accelerator: XLA can present the CPU as eight devices. The programs are the same as for eight chips, only not faster. Both
# variables must be set before JAX starts.

# %%
import os
import re
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
from transformers import LlamaConfig, LlamaForCausalLM

import hfax

print(jax.devices())

# %% [markdown]
# ## A model on a mesh
#
# A *mesh* is an array of devices whose axes have names. `{"tensor": 8}` asks for one axis of eight, over which heads and inner widths are
# split. The model is a Llama with random weights and eight heads.

# %%
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8
)  # fmt: skip
model = hfax.AutoModelForTPU.from_config(config, seed=0, parallelism={"tensor": 8})
print(dict(model.mesh.shape))

# %% [markdown]
# The other axes have size 1: `data` and `fsdp` split batches, `expert` splits the experts of a mixture, and `group` is for models with
# fewer key-value heads than devices.
#
# ## The sharding plan
#
# The plan says how each weight is split, and why:

# %%
print(model.sharding_plan())

# %% [markdown]
# *Colwise* and *rowwise* come in pairs. The first matrix of a pair is split by its outputs, so each device computes some of the heads, or
# of the inner width. The second is split by its inputs, so each device multiplies what it already has. Only then are the results summed.
# Here is one layer, with a colour for each device:

# %% alt="The matrices of one layer, coloured by device. The matrices q, k, v, gate and up are split into eight horizontal bands, o and down into eight vertical bands."
names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
figure, axes = plt.subplots(1, 7, figsize=(9, 2.6))
for axis, name in zip(axes, names, strict=True):
    array = model.params[f"model.layers.0.{name}.weight"]
    owner = np.zeros(array.shape)
    for shard in array.addressable_shards:
        owner[shard.index] = shard.device.id
    axis.imshow(owner, cmap="tab10", vmin=0, vmax=9, extent=(0, array.shape[1], array.shape[0], 0))
    axis.set(title=name.split(".")[1].removesuffix("_proj"), xticks=[], yticks=[])
    axis.set_xlabel(f"{array.shape[0]} x {array.shape[1]}", fontsize=8)
axes[0].set_ylabel("outputs")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The same numbers
#
# A split changes where numbers are computed, and the order of some sums. The model on one device agrees:

# %%
ids = torch.arange(3, 15)[None]
one_device = hfax.AutoModelForTPU.from_config(config, seed=0)
torch.testing.assert_close(model(ids).logits, one_device(ids).logits, atol=1e-4, rtol=1e-3)
print("the same logits on eight devices and on one")

# %% [markdown]
# ## What the devices send
#
# XLA sees the shardings of the weights and inserts the communication. It is visible in the compiled program's text. An *all-reduce* sums
# an array over devices and gives every device the result:


# %%
def sent(program):
    """(kind, elements) of each message in a compiled program."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \(?\w+\[([\d,]*)\][^=]*? ({kinds})(?:-start)?\(", program.as_text())
    return [(kind, int(np.prod([int(n) for n in size.split(",") if n]))) for size, kind in found]


array = jnp.array(ids.numpy())
forward = jax.jit(lambda params, ids: model.apply(params, input_ids=ids, use_cache=False).logits)
messages = sent(forward.lower(model.params, array).compile())
sums = [size for kind, size in messages if kind == "all-reduce"]
print("messages:", messages)
print(f"{len(sums)} all-reduces: two for each of {config.num_hidden_layers} layers, and one for the embedding table")
assert len(sums) == 2 * config.num_hidden_layers + 1

# %% [markdown]
# Each sum has one number for each token and hidden unit: 12 · 128 = 1,536. A layer needs two: after attention's output and after the
# MLP's. That is the cost of tensor parallelism, and why it needs fast links between devices.

# %% [markdown] tags=["by-hand"]
# #### By hand: NamedSharding by names
#
# A `NamedSharding` says along which mesh axis each dimension of an array is split. You choose one for each weight by its name, and
# `jax.jit` does the rest. Llama's names are known; for each further architecture, such a table has to be written.

# %% tags=["by-hand"]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES = {
    r"(q|k|v|gate|up)_proj\.weight": PartitionSpec("tensor", None),  # outputs
    r"(o|down)_proj\.weight": PartitionSpec(None, "tensor"),  # inputs
    r"(embed_tokens|lm_head)\.weight": PartitionSpec("tensor", None),  # the vocabulary
}
hfax.register_pytrees()
torch.manual_seed(0)
weights, function = torchax.extract_jax(LlamaForCausalLM(config).eval())
mesh = Mesh(np.array(jax.devices()), ("tensor",))
for name, weight in weights.items():
    spec = next((spec for pattern, spec in RULES.items() if re.search(pattern, name)), PartitionSpec())
    weights[name] = jax.device_put(weight, NamedSharding(mesh, spec))
by_hand = jax.jit(lambda weights, ids: function(weights, (ids,), {"use_cache": False}).logits)
replicated = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
np.testing.assert_allclose(by_hand(weights, replicated), np.asarray(model(ids).logits), atol=1e-4)
own = sent(by_hand.lower(weights, replicated).compile())
print("the same logits; all-reduces:", sum(kind == "all-reduce" for kind, _ in own))

# %% [markdown]
# ## Two axes
#
# Batches can be split at the same time. With `{"data": 2, "tensor": 4}` each half of the batch runs on four devices:

# %% alt="KiB of weights on each device, for one device, tensor 8, data 2 with tensor 4, and fsdp 8."
meshes = {
    "one device": None,
    "tensor 8": {"tensor": 8},
    "data 2, tensor 4": {"data": 2, "tensor": 4},
    "fsdp 8": {"fsdp": 8},
}
held = {}
for name, sizes in meshes.items():
    split = hfax.AutoModelForTPU.from_config(config, seed=0, parallelism=sizes)
    held[name] = sum(weight.addressable_shards[0].data.nbytes for weight in split.params.values())
    torch.testing.assert_close(split(ids.repeat(8, 1)).logits[0], one_device(ids).logits[0], atol=1e-4, rtol=1e-3)
    print(f"{name:18} {held[name] / 1024:7.0f} KiB on each device")
plt.figure(figsize=(6, 2.2))
plt.barh(list(held), [size / 1024 for size in held.values()])
plt.gca().invert_yaxis()
plt.xlabel("KiB of weights on each device")
plt.show()

# %% [markdown]
# `fsdp` splits every matrix, and sends it when it is used.
#
# ## Plan a pod slice
#
# `hfax plan` does this for machines that you do not have. It reads only a model's configuration. Here is one with the sizes of an
# 8-billion-parameter Llama, on slices of 8 and 16 TPU v5e chips. `--no-compile` asks for arithmetic only; without it, libtpu compiles
# the programs for the slice.

# %%
folder = Path(tempfile.mkdtemp())
LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=8192, dtype="bfloat16", architectures=["LlamaForCausalLM"],
).save_pretrained(folder)  # fmt: skip
command = [
    "plan",
    "./config.json",
    "--machines",
    "v5e:2x4,v5e:4x4",
    "--batch",
    "1,16",
    "--context",
    "8192",
    "--no-compile",
]
done = subprocess.run(
    [sys.executable, "-m", "hfax", *command],
    capture_output=True,
    text=True,
    cwd=folder,
    env={**os.environ, "COLUMNS": "120"},
)
print(done.stdout)
assert done.returncode == 0, done.stderr

# %% [markdown]
# The speeds are limits from the chips' published figures, not measurements. [Several devices](../parallel.md) explains meshes, several
# hosts and plans in full.
#
# [Next](7_chatbot.md): a chatbot.
