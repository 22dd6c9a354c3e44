"""Programs over a mesh, compiled ahead: how results are sharded is known from the compiler, and calls find the programs."""

import transformers

from hfax import AutoModelForTPU
from hfax.phases import listen


def test_calls_of_the_shapes_made_ahead_compile_nothing_on_a_mesh():
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForTPU.from_config(config, dtype="float32", parallelism={"data": 2, "tensor": 4})
    model.generation_config.eos_token_id = None
    model.compile((2,), (16,), max_new_tokens=8, progress=False)
    events = []
    with listen(events.append):
        alone = model.generate([[5] * 9] * 2, max_new_tokens=8, do_sample=False)
    assert events == []
    assert alone.shape == (2, 17)
