"""Host memory while weights are loaded, and afterwards: what is held, and little besides."""

from __future__ import annotations

import json
from pathlib import Path

import loading_memory
import torch
import transformers
from safetensors.torch import save_file

WIDTH, INNER, LAYERS = 1536, 4096, 5
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
    calls = [(packed, {}), (plain, {"quantization": "int4"}), (plain, {"quantization": "int8"})]
    results = loading_memory.measure(calls)
    largest = INNER * WIDTH * 2  # in bfloat16
    for (_, options), found in zip(calls, results, strict=True):
        assert found["end"] <= 1.1 * found["held"] + MARGIN, (options, found)
        in_work = (
            8 * largest
        )  # two threads read a tensor each, and write its codes; freed memory goes back now and then
        assert found["peak"] <= 1.1 * found["held"] + in_work + MARGIN, (options, found)
