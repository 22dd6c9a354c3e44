"""What packed weights, and a KV cache of 8 bits, cost in quality: the demo model on its held-out text.

    python benchmarks/quantization.py --json-file benchmarks/results/quantization.json      # about a minute

Perplexity over the texts (e to the mean loss of a token), and how far the logits move: the root mean square of their difference
over that of the full model's centred logits, the mean divergence (Kullback-Leibler, nats a token) of the distributions of the next
token, and how often the likeliest token stays the same. Of the KV cache: the perplexity by the engine, whose prompts attend to what
the cache holds, and how often the likeliest token stays the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams, quantize
from hfax.load.source import resolve_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from demo_corpus import read_corpus

TEXTS = Path(__file__).parents[1] / "tests" / "demo" / "held_out_sample.json"


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """[..., vocab] float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def measure(full: list[np.ndarray], other: list[np.ndarray], ids: list[np.ndarray]) -> dict[str, float]:
    """Figures of one model's logits, [length, vocab] for each text, beside the full model's."""
    losses, divergences, same, moved, size = [], [], [], 0.0, 0.0
    for reference, logits, tokens in zip(full, other, ids, strict=True):
        expected, got = log_probabilities(reference), log_probabilities(logits)
        losses.append(-got[np.arange(len(tokens) - 1), tokens[1:]])
        divergences.append((np.exp(expected) * (expected - got)).sum(axis=-1))
        same.append(reference.argmax(-1) == logits.argmax(-1))
        centred = reference - reference.mean(axis=-1, keepdims=True)
        moved += float(((logits - logits.mean(axis=-1, keepdims=True) - centred) ** 2).sum())
        size += float((centred**2).sum())
    return {
        "perplexity": float(np.exp(np.concatenate(losses).mean())),
        "logit_error": float(np.sqrt(moved / size)),
        "divergence_nats": float(np.concatenate(divergences).mean()),
        "same_likeliest": float(np.concatenate(same).mean()),
    }


def read_by_engine(model: Any, ids: list[np.ndarray], kv_cache_dtype: str) -> tuple[list[float], list[int]]:
    """The log-probability of every token but the texts' first ones, and the likeliest token in its place."""
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype, max_model_len=512, enable_prefix_caching=False)
    with Engine(model, config=config) as engine:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        outputs = engine.generate([each[0].tolist() for each in ids], params)
    tokens = [token for output in outputs for token in output.prompt_logprobs]
    return [token.logprob for token in tokens], [token.top[0][0] for token in tokens]


def open_model(kind: str | None, rows: int) -> Any:
    """The demo model: with its own weights, rounded while it is loaded, or quantized with `rows` rows of calibration data."""
    if kind not in ("gptq", "awq"):
        return AutoModelForTPU.from_pretrained("demo", quantization=kind)
    documents = read_corpus().train
    with tempfile.TemporaryDirectory() as folder:
        data = [{"text": document.text} for document in documents[:: max(1, len(documents) // (8 * rows))]]
        quantize("demo", folder, data=data, method=kind, num_samples=rows, max_length=256)
        return AutoModelForTPU.from_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, help="how many of the held-out texts; all of them unless said otherwise")
    parser.add_argument("--length", type=int, default=256, help="most tokens of a text")
    parser.add_argument("--calibration-rows", type=int, default=128, help="of 256 tokens, for gptq and awq")
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_checkpoint("demo").folder)
    texts = [
        text if isinstance(text, str) else tokenizer.apply_chat_template(text, tokenize=False)
        for text in json.loads(TEXTS.read_text())[: options.texts]
    ]
    ids = [tokenizer(text, return_tensors="np").input_ids[:, : options.length] for text in texts]
    # one length, so that one program serves: what follows a text's end is not looked at
    padded = [np.pad(each, ((0, 0), (0, options.length - each.shape[1]))) for each in ids]
    results: dict[str, Any] = {"texts": len(texts), "tokens": int(sum(each.shape[1] for each in ids))}
    full: list[np.ndarray] = []
    for kind in (None, "int8", "int4", "gptq", "awq"):
        model = open_model(kind, options.calibration_rows)
        logits = [
            np.asarray(model(input_ids=row).logits[0, : each.shape[1]], np.float64)
            for row, each in zip(padded, ids, strict=True)
        ]
        full = full or logits
        name = kind or "full"
        megabytes = sum(array.nbytes for array in model.params.values()) / 1e6
        results[name] = {"megabytes": megabytes, **measure(full, logits, [each[0] for each in ids])}
        row = results[name]
        print(
            f"{name:5s} {row['megabytes']:6.1f} MB   perplexity {row['perplexity']:7.3f}   logits off by "
            f"{row['logit_error']:6.2%}   divergence {row['divergence_nats']:.5f} nats   same likeliest "
            f"{row['same_likeliest']:6.1%}",
            flush=True,
        )
    model = AutoModelForTPU.from_pretrained("demo")
    (plain, likeliest), (rounded, then) = (read_by_engine(model, ids, name) for name in ("auto", "fp8"))
    results["kv_cache"] = {
        "perplexity": float(np.exp(-np.mean(plain))),
        "perplexity_fp8": float(np.exp(-np.mean(rounded))),
        "same_likeliest": float(np.mean(np.array(likeliest) == np.array(then))),
    }
    print(
        "KV cache of float8: perplexity {perplexity_fp8:.3f}, {perplexity:.3f} without; same likeliest {same_likeliest:.1%}".format(
            **results["kv_cache"]
        )
    )
    if options.json_file:
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
