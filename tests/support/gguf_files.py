"""GGUF files of small models, written by gguf-py as llama.cpp's convert_hf_to_gguf.py writes them.

Names come from gguf-py's own table; the few tensors whose values llama.cpp changes are changed here as it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from hfax.demo import demo_folder

Tensors = dict[str, np.ndarray]


class Blocks(NamedTuple):
    """A tensor as a file stores it: [rows, bytes] uint8, and its type."""

    rows: np.ndarray
    type: Type


SCALES_AT = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
"""Where the blocks of a type, of 256 values, have their float16 scales."""


def k_quants(shape: tuple[int, ...], kind: Type, seed: int) -> Blocks:
    """Random blocks of a type that gguf-py reads and does not write, for weights of about 0.1."""
    generator = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = generator.uniform(0.5, 1, blocks.shape[:2]).astype(np.float16) * np.float16(2.0**-13)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return Blocks(blocks.reshape(shape[0], -1), kind)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    type_of: Callable[[str, np.ndarray], Type] = lambda name, array: Type.F32,
    *,
    raw: Mapping[str, np.ndarray | Blocks] | None = None,
    raw_type: Type = Type.Q4_K,
) -> Path:
    """Write a file.

    Args:
        path: of the file.
        architecture: llama.cpp's name; the prefix of metadata keys that begin with a dot.
        metadata: by key: str, bool, int, float, or a list of one of them; keys of tokenizers in full.
        tensors: float32, in torch's order.
        type_of: the type that a tensor is stored in.
        raw: blocks in place of some tensors, or bytes of the type `raw_type`, [rows, bytes].
        raw_type: the type of bytes.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        key = architecture + key if key.startswith(".") else key
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, array in tensors.items():
        if (given := (raw or {}).get(name)) is not None:
            given = given if isinstance(given, Blocks) else Blocks(given, raw_type)
            writer.add_tensor(name, given.rows, raw_dtype=given.type)
            continue
        kind = type_of(name, array)
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_demo_gguf(path: Path, kind: Type = Type.Q4_0) -> Path:
    """The demo model as llama.cpp writes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder())
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder())
    stored = json.loads((demo_folder() / "tokenizer.json").read_text())
    config = model.config
    special = {token["id"] for token in stored["added_tokens"] if token["special"]}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    types = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for _, index in vocabulary]
    metadata = {
        "general.name": "demo",
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".attention.key_length": config.head_dim,
        ".attention.value_length": config.head_dim,
        ".rope.dimension_count": config.head_dim,
        ".rope.freq_base": config.rope_parameters["rope_theta"],
        ".vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(
        path,
        "llama",
        metadata,
        tensors_of(model.float(), gguf.MODEL_ARCH.LLAMA),
        lambda _, array: kind if array.ndim == 2 else Type.F32,
    )


def tensors_of(model: Any, architecture: gguf.MODEL_ARCH) -> Tensors:
    """A transformers model's weights under llama.cpp's names, with its values."""
    config = model.config
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: Tensors = {}
    for name, tensor in _split_experts(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        given = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert given is not None, name
        found[given] = _as_stored(given, tensor, config, architecture).float().contiguous().numpy()
    return found


def _split_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            found[f"{prefix}gate_proj.weight"], found[f"{prefix}up_proj.weight"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def _as_stored(name: str, tensor: torch.Tensor, config: Any, architecture: gguf.MODEL_ARCH) -> torch.Tensor:
    arch = gguf.MODEL_ARCH
    if architecture == arch.LLAMA and (match := re.search(r"attn_(q|k)\.", name)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if architecture in (arch.GEMMA2, arch.GEMMA3) and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == arch.GPT2 and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name):
        return tensor.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return tensor[0]
    return tensor
