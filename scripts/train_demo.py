"""Trains hfax's demo model from nothing, with hfax itself: corpus, tokenizer, `make_train_step`, optax.

    python scripts/train_demo.py --out src/hfax/demo

rewrites the bundled checkpoint, its card and the held-out sample of the tests, in about a quarter of an hour on two CPU
cores. Every field of `Recipe` is an option of the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from demo_card import write_card
from demo_chats import Sample, epoch_samples, held_out_samples, plain_page
from demo_corpus import Corpus, read_corpus
from demo_tokenizer import BEGIN, PAD, ROLES, encode, special_token_ids, train_tokenizer
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from hfax import AutoModelForTPU, make_train_step

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out, besides the Python whose documentation is read.

    Training runs in two stages of equal tokens a step: most of it on short windows, the last `long_share` of the
    steps on windows of the whole context, since attention on long windows is slow on a CPU.
    """

    out: Path = Path("src/hfax/demo")
    held_out_sample: Path = Path("tests/demo/held_out_sample.json")
    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    context: int = 512
    short_window: int = 256
    long_share: float = 0.15
    tokens_per_step: int = 2048
    steps: int = 2000
    muon_learning_rate: float = 0.015
    adam_learning_rate: float = 1e-2
    weight_decay: float = 0.1
    seed: int = 0
    documents: int | None = None


def main(arguments: list[str]) -> None:
    """Train, evaluate, save; prints its progress."""
    recipe = parse_recipe(arguments)
    start = time.perf_counter()
    corpus = read_corpus(recipe.documents)
    tokenizer = train_tokenizer(
        (plain_page(document, True) for document in corpus.train), recipe.vocab_size, recipe.context
    )
    model = AutoModelForTPU.from_config(make_config(recipe, tokenizer), dtype="float32", seed=recipe.seed)
    preparing_seconds = time.perf_counter() - start
    print(f"{len(corpus.train)} documents, {_num_parameters(model.params):,} parameters, {preparing_seconds:.0f} s")

    training = train(model, corpus, tokenizer, recipe)
    params = {name: value.astype(jnp.bfloat16) for name, value in model.params.items()}
    held_out = held_out_samples(corpus)
    sample = pick_sample(held_out)
    stored = {name: value.astype(jnp.float32) for name, value in params.items()}
    losses = {
        name: held_out_loss(model.apply, stored, tokenizer, samples, recipe.context)
        for name, samples in {**held_out, "sample": sample}.items()
    }
    record = {
        "parameters": _num_parameters(params),
        "training_documents": len(corpus.train),
        "training_characters": sum(len(document.text) for document in corpus.train),
        **training,
        "preparing_seconds": round(preparing_seconds, 1),
        "total_seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "cpu_cores": os.cpu_count(),
        "held_out": losses,
        "recipe": {field: value for field, value in dataclasses.asdict(recipe).items() if not isinstance(value, Path)},
        "versions": _versions(),
    }
    save(model.config, params, tokenizer, recipe, record, sample)
    print(json.dumps(record, indent=2))


def parse_recipe(arguments: list[str]) -> Recipe:
    """The command line as a `Recipe`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Recipe):
        kind = int if field.default is None else type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=f"{field.default}"
        )
    return Recipe(**vars(parser.parse_args(arguments)))


def make_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The model's shape: Llama with grouped-query attention and tied embeddings."""
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        **special_token_ids(tokenizer),
        architectures=["LlamaForCausalLM"],
    )


def train(model: Any, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> dict[str, Any]:
    """Train for `recipe.steps` steps.

    Args:
        model: float32; its weights become the trained ones.
        corpus: what to learn.
        tokenizer: how to write it.
        recipe: how long, how fast.

    Returns:
        What is worth recording: steps, tokens, the loss of the last 50 steps, seconds.
    """
    step = make_train_step(
        model, make_optimizer(recipe), lambda apply, batch: token_losses(apply, batch["window"]).mean()
    )
    state, losses, tokens, start = step.init(recipe.seed, copy=False), [], 0, time.perf_counter()
    for number, window in enumerate(windows(corpus, tokenizer, recipe), start=1):
        state, metrics = step(state, {"window": window})
        losses.append(float(metrics["loss"]))
        tokens += window.shape[0] * (window.shape[1] - 1)
        if number % 50 == 0 or number == recipe.steps:
            seconds = time.perf_counter() - start
            print(
                f"step {number:5d}  loss {np.mean(losses[-50:]):.3f}  {seconds:4.0f} s",
                f"{tokens / seconds:,.0f} tokens/s",
                flush=True,
            )
    seconds = time.perf_counter() - start
    step.update_model(state)
    return {
        "steps": recipe.steps,
        "training_tokens": tokens,
        "training_loss": round(float(np.mean(losses[-50:])), 4),
        "optimizing_seconds": round(seconds, 1),
    }


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for the embeddings and the scales of norms; warm-up, then cosine.

    Trials of 300 steps ended at a held-out loss of pages of 5.18 nats a token with AdamW for everything (1.5e-3; 5.26
    with 1e-3), and with Muon at 4.58 and 4.34 (Adam's part at 3e-3 and 1.2e-2). Muon makes a step a fifth longer
    (Jordan, 2024; https://kellerjordan.github.io/posts/muon).
    """

    warm_up_steps = max(1, min(100, recipe.steps // 10))

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm_up_steps, recipe.steps, 0.02 * peak)

    def for_muon(params: Params) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: numbers if name.endswith("proj.weight") else None for name in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(recipe.muon_learning_rate),
            adam_learning_rate=schedule(recipe.adam_learning_rate),
            adam_b2=0.98,
            weight_decay=recipe.weight_decay,
            muon_weight_dimension_numbers=for_muon,  # pyright: ignore[reportArgumentType]
        ),
    )


def token_losses(apply: Callable[..., Any], window: Any) -> jax.Array:
    """Cross entropy of each next token, in nats: [batch, length + 1] int32 token ids to [batch, length] float32.

    Written with a comparison where one would index: on a CPU the gradient of indexing the logits is a slow scatter.
    """
    logits = apply(input_ids=window[:, :-1], use_cache=False).logits.astype(jnp.float32)
    is_target = jnp.arange(logits.shape[-1]) == window[:, 1:, None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


def windows(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[np.ndarray]:
    """`recipe.steps` batches of packed token ids, [batch, window + 1] int32; each epoch draws its samples anew."""
    num_long = round(recipe.steps * recipe.long_share)
    lengths = [recipe.short_window] * (recipe.steps - num_long) + [recipe.context] * num_long
    stream: list[int] = []
    position, epoch = 0, 0
    for length in lengths:
        batch = max(1, recipe.tokens_per_step // length)
        while len(stream) - position < batch * length + 1:
            samples = epoch_samples(corpus, epoch, recipe.seed)
            stream = stream[position:] + [token for sample in samples for token in encode(tokenizer, sample)]
            position, epoch = 0, epoch + 1
        rows = [stream[position + row * length : position + (row + 1) * length + 1] for row in range(batch)]
        position += batch * length
        yield np.array(rows, np.int32)


def held_out_loss(
    apply: Callable[..., Any], params: Params, tokenizer: PreTrainedTokenizerFast, samples: list[Sample], context: int
) -> dict[str, float]:
    """Loss over samples that were never trained on, each on its own and cut to the context.

    Returns:
        `nats_per_token` over all tokens but the first of each sample, `bits_per_byte` of the text they stand for
        (special tokens are predicted but count no bytes), `tokens` and `samples`.
    """
    losses = jax.jit(lambda params, window: token_losses(functools.partial(apply, params), window))
    nats, tokens, num_bytes, rows = 0.0, 0, 0, 8
    encoded = [encode(tokenizer, sample)[:context] for sample in samples]
    for first in range(0, len(encoded), rows):
        group = encoded[first : first + rows]
        window, counts = np.zeros((rows, context), np.int32), np.zeros((rows, context - 1), bool)
        for row, token_ids in enumerate(group):
            window[row, : len(token_ids)] = token_ids
            counts[row, : len(token_ids) - 1] = True
            num_bytes += len(str(tokenizer.decode(token_ids, skip_special_tokens=True)).encode())
        nats += float(np.asarray(losses(params, window), np.float64)[counts].sum())
        tokens += int(counts.sum())
    return {
        "nats_per_token": round(nats / tokens, 4),
        "bits_per_byte": round(nats / np.log(2) / num_bytes, 4),
        "tokens": tokens,
        "samples": len(samples),
    }


def pick_sample(held_out: dict[str, list[Sample]]) -> list[Sample]:
    """Twelve held-out pages and twelve held-out chats for the tests, chosen by a fixed seed."""
    rng = random.Random("sample")
    return [sample for samples in held_out.values() for sample in rng.sample(samples, min(12, len(samples)))]


def save(
    config: PretrainedConfig,
    params: Params,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    record: dict[str, Any],
    sample: list[Sample],
) -> None:
    """Write the checkpoint in bfloat16, the tokenizer, the record, the card and the held-out sample."""
    recipe.out.mkdir(parents=True, exist_ok=True)
    stored = AutoModelForTPU.from_config(config, dtype="bfloat16", seed=recipe.seed)
    stored.params = params
    stored.generation_config = GenerationConfig(
        **special_token_ids(tokenizer),
        suppress_tokens=tokenizer.convert_tokens_to_ids([BEGIN, PAD, *ROLES]),
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        repetition_penalty=1.1,
        max_new_tokens=160,
    )
    stored.save_pretrained(recipe.out)
    tokenizer.save_pretrained(recipe.out)
    (recipe.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    recipe.held_out_sample.write_text(json.dumps(sample, indent=1) + "\n")
    write_card(recipe.out)


def _versions() -> dict[str, str]:
    packages = ("jax", "torch", "torchax", "transformers", "optax", "tokenizers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def _num_parameters(params: Params) -> int:
    return sum(value.size for value in params.values())


def _restart_with_large_pages() -> None:
    """Start this program anew with glibc told to keep large buffers and back them with huge pages.

    By default glibc returns every buffer above 32 MiB to the kernel at once, and XLA's next one faults in page by page:
    measured here 5,900 against 8,500 tokens a second. glibc reads these variables only when a process starts.
    """
    settings = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    }
    if sys.platform == "linux" and not settings.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})


if __name__ == "__main__":
    _restart_with_large_pages()
    main(sys.argv[1:])
