"""Programs made ahead, and what the compiler says of their memory."""

import jax
import pytest
import transformers

import hfax
from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.phases import listen

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def no_programs_of_earlier_runs(monkeypatch):
    """What was compiled is asked here; on disk there may be the programs of the last run of these tests."""
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")


def qwen(**options):
    model = AutoModelForTPU.from_config(transformers.Qwen3Config(**SIZES), **options)
    model.generation_config.eos_token_id = None
    return model


def test_calls_of_the_shapes_made_ahead_compile_nothing():
    model = qwen(dtype="float32")
    done = model.compile((1, 2), (16, 40), max_new_tokens=8, progress=False)
    assert [(d.batch_size, d.prompt_length) for d in done] == [(1, 16), (1, 40), (2, 16), (2, 40)]
    assert set(done[0].compiled) >= {"prefill[1, 16]", "decode[1, 128]"}
    assert "decode[1, 128]" not in done[1].compiled  # the decoding program does not depend on the prompt
    events = []
    with listen(events.append):
        model.generate([[5] * 37], max_new_tokens=8, do_sample=False)
        model.generate([[5] * 9, [7] * 9], max_new_tokens=5, do_sample=False)
        assert model.compile((1,), (16,), max_new_tokens=8, progress=False)[0].compiled == {}
    assert events == []


def test_options_shape_programs():
    model = qwen(dtype="float32")
    model.compile((1,), (16,), max_new_tokens=8, do_sample=True, top_k=5, progress=False)
    events = []
    with listen(events.append):
        model.generate([[5] * 9], max_new_tokens=8, do_sample=True, top_k=7, temperature=0.4, seed=1)
    assert events == []


class Forbid(transformers.LogitsProcessor):
    """Python between the programs of a call: these are run, not only compiled."""

    def __call__(self, input_ids, scores):
        scores[:, 5] = -1e9
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": True},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"guidance_scale": 1.5},
        {"logits_processor": [Forbid()]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_loop_is_compiled_without_being_run(options):
    model = qwen(dtype="float32")
    if "assistant_model" in options:
        options = {"assistant_model": qwen(dtype="float32")}
    options = {"do_sample": False, **options}
    model.compile((1,), (16,), max_new_tokens=8, progress=False, **options)
    events = []
    with listen(events.append):
        model.generate([[5] * 9], max_new_tokens=8, **options)
    assert events == []


def test_bad_sizes_and_models_with_other_inputs_are_refused():
    model = qwen(dtype="float32")
    with pytest.raises(InvalidInputError, match="batch_sizes=\\[0\\]"):
        model.compile((0,))
    whisper = AutoModelForTPU.from_config(
        hfax.shrink_config(transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])),
        dtype="float32",
    )
    with pytest.raises(UnsupportedOptionError, match="does not know the inputs"):
        whisper.compile((1,), (16,))


def test_encoder_decoders_and_padding_that_is_token_0():
    """T5 pads with 0, and a prompt of nothing else would be empty."""
    t5 = AutoModelForTPU.from_config(
        transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            architectures=["T5ForConditionalGeneration"],
        ),
        dtype="float32",
    )
    [made] = t5.compile((2,), (16,))
    assert sorted(made.compiled) == ["decode[2, 128]", "prefill[2, 1]"]
    events = []
    with listen(lambda event: events.append(event.name)):
        t5.generate([[3, 4, 5]] * 2, max_new_tokens=20)
    assert "compile" not in events


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "speculation"])
def test_a_decoding_program_copies_no_cache(dtype, options):
    """Its state is donated whole, and beside it the program needs less memory than one layer's keys."""
    model = qwen(dtype=dtype)
    request = model.read_request([[5] * 100], max_new_tokens=4000, do_sample=False, **options)
    loop, inputs = model.open_loop(request)
    state = loop.start(inputs)
    programs = model._programs
    compiled = []
    original = jax.stages.Lowered.compile

    def keep(self, *args, **kwargs):
        compiled.append(original(self, *args, **kwargs))
        return compiled[-1]

    programs._programs.clear()
    jax.stages.Lowered.compile = keep
    try:
        loop.advance(state, 3)
    finally:
        jax.stages.Lowered.compile = original
    (program,) = compiled or [None]
    if program is None:
        pytest.fail("the program came from somewhere else")
    memory = program.memory_analysis()
    cache = sum(a.nbytes for a in jax.tree.leaves(state["cache"]))
    assert memory.alias_size_in_bytes > cache
    assert memory.temp_size_in_bytes < cache / (2 * SIZES["num_hidden_layers"])
