"""Texts that differ from transformers' for ties alone: torch leaves open which of equal values `torch.topk` takes.

Each configuration and call is of the size of transformers' own tests, where rows of these models differed; with ties broken by
index, as XLA does, every row is transformers'.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from silent_classes import GREEDY

from hfax import AutoModelForTPU
from hfax.matrix.case import draw_weights, with_ties_in_order

_COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "jetmoe": lambda: transformers.JetMoeConfig(
        **_COMMON, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "afmoe": lambda: transformers.AfmoeConfig(
        **_COMMON | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32},
        moe_intermediate_size=32,
        num_dense_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=2,
        global_attn_every_n_layers=2,
        sliding_window=128,
    ),
    "axk2": lambda: transformers.AXK2Config(
        **_COMMON,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=16,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=32,
        index_n_heads=2,
        index_head_dim=64,
        index_topk=8,
        gated_norm_rank=4,
        mlp_layer_types=["dense", "sparse"],
    ),
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **_COMMON | {"hidden_size": 64},
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        head_dim=32,
        partial_rotary_factor=0.25,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        n_shared_experts=1,
        mlp_layer_types=["moe", "moe"],
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        sliding_window=8,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=2,
        num_nextn_predict_layers=0,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("has_unit_gain", [False, True], ids=["as initialised", "unit gain"])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_ties_in_order_every_row_is_that_of_transformers(name: str, has_unit_gain: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    written: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    if has_unit_gain:
        draw_weights(written)
    written.save_pretrained(tmp_path)
    # its grouped products want widths that are multiples of 16 bytes
    plain = type(written).from_pretrained(tmp_path, experts_implementation="eager").eval()
    model = AutoModelForTPU.from_pretrained(tmp_path)
    for seed in range(2):
        ids = torch.from_numpy(np.random.default_rng(seed).integers(3, plain.config.vocab_size, (13, 7)))
        mask = torch.ones_like(ids)
        if seed and name != "deepseek_v4":  # whose compressed keys mix padding into text, in transformers as well
            mask[1::2, :3] = 0
        inputs = {"input_ids": ids * mask, "attention_mask": mask}
        with torch.no_grad():
            expected = with_ties_in_order(lambda inputs=inputs: plain.generate(**inputs, max_new_tokens=20, **GREEDY))
        assert model.generate(**inputs, max_new_tokens=20, **GREEDY).tolist() == expected.tolist()
