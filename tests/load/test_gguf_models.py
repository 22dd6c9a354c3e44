"""Models from GGUF files: the tokens that transformers generates from the same file, or from the model it was made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Type
from gguf_files import k_quants, tensors_of, write_gguf
from tiny_models import SIZES, random_model, tiny_llama

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError, UnsupportedModelError
from hfax.load.gguf.config import read_config
from hfax.load.gguf.model import GgufModel
from hfax.load.source import resolve_checkpoint

IDS = torch.tensor([[3, 5, 7, 11, 13]])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its config, and what llama.cpp writes beside the fields that all share.

    Args:
        config: transformers' config.
        architecture: gguf-py's.
        metadata: by key.
        is_mapped: transformers loads such a file.
    """

    config: Any
    architecture: MODEL_ARCH
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_mapped: bool = True


GEMMA: dict[str, Any] = {
    **SIZES,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
GEMMA_KEYS = {".attention.key_length": 256, ".attention.value_length": 256, ".attention.sliding_window": 8}
EXPERTS = {".expert_count": 4, ".expert_used_count": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES: dict[str, Family] = {
    "llama": Family(config=transformers.LlamaConfig(**SIZES), architecture=MODEL_ARCH.LLAMA),
    "llama, tied": Family(
        config=transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), architecture=MODEL_ARCH.LLAMA
    ),
    "mixtral": Family(
        config=transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        architecture=MODEL_ARCH.LLAMA,
        metadata=EXPERTS,
        is_mapped=False,
    ),
    "qwen2": Family(config=transformers.Qwen2Config(**SIZES), architecture=MODEL_ARCH.QWEN2),
    "qwen3": Family(
        config=transformers.Qwen3Config(**SIZES, head_dim=128),
        architecture=MODEL_ARCH.QWEN3,
        metadata={".attention.key_length": 128},
    ),
    "qwen2 moe": Family(
        config=transformers.Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=160
        ),
        architecture=MODEL_ARCH.QWEN2MOE,
        metadata={**EXPERTS, ".expert_feed_forward_length": 96, ".expert_shared_feed_forward_length": 160},
        is_mapped=False,  # transformers leaves the experts' widths at their defaults
    ),
    "qwen3 moe": Family(
        config=transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, head_dim=32, norm_topk_prob=True
        ),
        architecture=MODEL_ARCH.QWEN3MOE,
        metadata={**EXPERTS, ".attention.key_length": 32, ".expert_feed_forward_length": 768},
    ),
    "gemma2": Family(
        config=transformers.Gemma2Config(**GEMMA),
        architecture=MODEL_ARCH.GEMMA2,
        metadata={**GEMMA_KEYS, ".attn_logit_softcapping": 50.0, ".final_logit_softcapping": 30.0},
    ),
    "gemma3": Family(
        config=transformers.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 7}),
        architecture=MODEL_ARCH.GEMMA3,
        metadata={**GEMMA_KEYS, ".rope.freq_base": 1000000.0},
    ),
    "phi3": Family(config=transformers.Phi3Config(**SIZES), architecture=MODEL_ARCH.PHI3),
    "gpt2": Family(
        config=transformers.GPT2Config(
            vocab_size=97,
            n_positions=1024,
            n_embd=64,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=None,
        ),
        architecture=MODEL_ARCH.GPT2,
        metadata={".context_length": 1024, ".feed_forward_length": 256, ".attention.layer_norm_epsilon": 1e-5},
    ),
    "starcoder2": Family(
        config=transformers.Starcoder2Config(**SIZES),
        architecture=MODEL_ARCH.STARCODER2,
        metadata={".attention.layer_norm_epsilon": 1e-5},
    ),
}  # fmt: skip


def metadata_of(family: Family) -> dict[str, Any]:
    config = family.config
    found: dict[str, Any] = {
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".block_count": config.num_hidden_layers,
        ".attention.head_count": config.num_attention_heads,
        "tokenizer.ggml.tokens": [f"w{i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }
    for field, key in {
        "intermediate_size": ".feed_forward_length",
        "num_key_value_heads": ".attention.head_count_kv",
        "rms_norm_eps": ".attention.layer_norm_rms_epsilon",
    }.items():
        if (value := getattr(config, field, None)) is not None:
            found[key] = value
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        found[".rope.freq_base"] = float(rope["rope_theta"])
        found[".rope.dimension_count"] = config.hidden_size // config.num_attention_heads
    return found | family.metadata


def write(path: Path, family: Family, model: Any, type_of: Any = None, **extra: np.ndarray) -> Path:
    """The file that llama.cpp makes of a model."""
    tensors = tensors_of(model, family.architecture) | {name.replace("__", "."): array for name, array in extra.items()}
    name = gguf.MODEL_ARCH_NAMES[family.architecture]
    return write_gguf(path, name, metadata_of(family), tensors, *([type_of] if type_of else []))


def mixed(name: str, array: np.ndarray) -> Type:
    """As files mix them: matrices in several types, which fit rows of 32, and vectors in float32."""
    if array.ndim < 2 or "gate_inp" in name or "position" in name:
        return Type.F32
    kinds = {
        "attn_q.": Type.Q4_0,
        "attn_k.": Type.Q4_1,
        "attn_v.": Type.Q5_0,
        "ffn_down": Type.Q5_1,
        "token_embd": Type.F16,
    }
    return next((kind for part, kind in kinds.items() if part in name), Type.Q8_0)


def tokens_of(model: Any, ids: torch.Tensor = IDS) -> list[int]:
    return model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_tokens_of_the_model_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    model = random_model(family.config)
    path = write(tmp_path / "model.gguf", family, model)
    assert tokens_of(AutoModelForTPU.from_pretrained(path)) == tokens_of(model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].is_mapped])
def test_a_quantized_file_gives_transformers_tokens(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    path = write(tmp_path / "model.gguf", family, random_model(family.config), mixed)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert tokens_of(AutoModelForTPU.from_pretrained(path, dtype="float32")) == tokens_of(plain)


def test_a_mixture_of_k_quants_gives_transformers_tokens(tmp_path: Path) -> None:
    family = Family(
        config=transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
        architecture=MODEL_ARCH.LLAMA,
    )
    kinds = {
        "attn_q": Type.Q4_K,
        "attn_k": Type.Q3_K,
        "attn_v": Type.Q6_K,
        "attn_output": Type.Q2_K,
        "ffn_down": Type.Q5_K,
    }
    tensors = tensors_of(random_model(family.config), family.architecture)
    raw = {
        name: k_quants(array.shape, next((kind for part, kind in kinds.items() if part in name), Type.Q4_K), seed)
        for seed, (name, array) in enumerate(tensors.items())
        if array.ndim == 2
    }
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata_of(family), tensors, raw=raw)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert tokens_of(AutoModelForTPU.from_pretrained(path, dtype="float32")) == tokens_of(plain)


def llama3_factors(theta: float, size: int) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    found = []
    for i in range(0, size, 2):
        wave = 2 * np.pi * theta ** (i / size)
        smooth = (8192 / wave - 1) / (4 - 1)
        found.append(1 if wave < 8192 / 4 else 8 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return np.array(found, np.float32)


ROPES: dict[str, tuple[Family, dict[str, np.ndarray]]] = {
    "llama 3": (
        Family(
            config=transformers.LlamaConfig(
                **SIZES, rope_parameters={**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
            ),
            architecture=MODEL_ARCH.LLAMA,
        ),
        {"rope_freqs__weight": llama3_factors(5e5, 16)},
    ),
    "linear": (
        Family(
            config=transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
            ),
            architecture=MODEL_ARCH.LLAMA,
            metadata={".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        ),
        {},
    ),
    "yarn": (
        Family(
            config=transformers.Qwen2Config(
                **SIZES,
                rope_parameters={
                    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64
                },
            ),
            architecture=MODEL_ARCH.QWEN2,
            metadata={
                ".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.original_context_length": 64
            },
        ),
        {},
    ),
    "phi 3": (
        Family(
            config=transformers.Phi3Config(
                **SIZES,
                original_max_position_embeddings=64,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0 + i / 8 for i in range(8)],
                    "long_factor": [2.0 + i for i in range(8)],
                },
            ),
            architecture=MODEL_ARCH.PHI3,
            metadata={".rope.scaling.original_context_length": 64},
        ),
        {
            "rope_factors_short__weight": np.arange(8, dtype=np.float32) / 8 + 1,
            "rope_factors_long__weight": np.arange(8, dtype=np.float32) + 2,
        },
    ),
    "gemma 3": (
        Family(
            config=transformers.Gemma3TextConfig(
                **{**GEMMA, "num_hidden_layers": 7},
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
            architecture=MODEL_ARCH.GEMMA3,
            metadata={**GEMMA_KEYS, ".rope.freq_base": 1e6, ".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0},
        ),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotary_embeddings_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    family, extra = ROPES[name]
    model = random_model(family.config)
    path = write(tmp_path / "model.gguf", family, model, None, **extra)
    ids = torch.arange(3, 43)[None]
    assert tokens_of(AutoModelForTPU.from_pretrained(path), ids) == tokens_of(model, ids)
    config = transformers.AutoConfig.from_pretrained(resolve_checkpoint(path).folder)
    assert config.rope_parameters == model.config.rope_parameters


def test_factors_of_no_known_rule_are_refused(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    factors = llama3_factors(1e4, 16)
    factors[3] = 5
    path = write(tmp_path / "model.gguf", family, random_model(family.config), None, rope_freqs__weight=factors)
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3"):
        resolve_checkpoint(path)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].is_mapped])
def test_the_config_is_transformers(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    path = write(tmp_path / "model.gguf", family, random_model(family.config))
    mine = read_config(GgufModel([path]))
    plain = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    own = type(plain)(**{key: value for key, value in mine.items() if key != "model_type"})
    fields = {
        key
        for key in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
            *("vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_parameters", "max_position_embeddings"),
            "layer_types",
        )
        if hasattr(plain, key)
    }
    assert {key: getattr(own, key) for key in fields} == {key: getattr(plain, key) for key in fields}


@pytest.mark.parametrize(
    ("type_of", "dtype"),
    [
        (lambda name, array: Type.F32, torch.float32),
        (lambda name, array: Type.F16 if array.ndim == 2 else Type.F32, torch.float16),
        (lambda name, array: Type.BF16 if array.ndim == 2 else Type.F32, torch.bfloat16),
        (mixed, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_files_own_or_bfloat16_if_it_is_quantized(
    tmp_path: Path, type_of: Any, dtype: torch.dtype
) -> None:
    family = FAMILIES["llama"]
    path = write(tmp_path / "model.gguf", family, random_model(family.config), type_of)
    assert AutoModelForTPU.from_pretrained(path).dtype == dtype


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "rwkv7", {}, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv7'"):
        AutoModelForTPU.from_pretrained(path)


def test_an_unknown_type_is_refused_by_name(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    tensors = tensors_of(tiny_llama(hidden_size=256), family.architecture)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        metadata_of(family) | {".embedding_length": 256},
        tensors,
        raw={"blk.0.attn_q.weight": np.zeros((256, 66), np.uint8)},
        raw_type=Type.TQ2_0,
    )
    with pytest.raises(UnsupportedModelError, match="quantized to TQ2_0"):
        AutoModelForTPU.from_pretrained(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (".block_count", 4_000_000_000),
        (".block_count", 0),
        (".embedding_length", "many"),
        (".attention.head_count", 65),
        (".feed_forward_length", 1 << 31),
        (".attention.layer_norm_rms_epsilon", float("nan")),
        (".context_length", "long"),
        (".rope.dimension_count", 1 << 30),
    ],
)
def test_metadata_that_no_model_has_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    family = FAMILIES["llama"]
    tensors = tensors_of(random_model(family.config), family.architecture)
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata_of(family) | {key: value}, tensors)
    with pytest.raises(CheckpointCorruptError, match="does not describe a model"):
        AutoModelForTPU.from_pretrained(path)


def test_a_split_model_is_read_from_all_of_its_files(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = random_model(family.config)
    tensors = list(tensors_of(model, family.architecture).items())
    for i in range(3):
        split = {"split.no": i, "split.count": 3, "split.tensors.count": len(tensors)}
        path = tmp_path / f"model-0000{i + 1}-of-00003.gguf"
        write_gguf(path, "llama", (metadata_of(family) if i == 0 else {}) | split, dict(tensors[i::3]))
    expected = tokens_of(model)
    for given in (tmp_path, tmp_path / "model-00001-of-00003.gguf", tmp_path / "model-00003-of-00003.gguf"):
        assert tokens_of(AutoModelForTPU.from_pretrained(given)) == expected
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointCorruptError, match="model-00002-of-00003"):
        AutoModelForTPU.from_pretrained(tmp_path)


def test_weights_stay_packed_where_a_kernel_multiplies_with_them(tmp_path: Path) -> None:
    """Scales of powers of two are exact in every dtype that kernels keep them in."""
    family = FAMILIES["llama"]
    tensors = tensors_of(random_model(family.config), family.architecture)
    shape = tensors["blk.0.ffn_down.weight"].shape
    codes = np.random.default_rng(0).integers(-127, 128, (shape[0], shape[1] // 32, 32), dtype=np.int8)
    scale = np.full((*codes.shape[:2], 1), 2.0**-9, np.float16)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], -1).reshape(shape[0], -1)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        metadata_of(family),
        tensors,
        raw={"blk.0.ffn_down.weight": raw},
        raw_type=Type.Q8_0,
    )
    model = AutoModelForTPU.from_pretrained(path, dtype="float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    weight = model.params["model.layers.0.mlp.down_proj.weight"]
    assert type(weight).__name__ == "QuantizedArray"
    np.testing.assert_array_equal(np.asarray(weight.values), codes.reshape(shape))
    assert tokens_of(model) == tokens_of(plain)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_slices_are_those_of_the_whole_tensor(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    model = GgufModel([write(tmp_path / "model.gguf", family, random_model(family.config), mixed)])
    for name in model.names:
        whole, shape = model.read(name), model.shape(name)
        index = tuple(slice(size // 4, size // 2 + 1) for size in shape)
        torch.testing.assert_close(model.read_slice(name, index), whole[index], rtol=0, atol=0)
        if name in model.layouts():
            packed = model.read_packed(name)
            assert packed.layout == model.layouts()[name]
            torch.testing.assert_close(packed.dequantize(), whole, rtol=1e-6, atol=1e-7)
