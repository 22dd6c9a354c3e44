"""Which attention function a model's parts get: hfax's, wherever modelling code asks transformers' interface for it."""

import pytest
import transformers
from tiny_models import tiny_llama_config

from hfax.matrix.architectures import architectures, small_config
from hfax.patches.masks import ATTENTION_NAME
from hfax.tracing.abstract import open_skeleton

SIZES = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
CONFIGS = {
    "says so": tiny_llama_config(),
    "does not say so": transformers.BartConfig(architectures=["BartForConditionalGeneration"], **SIZES),
    "says that it does not": small_config(
        next(a for a in architectures("causal-lm") if a.model_type == "inkling2_text")
    ),
    "has functions of its own": transformers.FalconConfig(
        architectures=["FalconForCausalLM"], vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_function_of_each_part(name):
    skeleton = open_skeleton(CONFIGS[name])
    parts = [part for part in skeleton.module.modules() if isinstance(part, transformers.PreTrainedModel)]
    found = {str(part.config._attn_implementation) for part in parts}
    others = {"has functions of its own": "sdpa", "says that it does not": "eager"}
    assert found == {others.get(name, str(ATTENTION_NAME))}
