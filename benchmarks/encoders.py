"""Embeddings of texts of many lengths with an encoder of MiniLM's shape, by hfax and by torch (eager).

    python benchmarks/encoders.py --json-file benchmarks/results/encoders.json

Each subject has a process of its own and embeds the same texts, sorted into batches by the same rule, with masked mean pooling:
torch eager, hfax without programs on disk, and hfax again with them. Seconds are of the whole run, with tracing and compiling, but
without imports and loading. The weights are random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from own_process import run_subject

SHAPE: dict[str, int] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
SUBJECTS = ("torch eager", "hfax, no stored programs", "hfax, stored programs")


def _texts(count: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1000, SHAPE["vocab_size"], n).tolist() for n in rng.integers(4, longest + 1, count)]


def _embed_with_torch(folder: str, texts: list[list[int]], batch_size: int) -> tuple[float, int, np.ndarray]:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    started = time.perf_counter()
    found = np.zeros((len(texts), SHAPE["hidden_size"]), np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        longest = max(len(texts[i]) for i in places)
        ids = torch.zeros((len(places), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(places):
            ids[row, : len(texts[i])], mask[row, : len(texts[i])] = torch.tensor(texts[i]), 1
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        found[places] = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
    return time.perf_counter() - started, 0, found


def _embed_with_hfax(folder: str, texts: list[list[int]], batch_size: int) -> tuple[float, int, np.ndarray]:
    from hfax import AutoModelForTPU
    from hfax.generation.batches import encode

    model = AutoModelForTPU.from_pretrained(folder, task="feature-extraction")
    started = time.perf_counter()
    found = np.zeros((len(texts), SHAPE["hidden_size"]), np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        inputs = encode([texts[i] for i in places], "text", None, is_left=False, pad_token_id=0)
        hidden, mask = np.asarray(model(**inputs).last_hidden_state), inputs["attention_mask"]
        found[places] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return time.perf_counter() - started, len(model.parts.programs.made), found


def _measure(subject: str, folder: str, count: str, longest: str, batch_size: str) -> None:
    embed = _embed_with_torch if subject == SUBJECTS[0] else _embed_with_hfax
    seconds, programs, found = embed(folder, _texts(int(count), int(longest)), int(batch_size))
    np.save(Path(folder) / f"{subject}.npy", found)
    print(json.dumps({"subject": subject, "seconds": round(seconds, 3), "programs": programs}))


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--subject", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.subject:
        _measure(*args.subject)
        return
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.BertConfig(**SHAPE)
        transformers.BertModel(config).save_pretrained(folder)
        home = str(Path(folder) / "home")
        given = [folder, str(args.texts), str(args.longest), str(args.batch_size)]
        rows = [run_subject(__file__, [subject, *given], home) for subject in SUBJECTS]
        vectors = [np.load(Path(folder) / f"{s}.npy") for s in SUBJECTS]
    for row, found in zip(rows, vectors, strict=True):
        row["texts_per_second"] = round(args.texts / row["seconds"], 1)
        row["times_torch"] = round(rows[0]["seconds"] / row["seconds"], 2)
        row["largest_difference"] = float(np.abs(found - vectors[0]).max())
    print("| subject | seconds | texts/s | times torch | programs | largest difference |\n" + "| --- " * 6 + "|")
    for row in rows:
        print(
            "| {subject} | {seconds:.1f} | {texts_per_second} | {times_torch} | {programs} | {largest_difference:.1e} |".format(
                **row
            )
        )
    if args.json_file:
        setting = {"texts": args.texts, "longest": args.longest, "batch_size": args.batch_size, "shape": SHAPE}
        args.json_file.write_text(json.dumps({**setting, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
