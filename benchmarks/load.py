"""Seconds and memory to read a checkpoint's tensors, beside a plain sequential read of the same file.

    python benchmarks/load.py    # makes 1.2 GB of random bfloat16 weights in a temporary folder, removed afterwards
    python benchmarks/load.py --repeats 10 --json benchmarks/out/load.json

Every case runs in a process of its own, once to warm up and `repeats` times; the file is in the page cache. Two copies
of the checkpoint are read: `as others write it`, with the header padded to 8 bytes, whose tensors must be copied to be
aligned for XLA; and `as hfax writes it`, aligned in the file and therefore mapped. Peak memory is the process's, less
what it has after imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hfax.load.safetensors_file import SafetensorsFile
from hfax.load.safetensors_header import make_header

GIGABYTE = 1e9
LAYER = {
    "self_attn.q_proj": (2048, 1024),
    "self_attn.k_proj": (1024, 1024),
    "self_attn.v_proj": (1024, 1024),
    "self_attn.o_proj": (1024, 2048),
    "self_attn.q_norm": (128,),
    "self_attn.k_norm": (128,),
    "mlp.gate_proj": (3072, 1024),
    "mlp.up_proj": (3072, 1024),
    "mlp.down_proj": (1024, 3072),
    "input_layernorm": (1024,),
    "post_attention_layernorm": (1024,),
}
"""Qwen3-0.6B's shapes."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def read_chunks(path: Path) -> object:
    """The plain read: into one reused buffer of 16 MB, which stays in the processor's cache. Nothing is kept."""
    buffer = bytearray(16_000_000)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return None


def read_whole(path: Path) -> object:
    """The plain read that keeps what it reads."""
    return path.read_bytes()


def read_tensors(path: Path) -> object:
    """hfax: every tensor as an aligned numpy array, all kept."""
    with SafetensorsFile(path) as file:
        return [file.read(name) for name in file.tensors]


def read_with_safetensors(path: Path) -> object:
    """The safetensors library: torch tensors that map the file; one value a page is looked at, so that all are read."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    return tensors, [int(tensor.view(-1)[::2048].view(torch.int16).max()) for tensor in tensors.values()]


def load_model(path: Path) -> object:
    """hfax: the whole of `from_pretrained`, structure and all."""
    import jax

    from hfax import AutoModelForTPU

    return jax.block_until_ready(AutoModelForTPU.from_pretrained(path.parent).params)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "plain read, reused 16 MB buffer": (read_chunks, "foreign"),
    "plain read, kept (f.read())": (read_whole, "foreign"),
    "hfax, as others write it (copied)": (read_tensors, "foreign"),
    "hfax, as hfax writes it (mapped)": (read_tensors, "aligned"),
    "from_pretrained, as others write it": (load_model, "foreign"),
    "from_pretrained, as hfax writes it": (load_model, "aligned"),
    "safetensors.torch.load_file": (read_with_safetensors, "foreign"),
}


def write_checkpoint(path: Path, num_layers: int, shift_bytes: int) -> None:
    """Random bytes under the names of a model; the data begins `shift_bytes` after a multiple of 64."""
    shapes = {"model.embed_tokens.weight": (151936, 1024), "model.norm.weight": (1024,)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in LAYER.items()}
    sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) * 2 for name, shape in shapes.items()}
    header = make_header({name: ("BF16", shapes[name], sizes[name]) for name in shapes}, {"format": "pt"})
    text = header[8:] + b" " * shift_bytes
    block = os.urandom(16 << 20)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = sum(sizes.values())
        while left:
            left -= file.write(block[: min(left, len(block))])


def run_case(name: str, folder: Path, repeats: int) -> dict[str, float | str]:
    """In this process: warm up, then time."""
    read, variant = CASES[name]
    path = folder / variant / "model.safetensors"
    num_bytes = path.stat().st_size
    if read is read_with_safetensors:
        import safetensors.torch  # noqa: F401  (its import is not what is measured)
    if read is load_model:
        import jax
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401

        import hfax.backends.jax.model  # noqa: F401

        jax.devices()
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        kept = read(path)
        seconds.append(time.perf_counter() - start)
        del kept
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rates = [num_bytes / s / GIGABYTE for s in seconds[1:]]
    return {
        "case": name,
        "first_gb_per_s": num_bytes / seconds[0] / GIGABYTE,
        "median_gb_per_s": statistics.median(rates),
        "best_gb_per_s": max(rates),
        "peak_over_size": (peak - imported) / num_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=28, help="layers of Qwen3-0.6B's shape, 31 MB each, beside 311 MB"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.folder, options.repeats)))
        return
    with tempfile.TemporaryDirectory(prefix="hfax-load-") as name:
        folder = Path(name)
        for variant, shift_bytes in (("foreign", 8), ("aligned", 0)):
            (folder / variant).mkdir()
            write_checkpoint(folder / variant / "model.safetensors", options.layers, shift_bytes)
            config = CONFIG | {"num_hidden_layers": options.layers}
            (folder / variant / "config.json").write_text(json.dumps(config))
        num_bytes = (folder / "aligned" / "model.safetensors").stat().st_size
        print(f"{num_bytes / GIGABYTE:.2f} GB, {os.cpu_count()} cores, Linux {platform.release()}")
        print(f"{'GB/s':36}{'first':>8}{'median':>8}{'best':>8}{'peak/size':>11}")
        results = []
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, "--folder", name, "--repeats", str(options.repeats)]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results.append(result)
            figures = [result[key] for key in ("first_gb_per_s", "median_gb_per_s", "best_gb_per_s", "peak_over_size")]
            print(f"{case:36}" + "".join(f"{figure:8.2f}" for figure in figures[:3]) + f"{figures[3]:11.2f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"bytes": num_bytes, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
