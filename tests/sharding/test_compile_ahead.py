"""Programs over a mesh, compiled ahead: how results are sharded is known from the compiler, and calls find the programs."""

from tiny_models import tiny_llama_config

from hfax import AutoModelForTPU
from hfax.phases import listen


def test_calls_of_the_shapes_made_ahead_compile_nothing_on_a_mesh():
    model = AutoModelForTPU.from_config(tiny_llama_config(), dtype="float32", parallelism={"data": 2, "tensor": 4})
    model.compile((2,), (16,), max_new_tokens=8, progress=False)
    events = []
    with listen(events.append):
        alone = model.generate([[5] * 9] * 2, max_new_tokens=8, do_sample=False)
    assert events == []
    assert alone.shape == (2, 17)
