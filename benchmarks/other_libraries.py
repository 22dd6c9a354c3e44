"""Decoding and prompts on CPU beside ONNX Runtime, a model written by hand in flax.nnx, and eager transformers: one checkpoint.

    python benchmarks/other_libraries.py --json-file benchmarks/results/other-libraries.json

A Qwen3 of random weights in float32 (12 layers of Qwen3-0.6B's shape, vocabulary 32,000) is saved once, and every subject reads
that folder, so their greedy tokens can be compared. ONNX Runtime runs what its GenAI package's model builder makes of the folder,
in float32 and in int4; it is installed into the cache folder. The nnx model is what a JAX user would write: modules,
a cache of fixed size, a jitted step for each token. Subjects take turns, a process each; figures are medians over the rounds.
Decoding: 64 tokens after 128; prompts: 512 tokens; batch 1; a thread for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ["onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx_ir==1.1.0"]
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
PROMPT, TOKENS, LONG = 128, 64, 512
SUBJECTS = ("hfax float32", "hfax int4", "onnxruntime float32", "onnxruntime int4", "nnx float32", "eager float32")


def prompt(length: int) -> list[int]:
    """The same ids for every subject."""
    return [(7 * i) % 31_000 + 10 for i in range(length)]


def save_model(folder: Path) -> None:
    """The checkpoint, and the demo model's tokenizer, which ONNX Runtime's builder wants to see."""
    import torch
    import transformers

    from hfax.demo import demo_folder

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, initializer_range=0.05)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(folder)


def prepare_onnxruntime(cache: Path, folder: Path) -> None:
    """Install ONNX Runtime and build its models, unless the cache folder has them."""
    packages = cache / "packages"
    if not packages.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *PACKAGES]
        subprocess.run(install, check=True)
    for precision in ("fp32", "int4"):
        out = cache / f"onnx-{precision}"
        if not out.exists():
            command = [
                sys.executable,
                "-m",
                "onnxruntime_genai.models.builder",
                "-m",
                folder,
                "-o",
                out,
                "-p",
                precision,
            ]
            subprocess.run(
                [*command, "-e", "cpu", "-c", cache / "builder"], check=True, env=_with(packages), capture_output=True
            )
        settings = json.loads(
            (out / "genai_config.json").read_text()
        )  # its own choice was one thread on two virtual cores
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = os.cpu_count()
        (out / "genai_config.json").write_text(json.dumps(settings))


def _with(packages: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}


# The subjects: each gives a function that generates, and one that reads a prompt


def run_hfax(folder: Path, cache: Path, kind: str) -> tuple[Callable[[int], list[int]], Callable[[], Any]]:
    import numpy as np

    from hfax import AutoModelForTPU

    model = AutoModelForTPU.from_pretrained(folder, quantization=None if kind == "float32" else kind)  # pyright: ignore

    def generate(tokens: int) -> list[int]:
        found = model.generate([prompt(PROMPT)], max_new_tokens=tokens, do_sample=False)
        return np.asarray(found)[0, PROMPT:].tolist()

    return generate, lambda: np.asarray(model.generate([prompt(LONG)], max_new_tokens=1, do_sample=False))


def run_onnxruntime(folder: Path, cache: Path, kind: str) -> tuple[Callable[[int], list[int]], Callable[[], Any]]:
    import onnxruntime_genai as og  # pyright: ignore[reportMissingImports]

    model = og.Model(str(cache / f"onnx-{'fp32' if kind == 'float32' else kind}"))

    def write(ids: list[int], tokens: int) -> list[int]:
        options = og.GeneratorParams(model)
        options.set_search_options(do_sample=False, min_length=len(ids) + tokens, max_length=len(ids) + tokens)
        generator = og.Generator(model, options)
        generator.append_tokens(ids)
        for _ in range(tokens):
            generator.generate_next_token()
        return [int(t) for t in generator.get_sequence(0)[len(ids) :]]

    return lambda tokens: write(prompt(PROMPT), tokens), lambda: write(prompt(LONG), 1)


def run_eager(folder: Path, cache: Path, kind: str) -> tuple[Callable[[int], list[int]], Callable[[], Any]]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()

    @torch.no_grad()
    def write(ids: list[int], tokens: int) -> list[int]:
        found = model.generate(torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return found[0, len(ids) :].tolist()

    return lambda tokens: write(prompt(PROMPT), tokens), lambda: write(prompt(LONG), 1)


def run_nnx(folder: Path, cache: Path, kind: str) -> tuple[Callable[[int], list[int]], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from safetensors.numpy import load_file

    heads, kv, width, size = 16, 8, 128, SHAPE["hidden_size"]

    def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[:, None] / (rope_theta ** (jnp.arange(0, width, 2) / width))
        cos, sin = (jnp.tile(f(angles), 2)[None, :, None] for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nnx.Linear(a, b, use_bias=False, rngs=rngs)
                for a, b in ((size, heads * width), (size, kv * width), (size, kv * width), (heads * width, size))
            )
            self.q_norm, self.k_norm = (nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs) for _ in range(2))

        def __call__(self, x: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
            rows, length, _ = x.shape
            positions = start + jnp.arange(length)
            q = rotate(self.q_norm(self.q_proj(x).reshape(rows, length, heads, width)), positions)
            k = rotate(self.k_norm(self.k_proj(x).reshape(rows, length, kv, width)), positions)
            v = self.v_proj(x).reshape(rows, length, kv, width)
            cache = tuple(
                jax.lax.dynamic_update_slice_in_dim(c, n, start, axis=1) for c, n in zip(cache, (k, v), strict=True)
            )
            mask = jnp.arange(cache[0].shape[1])[None] <= positions[:, None]
            mixed = jax.nn.dot_product_attention(q, *cache, mask=mask[None, None])
            return self.o_proj(mixed.reshape(rows, length, heads * width)), cache

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            inner = SHAPE["intermediate_size"]
            self.self_attn = Attention(rngs)
            self.input_layernorm, self.post_attention_layernorm = (
                nnx.RMSNorm(size, epsilon=1e-6, rngs=rngs) for _ in range(2)
            )
            self.gate_proj, self.up_proj = (nnx.Linear(size, inner, use_bias=False, rngs=rngs) for _ in range(2))
            self.down_proj = nnx.Linear(inner, size, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
            mixed, cache = self.self_attn(self.input_layernorm(x), cache, start)
            x = x + mixed
            y = self.post_attention_layernorm(x)
            return x + self.down_proj(nnx.silu(self.gate_proj(y)) * self.up_proj(y)), cache

    class Qwen3(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed_tokens = nnx.Embed(SHAPE["vocab_size"], size, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(SHAPE["num_hidden_layers"])])
            self.norm = nnx.RMSNorm(size, epsilon=1e-6, rngs=rngs)

        def __call__(self, ids: jax.Array, caches: Any, start: jax.Array) -> tuple[jax.Array, Any]:
            x = self.embed_tokens(ids)
            new = []
            for layer, cache in zip(self.layers, caches, strict=True):
                x, cache = layer(x, cache, start)
                new.append(cache)
            return self.embed_tokens.attend(self.norm(x[:, -1])).argmax(-1), new

    config = json.loads((folder / "config.json").read_text())
    rope_theta = config["rope_parameters"]["rope_theta"]
    stored = load_file(folder / "model.safetensors")
    model = Qwen3(nnx.Rngs(0))
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for path, variable in flat.items():
        name = ".".join(map(str, ("model", *path)))
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = name.replace(f".{part}", f".mlp.{part}")
        name = name.replace(".kernel", ".weight").replace(".scale", ".weight").replace(".embedding", ".weight")
        array = stored[name]
        variable.set_value(jnp.asarray(array.T if path[-1] == "kernel" else array))
    params = nnx.from_flat_state(list(flat.items()))
    step = jax.jit(lambda params, *args: nnx.merge(graph, params)(*args), donate_argnums=2)

    def write(ids: list[int], tokens: int) -> list[int]:
        length = 1024
        caches = [tuple(jnp.zeros((1, length, kv, width)) for _ in range(2)) for _ in range(SHAPE["num_hidden_layers"])]
        token, caches = step(params, jnp.asarray([ids]), caches, jnp.int32(0))
        found = [token]
        for i in range(tokens - 1):
            token, caches = step(params, token[:, None], caches, jnp.int32(len(ids) + i))
            found.append(token)
        return [int(t[0]) for t in found]

    return lambda tokens: write(prompt(PROMPT), tokens), lambda: write(prompt(LONG), 1)


RUN = {"hfax": run_hfax, "onnxruntime": run_onnxruntime, "nnx": run_nnx, "eager": run_eager}


def measure(subject: str, folder: Path, cache: Path) -> dict[str, Any]:
    """One round of one subject, in this process: seconds of two lengths and of a prompt, after a warm-up, and the tokens."""
    name, kind = subject.split()
    started = time.perf_counter()
    generate, read = RUN[name](folder, cache, kind)
    tokens = generate(TOKENS)
    first = time.perf_counter() - started
    generate(1)
    read()

    def seconds(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    long, short, prefill = (
        statistics.median(seconds(call) for _ in range(3))
        for call in (lambda: generate(TOKENS), lambda: generate(1), read)
    )
    return {
        "decode_tokens_per_s": (TOKENS - 1) / (long - short),
        "prompt_tokens_per_s": LONG / prefill,
        "load_and_first_s": first,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("build/other-libraries"))
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cache, folder = options.cache.resolve(), options.cache.resolve() / "model"
    if options.subject:
        print(json.dumps(measure(options.subject, folder, cache)))
        return
    cache.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        save_model(folder)
    prepare_onnxruntime(cache, folder)
    found: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(options.rounds):
        for subject in SUBJECTS:
            command = [sys.executable, __file__, "--cache", cache, "--subject", subject]
            environment = _with(cache / "packages") if subject.startswith("onnx") else dict(os.environ)
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**environment, "JAX_PLATFORMS": "cpu"}
            )
            found[subject].append(json.loads(done.stdout.splitlines()[-1]))
            print(subject, {n: v for n, v in found[subject][-1].items() if n != "tokens"}, flush=True)
    from hfax.bench.run import _machine, _version

    expected = found["eager float32"][0]["tokens"]
    report = {
        "machine": _machine(),
        "versions": {n: _version(n) for n in ("hfax", "jax", "torch", "transformers", "flax")}
        | {"onnxruntime": PACKAGES[0].partition("==")[2], "onnxruntime-genai": PACKAGES[1].partition("==")[2]},
        "rounds": options.rounds,
        "subjects": {
            subject: {
                name: statistics.median(one[name] for one in rounds)
                for name in ("decode_tokens_per_s", "prompt_tokens_per_s", "load_and_first_s")
            }
            | {"equal_tokens": sum(a == b for a, b in zip(rounds[0]["tokens"], expected, strict=True))}
            for subject, rounds in found.items()
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json_file is not None:
        options.json_file.write_text(text + "\n")


if __name__ == "__main__":
    main()
