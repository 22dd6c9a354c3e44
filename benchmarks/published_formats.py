"""Decoding and prompts on CPU with checkpoints as they are published, beside bfloat16 and llama.cpp on the same GGUF file.

    python benchmarks/published_formats.py --json-file benchmarks/results/published-formats.json
    python benchmarks/published_formats.py --shape tiny --rounds 1                         # does the benchmark work?

The weights are random numbers of the shape: rounded as GPTQ and AWQ store them (4 bits, groups of 128), as DeepSeek stores FP8
(blocks of 128 x 128), and by llama.cpp's own program into GGUF files, which hfax and llama.cpp both run. Subjects take turns, a
process each; figures are medians over the rounds, ratios of measurements of the same round. Decoding: 32 tokens after 128; prompts:
512 tokens; batch 1; one thread for each core. Memory is that of a process which loads the checkpoint, without the pages of files,
less what it has after imports. The first run builds llama.cpp (see `peers_cpu.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from llama_cpp import parser_of, prepare_llama_cpp, rates_in_turns, run_benchmark, write_gguf

from hfax.bench.spec import Case, SubjectSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import loading_memory
import packers

GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
PLAIN = "bfloat16"
"""The subject that others are compared with."""


def memory_of(model: Path) -> dict[str, int]:
    """Bytes of a model's weights, of the largest array, and at most taken while it is loaded, in a process of its own."""
    return loading_memory.measure([(model, {"dtype": "bfloat16"})], JAX_PLATFORMS="cpu")[0]


def write_checkpoints(shape: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Folders with the shape's random weights, by format."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = folder / "config.json"
    config.write_text(json.dumps(shape))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    tensors, fields = packers.plain_tensors(folder / PLAIN, model)

    def pack_fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        values, scale, numbers = packers.fp8(weight, (128, 128))
        return {"weight": values, "weight_scale_inv": scale}, numbers

    four_bits = {"bits": 4, "group_size": 128}
    packed: dict[str, tuple[Any, dict[str, Any]]] = {
        "GPTQ": (
            lambda name, w: packers.gptq(w, size=128),
            four_bits | {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        ),
        "AWQ": (
            lambda name, w: packers.awq(w, size=128),
            four_bits | {"quant_method": "awq", "zero_point": True, "version": "gemm"},
        ),
        "FP8": (
            pack_fp8,
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ),
    }
    folders = {PLAIN: folder / PLAIN}
    for name, (pack, quantization) in packed.items():
        stored, _ = packers.quantized(tensors, pack)
        folders[name] = packers.write(folder / name, stored, fields, quantization)
    return folders


def measure(options: argparse.Namespace, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Rates of every subject in tokens per second, by case, a list with one entry a round."""
    cases = [Case(kind="decode", tokens=32), Case(kind="prefill", context=64 if options.shape == "tiny" else 512)]
    llama = prepare_llama_cpp(options.cache, "native")
    files = write_gguf(llama, shape, folder, GGUF_TYPES)
    models = write_checkpoints(shape, folder) | files
    memory = {name: memory_of(model) for name, model in models.items()}
    specs = [SubjectSpec(name=n, kind="hfax", model=str(model), dtype="bfloat16") for n, model in models.items()]
    environment = {"HFAX_HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu"}
    turns = {"llama": llama, "files": files, "rounds": options.rounds, "environment": environment}
    found = rates_in_turns(specs, cases, **turns)
    weight_bytes = {name: facts["weight_bytes_a_step"] for name, facts in found.pop("facts").items()}
    return {**found, "weight_bytes_a_step": weight_bytes, "memory": memory}


def table(found: dict[str, Any]) -> str:
    """A Markdown table: medians; the ratios to bfloat16 and, for GGUF files, to llama.cpp, medians over the rounds."""
    rates = found["rates"]

    def times(subject: str, other: str, case: str) -> str:
        ratios = [a / b for a, b in zip(rates[subject][case], rates[other][case], strict=True)]
        return f"{statistics.median(ratios):.2f} times ({min(ratios):.2f}, {max(ratios):.2f})"

    lines = [
        "| checkpoint | MB a step | case | hfax, tokens/s | beside bfloat16 | llama.cpp, tokens/s | hfax beside llama.cpp |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for subject in (name for name in rates if not name.startswith("llama.cpp")):
        peer = f"llama.cpp {subject}"
        for case, each in rates[subject].items():
            cells = [subject, f"{found['weight_bytes_a_step'][subject] / 1e6:.0f}", case]
            cells += [f"{statistics.median(each):.1f}", times(subject, PLAIN, case)]
            if peer in rates:
                cells += [f"{statistics.median(rates[peer][case]):.1f}", times(subject, peer, case)]
            else:
                cells += ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| checkpoint | weights, MB | largest array, MB | most memory while loading, MB |",
        "| --- | --- | --- | --- |",
    ]
    for subject, sizes in found["memory"].items():
        lines.append(
            f"| {subject} | {' | '.join(f'{sizes[name] / 1e6:.0f}' for name in ('held', 'largest', 'peak'))} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    return run_benchmark(parser_of(__doc__).parse_args(), measure, table, {})


if __name__ == "__main__":
    sys.exit(main())
