# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # 7. A chatbot
#
# This notebook turns a model into a chatbot: a template that makes a prompt of a conversation, answers that appear word by word, and a
# server with a chat page.
#
# The demo model has read only Python's documentation. It answers in that style, and what it says is often wrong.

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
import json
import socket
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import torch
import torchax  # for the boxes "by hand": before hfax, since its import gives torch a device named "jax"
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfax
from hfax.demo import demo_folder

tokenizer = AutoTokenizer.from_pretrained(demo_folder())
model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")

# %% [markdown]
# ## The template
#
# A chat model is a language model that was trained on conversations in a fixed format. The tokenizer knows the format:

# %%
history = [{"role": "user", "content": "What does list.append do?"}]
print(tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False))

# %% [markdown]
# The text ends where the assistant's answer begins. The model continues it.
#
# ## An answer, streamed
#
# A streamer of transformers receives tokens while they are generated. hfax's loop runs on the device and hands them over in small groups:


# %%
def prompt_of(history):
    return tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt", return_dict=True)


options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7, "seed": 0}
streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
batch = prompt_of(history)
ids = model.generate(**batch, **options, streamer=streamer)

# %% [markdown]
# ## A conversation
#
# The model remembers nothing between calls. Each call gets the whole history:

# %%
history = []
for question in ("What does list.append do?", "What does len return?"):
    history.append({"role": "user", "content": question})
    batch = prompt_of(history)
    ids = model.generate(**batch, **options)
    answer = tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    history.append({"role": "assistant", "content": answer})
    print(f"you:   {question}\nmodel: {answer}")
assert [message["role"] for message in history] == ["user", "assistant"] * 2

# %% [markdown] tags=["by-hand"]
# #### By hand: the template, and a loop that streams
#
# The template is string formatting. The loop is the jitted step of [notebook 5](5_generation.md): it prints each token as it comes, and
# stops at the end token. Both greedy answers are equal.

# %% tags=["by-hand"]
question = "What does list.append do?"
text = f"<|begin|><|user|>{question}<|end|><|assistant|>"
batch = prompt_of([{"role": "user", "content": question}])
assert tokenizer(text, add_special_tokens=False)["input_ids"] == batch["input_ids"][0].tolist()

plain = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
hfax.register_pytrees()
weights, function = torchax.extract_jax(plain)
cache = transformers.StaticCache(config=plain.config, max_cache_len=64)
cache.early_initialization(
    1, plain.config.num_key_value_heads, plain.config.head_dim, torch.float32, torch.device("cpu")
)
cache = torchax.default_env().t2j_copy(cache)


@jax.jit
def step(weights, cache, ids):
    output = function(weights, (), {"input_ids": ids, "cache": cache, "use_cache": True})
    return output.logits[:, -1:].argmax(-1), output.past_key_values


token, cache = step(weights, cache, jnp.array(batch["input_ids"].numpy()))
tokens = []
while len(tokens) < 24 and int(token[0, 0]) != tokenizer.eos_token_id:
    tokens.append(int(token[0, 0]))
    print(tokenizer.decode(tokens[-1]), end="")
    token, cache = step(weights, cache, token)
print()
model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
ours = model.generate(**batch, max_new_tokens=24)[0, batch["input_ids"].shape[1] :].tolist()
assert [t for t in ours if t != tokenizer.eos_token_id] == tokens
print("the same tokens as hfax's:", len(tokens))

# %% [markdown]
# ## The server
#
# `hfax serve` answers many users at once, with the HTTP API of OpenAI. Here it runs in the background, on a free port:

# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"
command = [sys.executable, "-m", "hfax", "serve", "demo", "--port", str(port), "--max-model-len", "256"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def get(path, body=None):
    request = urllib.request.Request(
        address + path, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


start = time.perf_counter()
while True:
    try:
        get("/ready").close()
        break
    except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503 while it compiles
        assert server.poll() is None, "the server has ended"
        time.sleep(0.5)
print(f"ready after {time.perf_counter() - start:.0f} s")

# %% [markdown]
# A request with `"stream": true` gets a line for each piece of the answer. `openai.OpenAI(base_url=...)` and curl work the same way.

# %% alt="Steps: the number of characters received over time. They arrive in many small pieces."
question = {"role": "user", "content": "What does list.append do?"}
body = {"model": "demo", "messages": [question], "stream": True, "max_tokens": 40, "temperature": 0.7, "seed": 0}
received, times, start = "", [], time.perf_counter()
with get("/v1/chat/completions", body) as answer:
    for line in answer:
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            received += choices[0]["delta"].get("content") or ""
            times.append((time.perf_counter() - start, len(received)))
print(received)
plt.figure(figsize=(6, 2.6))
plt.step([t for t, _ in times], [n for _, n in times], where="post")
plt.xlabel("seconds after the request")
plt.ylabel("characters received")
plt.show()

# %% [markdown]
# The address itself is a chat page, without external resources. Open it in a browser:

# %%
with get("/") as page:
    html = page.read().decode()
print(
    page.status,
    page.headers["Content-Type"],
    f"{len(html):,} characters, title {html.partition('<title>')[2].partition('<')[0]!r}",
)
server.terminate()
print("the server ended with", server.wait(timeout=60))

# %% [markdown]
# In a terminal, `hfax chat demo` is a chat without a server. [Serving](../serving.md) has the routes and options,
# [In production](../guides/production.md) what to do before others use it.
