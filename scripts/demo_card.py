"""Writes the demo model's card: what the training recorded, and text that the model writes now.

    python scripts/demo_card.py src/hfax/demo

reads `training.json` and the checkpoint of a folder and writes its README.md. The samples are drawn by plain
transformers with a fixed seed, so that the card does not depend on hfax's random numbers; they are not picked by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

PROMPTS = ("The function returns", "Return a new", "This module provides")
QUESTIONS = (
    "What does textwrap.dedent do?",
    "Explain os.path.join",
    "What is the json module?",
    "What does str.split do?",
    "Who are you?",
)


def main(folder: Path) -> None:
    """Write the card of the checkpoint in `folder`."""
    write_card(folder)
    print(folder / "README.md")


def write_card(folder: Path) -> None:
    """Read `training.json` and the checkpoint in `folder`; write `README.md` there."""
    record = json.loads((folder / "training.json").read_text())
    (folder / "README.md").write_text(CARD.format(**_figures(record), samples=_samples(folder)))


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    recipe, held_out = record["recipe"], record["held_out"]
    rows = {"Pages": held_out["pages"], "Chats": held_out["chats"], "Sample of both": held_out["sample"]}
    return {
        **{name: recipe[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "seed")},
        **{name: recipe[name] for name in ("num_attention_heads", "num_key_value_heads", "context", "short_window")},
        **{name: recipe[name] for name in ("muon_learning_rate", "adam_learning_rate", "weight_decay")},
        **{name: f"{recipe[name]:,}" for name in ("vocab_size", "tokens_per_step")},
        **{name: f"{record[name]:,}" for name in ("parameters", "steps", "training_tokens", "training_documents")},
        "training_megabytes": f"{record['training_characters'] / 1e6:.2f}",
        "training_loss": f"{record['training_loss']:.3f}",
        "minutes": f"{record['total_seconds'] / 60:.1f}",
        "total_seconds": f"{record['total_seconds']:.0f}",
        "preparing_seconds": f"{record['preparing_seconds']:.0f}",
        "optimizing_seconds": f"{record['optimizing_seconds']:.0f}",
        "cpu_minutes": f"{record['cpu_seconds'] / 60:.1f}",
        "tokens_per_second": f"{record['training_tokens'] / record['optimizing_seconds']:,.0f}",
        "cpu_cores": record["cpu_cores"],
        "long_percent": f"{100 * recipe['long_share']:.0f}",
        "python": record["versions"]["python"],
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "held_out_rows": "\n".join(
            f"| {name} | {loss['samples']} | {loss['tokens']:,} "
            f"| {loss['nats_per_token']:.3f} | {loss['bits_per_byte']:.3f} |"
            for name, loss in rows.items()
        ),
    }


def _samples(folder: Path) -> str:
    """What the model writes with the defaults of its generation config, as Markdown."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sections = []
    for prompt in PROMPTS:
        text = prompt + _continue(model, tokenizer, tokenizer.encode(prompt))
        sections.append(_quoted(f'Continuing "{prompt}":', text))
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        sections.append(_quoted(f'Asked "{question}":', _continue(model, tokenizer, token_ids)))
    return "\n\n".join(sections)


def _continue(model: Any, tokenizer: Any, token_ids: list[int]) -> str:
    set_seed(0)
    prompt = torch.tensor([token_ids])
    sequence = model.generate(prompt, attention_mask=torch.ones_like(prompt))[0]
    return tokenizer.decode(sequence[len(token_ids) :], skip_special_tokens=True)


def _quoted(heading: str, text: str) -> str:
    return f"{heading}\n\n" + "\n".join(f"    {line}".rstrip() for line in text.strip().split("\n"))


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [hfax, demo, jax]
---

# The demo model of hfax

A Llama-architecture language model of {parameters} parameters that ships inside the `hfax` package, so that
`hfax generate demo` and `hfax chat demo` have something to run without a download. It generates text that reads like
Python's own documentation, its only training data. Plain transformers loads this folder too.

## What it is not

- Not a source of facts. It invents functions, arguments and return values, and gets real ones wrong, in confident
  prose.
- Not an assistant. It has learned the form of questions and answers about Python's library, and a few greetings;
  nothing else.
- Not safe to act on, not tested for bias, English only, and not a measure of what hfax or transformers can do.

## How it was made

`python scripts/train_demo.py --out src/hfax/demo`, in the source repository, trains it from scratch with hfax itself:
random weights from `AutoModelForTPU.from_config`, `hfax.make_train_step`, optax, `save_pretrained`.

**Text.** The documentation inside CPython {python}: docstrings of the standard library's modules, classes and
functions (Python and C; tests left out), and the language reference behind `help()` (`pydoc_data.topics`);
{training_documents} documents, {training_megabytes} MB after deduplication. Hard-wrapped paragraphs are
joined and Sphinx roles removed. Each document appears as a page, with or without its heading, and as the answer to a
question ("What does textwrap.dedent do?" - the first paragraphs of the docstring), in conversations of one to three
turns, a few with a system message. Questions are resampled each epoch. A few greetings and questions about the model
itself were written by hand.

**Tokenizer.** Byte-level BPE, {vocab_size} tokens, trained on the same text. Special tokens `<|begin|>`, `<|end|>`,
`<|pad|>`, `<|system|>`, `<|user|>`, `<|assistant|>`; the chat template is a begin token, then
`<|role|>text<|end|>` for each message.

**Model.** {num_hidden_layers} layers, hidden size {hidden_size}, feed-forward {intermediate_size},
{num_attention_heads} query heads over {num_key_value_heads} key-value heads, tied embeddings, context {context}
tokens, weights stored in bfloat16.

**Training.** {steps} steps of {tokens_per_step} tokens, {training_tokens} tokens in all, in float32: Muon for the
matrices of the layers (learning rate {muon_learning_rate}, weight decay {weight_decay}), Adam for the embeddings and
the norms ({adam_learning_rate}), warm-up and cosine, seed {seed}; the last {long_percent}% of the steps on windows of
{context} tokens, the rest on {short_window}. It took {minutes} minutes ({total_seconds} s: {preparing_seconds} s for
the corpus, the tokenizer and the random weights, {optimizing_seconds} s of training at {tokens_per_second} tokens/s,
the rest for the held-out loss) and {cpu_minutes} minutes of CPU time, on {cpu_cores} cores of an x86-64 server with
AVX-512 that were shared with other work. Mean training loss of the last 50 steps: {training_loss} nats per token.

**Versions.** {versions}.

## Held-out loss

One document in 40, chosen by a hash of its name, was excluded from training and from the tokenizer; held-out documents
that begin like a training document were dropped. Each sample is scored separately, truncated to the context, with the
stored bfloat16 weights, in float32. Bits per byte count the text without special tokens.

| held out | samples | tokens | nats a token | bits a byte |
| --- | --- | --- | --- | --- |
{held_out_rows}

The last row is the file `tests/demo/held_out_sample.json` in the source repository; a test recomputes it with plain
transformers. All figures are in `training.json`.

## Sample outputs

Sampled by plain transformers in float32 with the defaults of `generation_config.json`, each after `set_seed(0)`: the
first sample, not the best of several. hfax samples other tokens from the same distribution.

{samples}

## Licences

The weights, the tokenizer and this folder: Apache-2.0, like hfax. The training text is CPython's documentation, under
the Python Software Foundation License Version 2: Copyright (c) 2001 Python Software Foundation; All Rights Reserved.
Long stretches that the model reproduces word for word stay under that licence.
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
