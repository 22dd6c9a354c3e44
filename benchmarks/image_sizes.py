"""Images of many sizes, with a model of Qwen2.5-VL-3B's widths, by hfax and by torch (eager).

    python benchmarks/image_sizes.py --json-file benchmarks/results/image-sizes.json
    python benchmarks/image_sizes.py --work forward --json-file benchmarks/results/image-sizes-forward.json
    python benchmarks/image_sizes.py --work training --images 20 --largest 400 --layers 2 \
        --json-file benchmarks/results/image-sizes-training.json

Each subject has a process of its own and works on the same images, one after another: it writes a few tokens about each, computes
the loss of the text beside it, or takes a training step (SGD, all weights, texts padded to 256 tokens). The subjects are torch
eager; hfax with a program for each mix of sizes, and with size classes, without programs on disk; and hfax again with them. Seconds
are of the whole run, with tracing and compiling, but without imports and loading. The weights are random, the model has few layers,
and images are noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from own_process import run_subject

SUBJECTS = ("torch eager", "hfax, a program for each size", "hfax, size classes", "hfax, size classes, stored programs")
TOKENS = 8
LENGTH = 256
"""Tokens of a training text with its padding."""
RATE = 1e-4
"""The learning rate."""


def _config(layers: int) -> Any:
    import transformers

    text = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2}
    vision = {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "num_hidden_layers": layers, "vocab_size": 151936, "max_position_embeddings": 32768},
        vision_config={**vision, "depth": layers, "fullatt_block_indexes": [layers - 1]},
        image_token_id=151655,
        tie_word_embeddings=True,
    )


def _prompts(config: Any, count: int, largest: int) -> list[dict[str, Any]]:
    """Images of 100 to `largest` pixels a side with a question of 30 tokens, as the processor makes them."""
    import torch

    rng, merge, vision = np.random.default_rng(0), config.vision_config.spatial_merge_size, config.vision_config
    found = []
    for height, width in rng.integers(100, largest + 1, (count, 2)):
        rows, columns = (max(round(side / 28), 2) * merge for side in (height, width))
        patches = torch.from_numpy(rng.standard_normal((rows * columns, 3 * 2 * vision.patch_size**2), np.float32))
        ids = [1, 2, 3, *[config.image_token_id] * (rows * columns // merge**2), *rng.integers(10, 1000, 27).tolist()]
        tokens = torch.tensor([ids])
        found.append(
            {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "mm_token_type_ids": (tokens == config.image_token_id).long(),
                "pixel_values": patches,
                "image_grid_thw": torch.tensor([[1, rows, columns]]),
            }
        )
    return found


def _with_labels(inputs: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """The inputs of a loss over the text beside an image, padded on the right."""
    import torch

    tokens = {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["mm_token_type_ids"] == 1, -100)}
    padding = 0 if length is None else length - inputs["input_ids"].shape[1]
    fills = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0, "labels": -100}
    return {n: torch.nn.functional.pad(v, (0, padding), value=fills[n]) if n in fills else v for n, v in tokens.items()}


def _worker(work: str, model: Any, *, is_torch: bool) -> Callable[[dict[str, Any]], Any]:
    """What is timed, of a prompt's inputs: it returns tokens or a loss."""
    import torch

    if work == "generate":
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return lambda inputs: model.generate(**inputs, **options)[0, -TOKENS:].tolist()
    if work == "forward":

        def loss(inputs: dict[str, Any]) -> float:
            with torch.no_grad():
                return float(model(**_with_labels(inputs)).loss)

        return loss
    if is_torch:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def torch_step(inputs: dict[str, Any]) -> float:
            optimizer.zero_grad()
            loss = model(**_with_labels(inputs, LENGTH)).loss
            loss.backward()
            optimizer.step()
            return float(loss)

        return torch_step
    import optax

    from hfax import make_train_step

    step = make_train_step(model, optax.sgd(RATE), dropout=False)
    states = [step.init(copy=False)]

    def hfax_step(inputs: dict[str, Any]) -> float:
        states[0], metrics = step(states[0], _with_labels(inputs, LENGTH))
        hfax_step.programs = len(step._programs)  # pyright: ignore[reportFunctionMemberAccess]
        return float(metrics["loss"])

    return hfax_step


def _measure(subject: str, folder: str, count: str, largest: str, work: str) -> None:
    import transformers

    if subject == SUBJECTS[0]:
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    else:
        from hfax import AutoModelForTPU

        model = AutoModelForTPU.from_pretrained(folder)
        model.pads_inputs = subject != SUBJECTS[1]
    prompts = _prompts(model.config, int(count), int(largest))
    run = _worker(work, model, is_torch=subject == SUBJECTS[0])
    results, seconds = [], []
    for prompt in prompts:
        started = time.perf_counter()
        results.append(run(prompt))
        seconds.append(time.perf_counter() - started)
    row = {
        "subject": subject,
        "seconds": round(sum(seconds), 2),
        "slowest_s": round(max(seconds), 2),
        "median_s": round(float(np.median(seconds)), 2),
        "programs": 0 if subject == SUBJECTS[0] else getattr(run, "programs", 0) or len(model.parts.programs.made),
        "found": results,
    }
    print(json.dumps(row))


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--largest", type=int, default=600, help="pixels a side")
    parser.add_argument("--layers", type=int, default=4, help="of the text model and of the vision tower")
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--work", choices=("generate", "forward", "training"), default="generate")
    parser.add_argument("--subject", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.subject:
        _measure(*args.subject)
        return
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen2_5_VLForConditionalGeneration(_config(args.layers)).save_pretrained(folder)
        homes = [str(Path(folder) / name) for name in ("none", "exact", "classes", "classes")]
        given = [folder, str(args.images), str(args.largest), args.work]
        rows = [run_subject(__file__, [s, *given], home) for s, home in zip(SUBJECTS, homes, strict=True)]
    found = [row.pop("found") for row in rows]
    for row, own in zip(rows, found, strict=True):
        row["times_torch"] = round(rows[0]["seconds"] / row["seconds"], 2)
        if args.work == "generate":
            row["same_texts"] = sum(a == b for a, b in zip(own, found[0], strict=True))
        else:
            row["largest_difference"] = float(np.max(np.abs(np.subtract(own, found[0]))))
    names = list(rows[0])
    print(f"| {' | '.join(names)} |\n{'| --- ' * len(names)}|")
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in names)} |")
    if args.json_file:
        setting = {
            "images": args.images,
            "largest": args.largest,
            "layers": args.layers,
            "tokens": TOKENS,
            "work": args.work,
        }
        args.json_file.write_text(json.dumps({**setting, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
