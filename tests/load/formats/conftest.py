"""Plain tiny models whose weights the tests of this folder quantize."""

import pytest
import transformers
from packers import plain_tensors
from tiny_models import SIZES, random_model, tiny_llama

_MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def _config(kind):
    if kind == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=32)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**SIZES, head_dim=32, **_MOE)
    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    if kind == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            moe_intermediate_size=64,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
        )
    assert kind == "gpt_oss"
    # as in gpt-oss-20b, rows are no multiple of 128 columns
    sizes = {**SIZES, "hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 2}
    return transformers.GptOssConfig(**sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A function of a kind of model: its tensors and config."""
    made = {}

    def make(kind):
        if kind not in made:
            model = tiny_llama() if kind == "llama" else random_model(_config(kind))
            made[kind] = plain_tensors(tmp_path_factory.mktemp(kind), model)
        return made[kind]

    return make
