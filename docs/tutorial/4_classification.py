# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 4. Classification and embeddings
#
# An encoder reads a text at once and gives one vector for each token. This notebook trains a small one to sort texts by subject, runs it
# on texts of many lengths with one program, and uses its vectors for search.

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
import hashlib
import importlib
import inspect
import os
import tempfile
import time

os.environ["HFAX_HOME"] = tempfile.mkdtemp()  # no programs from earlier runs

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import hfax
from hfax.demo import demo_folder
from hfax.phases import listen

# %% [markdown]
# ## A data set that is already here
#
# Python's standard library documents its functions. The task: from a function's text alone, tell whether it is about the network, numbers
# or files. One text in five is held out.

# %%
SUBJECTS = {
    "network": "http.client http.cookiejar http.server urllib.request urllib.parse socket ssl smtplib ftplib imaplib poplib asyncio.streams",
    "numbers": "math cmath statistics decimal fractions random numbers colorsys _pydecimal",
    "files": "os posixpath shutil pathlib tempfile zipfile tarfile glob fnmatch gzip bz2 filecmp io",
}


def texts_of(module):
    """The texts of a module's functions, classes and methods."""
    for _, thing in inspect.getmembers(importlib.import_module(module)):
        owner = getattr(thing, "__module__", None)
        if callable(thing) and owner in (module, module.lstrip("_"), "posix", "_random", "_decimal", "_io"):
            members = (
                [m for name, m in inspect.getmembers(thing) if callable(m) and name[:2] != "__"]
                if inspect.isclass(thing)
                else []
            )
            for each in (thing, *members):
                text = " ".join((each.__doc__ or "").split())
                if len(text) > 30:
                    yield text[:400]


shared = {
    " ".join((m.__doc__ or "").split())[:400]
    for kind in (object, type, Exception, dict, OSError)
    for _, m in inspect.getmembers(kind)
}
rows = {}
for label, modules in enumerate(SUBJECTS.values()):
    for module in modules.split():
        rows.update({text: label for text in texts_of(module) if text not in shared})
held_out = {text for text in rows if int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0}
train = [(text, label) for text, label in rows.items() if text not in held_out]
test = [(text, label) for text, label in rows.items() if text in held_out]
print(f"{len(train)} texts to train on, {len(test)} held out")
for name, label in zip(SUBJECTS, range(3), strict=True):
    print(
        f"{name:8} {sum(y == label for _, y in test):3} held out, such as: {next(x for x, y in test if y == label)[:70]!r}"
    )

# %% [markdown]
# ## A model
#
# A BERT of two layers with random weights. The tokenizer is the demo model's. It pads on the right: BERT counts positions from the first
# token, padding included.

# %%
tokenizer = AutoTokenizer.from_pretrained(demo_folder(), padding_side="right")
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, num_labels=3, architectures=["BertForSequenceClassification"],
)  # fmt: skip
model = hfax.AutoModelForTPU.from_config(config, task="text-classification")


def batch_of(texts, **options):
    return dict(
        tokenizer(list(texts), padding="max_length", max_length=64, truncation=True, return_tensors="np", **options)
    )


print(
    f"{model.num_parameters():,} parameters; a batch: { {name: a.shape for name, a in batch_of(['a', 'b']).items()} }"
)

# %% [markdown]
# ## Train
#
# `make_train_step` compiles forward pass, gradients and optimizer into one program. Every batch has the same shape, so it compiles once.

# %%
step = hfax.make_train_step(model, optax.adamw(optax.cosine_decay_schedule(2e-3, 240)))
state = step.init()
random = np.random.default_rng(0)
losses = []
start = time.perf_counter()
for _ in range(240):
    chosen = random.choice(len(train), 32, replace=False)
    batch = batch_of([train[i][0] for i in chosen])
    state, metrics = step(state, {**batch, "labels": np.array([train[i][1] for i in chosen])})
    losses.append(float(metrics["loss"]))
step.update_model(state)
print(
    f"240 steps in {time.perf_counter() - start:.1f} s; loss {losses[0]:.2f} at first, {np.mean(losses[-10:]):.2f} at last"
)

# %% alt="The training loss over 240 steps. It falls from about one to near zero."
plt.figure(figsize=(6, 2.8))
plt.plot(losses)
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# ## Accuracy

# %%
labels = np.array([label for _, label in test])
scores = np.array(model(**batch_of(x for x, _ in test)).logits)
accuracy = (scores.argmax(-1) == labels).mean()
most_frequent = np.bincount(labels).max() / len(labels)
print(f"accuracy on held-out texts: {accuracy:.1%}; always the most frequent subject: {most_frequent:.1%}")
assert accuracy > most_frequent + 0.2

# %% [markdown] tags=["by-hand"]
# #### By hand: the forward pass and one training step
#
# The module is torch's own, with the trained weights. `jax.value_and_grad` differentiates the torchax function, and optax turns gradients
# into updates. The first step of `make_train_step`, without dropout, gives the same weights.

# %% tags=["by-hand"]
plain = BertForSequenceClassification(config).eval()
plain.load_state_dict(model.state_dict())
hfax.register_pytrees()
everything, function = torchax.extract_jax(plain)
buffers = {name: everything[name] for name, _ in plain.named_buffers() if name in everything}
weights = {name: array for name, array in everything.items() if name not in buffers}
batch = {name: jnp.array(a) for name, a in batch_of(x for x, _ in test).items()}
by_hand = jax.jit(lambda weights, batch: function({**weights, **buffers}, (), batch).logits)(weights, batch)
np.testing.assert_allclose(by_hand, scores, atol=1e-3)
print("the same scores for", len(by_hand), "texts")

few = {**{name: a[:32] for name, a in batch.items()}, "labels": jnp.array(labels[:32])}
loss = lambda weights: function({**weights, **buffers}, (), few).loss
optimizer = optax.sgd(0.1)
value, gradients = jax.jit(jax.value_and_grad(loss))(weights)
updates, _ = optimizer.update(gradients, optimizer.init(weights))
updated = optax.apply_updates(weights, updates)

one = hfax.make_train_step(model, optimizer, dropout=False)
after, metrics = one(one.init(), {name: np.asarray(a) for name, a in few.items()})
np.testing.assert_allclose(value, metrics["loss"], atol=1e-4)
for name in after.params:
    np.testing.assert_allclose(after.params[name], updated[name], atol=1e-4)
print("the same loss,", f"{value:.4f}, and the same weights after one step")

# %% [markdown]
# ## Many lengths, one program
#
# A batch without padding has its own shape, and each shape is compiled. With padding to one length, all texts share a program:

# %% alt="Two bars: seconds for 12 texts of different lengths without padding and with padding to 64 tokens. Padding is far faster."
by_length = {len(tokenizer(x)["input_ids"]): x for x, _ in test if len(tokenizer(x)["input_ids"]) <= 64}
texts = list(by_length.values())[:12]


def run(encode):
    programs = []
    start = time.perf_counter()
    with listen(programs.append):
        found = [np.array(model(**encode(text)).logits)[0] for text in texts]
    return found, time.perf_counter() - start, sum(e.name == "compile" and e.seconds is not None for e in programs)


padded, padded_seconds, padded_programs = run(lambda text: batch_of([text]))
exact, exact_seconds, exact_programs = run(lambda text: dict(tokenizer([text], return_tensors="np")))
np.testing.assert_allclose(padded, exact, atol=1e-3)
print(f"padded to 64 tokens: {padded_programs} program,  {padded_seconds:.2f} s")
print(f"not padded:          {exact_programs} programs, {exact_seconds:.2f} s, the same scores")
plt.figure(figsize=(6, 1.8))
plt.barh(["padded", "not padded"], [padded_seconds, exact_seconds])
plt.gca().invert_yaxis()
plt.xlabel("seconds for 12 texts")
plt.show()

# %% [markdown]
# `padding="max_length"` does this in transformers' tokenizers and pipelines. If lengths differ much, use two or three lengths.
#
# ## Embeddings
#
# The mean of the last layer's vectors, without the padding, is a vector for the text. Texts on one subject lie close together.

# %% alt="A scatter plot of the held-out texts' embeddings in two dimensions. The three subjects form three groups."
batch = batch_of(x for x, _ in test)
hidden = np.array(model(**batch, output_hidden_states=True).hidden_states[-1])
mask = batch["attention_mask"][..., None]
embeddings = (hidden * mask).sum(1) / mask.sum(1)
embeddings /= np.linalg.norm(embeddings, axis=-1, keepdims=True)

_, _, axes = np.linalg.svd(embeddings - embeddings.mean(0), full_matrices=False)
flat = (embeddings - embeddings.mean(0)) @ axes[:2].T
plt.figure(figsize=(5, 3.4))
for label, name in enumerate(SUBJECTS):
    plt.scatter(*flat[labels == label].T, s=14, label=name)
plt.legend()
plt.xlabel("first principal component")
plt.ylabel("second")
plt.show()

# %% [markdown]
# Search is a product of the query's vector with all others:

# %%
query = "Open a connection to the server at the given address."
batch = batch_of([query])
vector = (
    np.array(model(**batch, output_hidden_states=True).hidden_states[-1])[0] * batch["attention_mask"][0, :, None]
).sum(0)
nearest = np.argsort(-embeddings @ vector)[:3]
for i in nearest:
    print(f"{list(SUBJECTS)[labels[i]]:8} {test[i][0][:80]}")

# %% [markdown]
# `model.save_pretrained(folder)` writes a checkpoint that transformers reads. `hfax serve FOLDER` answers `/v1/embeddings`, and
# [Embeddings and classifiers](../guides/embeddings.md) has models from the Hub.
#
# [Next](5_generation.md): generation, where shapes grow.
