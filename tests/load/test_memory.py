"""Host memory while weights are loaded, and afterwards: what is held, and little besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

WIDTH, INNER, LAYERS = 1536, 4096, 5
SCRIPT = """
import gc, json, sys, threading
import jax
from hfax import AutoModelForTPU

def anonymous():  # this process's own pages, without those of files
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

AutoModelForTPU.from_pretrained("demo")  # imports, and what a first load sets up
found = []
for folder, options in json.loads(sys.argv[1]):
    gc.collect()
    before, peak, done = anonymous(), 0, threading.Event()
    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = AutoModelForTPU.from_pretrained(folder, **options)
    done.set()
    watcher.join()
    arrays = jax.tree.leaves(model.params)
    found.append({"held": sum(a.nbytes for a in arrays), "largest": max(a.nbytes for a in arrays),
                  "peak": peak - before, "end": anonymous() - before})
    del model, arrays
print(json.dumps(found))
"""
MARGIN = 24 << 20
"""Bytes: the interpreter's, allocators' and threads' own."""


def _save(folder: Path, *, gptq: bool) -> Path:
    """A Llama of 107 million weights in layers, as GPTQ with 4 bits or in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=12
    ).to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    tensors = {
        f"{name}.weight": torch.ones(512, WIDTH, dtype=torch.bfloat16) for name in ("model.embed_tokens", "lm_head")
    }
    tensors["model.norm.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    square = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    shapes = {**square, "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
        for name, (rows, columns) in shapes.items():
            module = f"{layer}.{name}"
            if gptq:
                tensors[f"{module}.qweight"] = torch.full((columns // 8, rows), 0x12345678, dtype=torch.int32)
                tensors[f"{module}.qzeros"] = torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32)
                tensors[f"{module}.scales"] = torch.full((columns // 128, rows), 0.01, dtype=torch.float16)
                tensors[f"{module}.g_idx"] = torch.arange(columns, dtype=torch.int32) // 128
            else:
                tensors[f"{module}.weight"] = torch.full((rows, columns), 0.5, dtype=torch.bfloat16)
    if gptq:
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_packed_checkpoint_takes_its_own_size_and_a_quantized_one_what_is_left_of_it(tmp_path: Path) -> None:
    """A norm must not keep the memory of the tensors that were read beside it."""
    packed, plain = _save(tmp_path / "gptq", gptq=True), _save(tmp_path / "plain", gptq=False)
    calls = [[str(packed), {}], [str(plain), {"quantization": "int4"}], [str(plain), {"quantization": "int8"}]]
    # A demo that started from stored programs would leave torch to be imported by the first load that is measured.
    environment = os.environ | {"HFAX_PROGRAM_CACHE": "0"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    largest = INNER * WIDTH * 2  # in bfloat16
    for (_, options), found in zip(calls, json.loads(done.stdout), strict=True):
        assert found["end"] <= 1.1 * found["held"] + MARGIN, (options, found)
        in_work = (
            8 * largest
        )  # two threads read a tensor each, and write its codes; freed memory goes back now and then
        assert found["peak"] <= 1.1 * found["held"] + in_work + MARGIN, (options, found)
