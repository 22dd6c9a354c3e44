"""Speculative decoding: the text is that of decoding without drafts, whoever drafts."""

import gc

import pytest
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.phases import listen

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
PROMPT = torch.tensor([[1, 5, 9, 7, 5, 9, 7, 5, 9, 7, 5]])
KINDS = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 10, "seed": 3},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "eos_token_id": [23, 57]},
]


def qwen(layers: int, seed: int, **changes):
    config = transformers.Qwen3Config(num_hidden_layers=layers, **(SIZES | changes))
    model = AutoModelForTPU.from_config(config, dtype="float32", seed=seed)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def model():
    return qwen(3, 0)


@pytest.fixture(scope="module")
def plain(model):
    return [model.generate(PROMPT, max_new_tokens=50, **kind) for kind in KINDS]


@pytest.mark.parametrize("index", range(len(KINDS)))
@pytest.mark.parametrize("drafts", [1, 4])
def test_prompt_lookup_changes_no_token(model, plain, index, drafts):
    got = model.generate(PROMPT, max_new_tokens=50, prompt_lookup_num_tokens=drafts, **KINDS[index])
    assert torch.equal(got, plain[index])


@pytest.mark.parametrize("index", range(len(KINDS)))
@pytest.mark.parametrize("who", ["another model", "itself"])
def test_an_assistant_changes_no_token(model, plain, index, who):
    assistant = model if who == "itself" else qwen(1, 1)
    got = model.generate(PROMPT, max_new_tokens=50, assistant_model=assistant, num_assistant_tokens=3, **KINDS[index])
    assert torch.equal(got, plain[index])


def rounds(model, assistant):
    loop, inputs = model.open_loop(
        model.read_request(
            PROMPT, assistant_model=assistant, max_new_tokens=41, do_sample=False, num_assistant_tokens=3
        )
    )
    return int(loop.advance(loop.start(inputs), 41)["rounds"])


@pytest.mark.parametrize("ties", [False, True])
def test_a_torch_model_drafts(tmp_path, ties):
    """A copy of the same model, whose drafts are then always right, and another one."""
    config = transformers.Qwen3Config(num_hidden_layers=2, tie_word_embeddings=ties, **SIZES)
    torch.manual_seed(0)
    torch_model, other = transformers.Qwen3ForCausalLM(config).eval(), transformers.Qwen3ForCausalLM(config).eval()
    torch_model.save_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    expected = model.generate(PROMPT, max_new_tokens=41, do_sample=False)
    for assistant in (torch_model, other):
        found = model.generate(PROMPT, max_new_tokens=41, do_sample=False, assistant_model=assistant)
        assert torch.equal(found, expected)
    assert rounds(model, torch_model) == 10
    assert rounds(model, other) > 20
    del torch_model, other, assistant
    gc.collect()
    assert not model._drafts._copies


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_model_that_drafts_for_itself_is_always_right(model, kind):
    """So a round gives all its drafts and one token more."""
    options = {**kind, "max_new_tokens": 41}
    seed = options.pop("seed", 0)
    given = {**options, "num_assistant_tokens": 3}
    loop, inputs = model.open_loop(model.read_request(PROMPT, seed=seed, assistant_model=model, **given))
    state = loop.advance(loop.start(inputs), 41)
    assert int(state["step"]) == 41
    assert int(state["rounds"]) == 10


def test_windows_keep_what_may_be_taken_back():
    config = transformers.Gemma3TextConfig(
        sliding_window=8, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, **SIZES
    )
    model = AutoModelForTPU.from_config(config, dtype="float32")
    model.generation_config.eos_token_id = None
    expected = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=3), expected)


def test_records_and_streams(model, plain):
    out = model.generate(
        PROMPT,
        max_new_tokens=50,
        prompt_lookup_num_tokens=3,
        output_logits=True,
        return_dict_in_generate=True,
        **KINDS[0],
    )
    assert torch.equal(out.sequences, plain[0])
    assert len(out.logits) == 50

    ids = []

    class Streamer:
        def put(self, value):
            ids.extend(value.reshape(-1).tolist())

        def end(self):
            ids.append(-1)

    model.generate(PROMPT, max_new_tokens=50, prompt_lookup_num_tokens=3, streamer=Streamer(), **KINDS[0])
    assert ids == [*plain[0][0].tolist(), -1]


def test_another_text_compiles_nothing(model):
    model.generate(PROMPT, max_new_tokens=20, prompt_lookup_num_tokens=4, do_sample=False)
    events = []
    with listen(events.append):
        model.generate(PROMPT[:, 2:], max_new_tokens=18, prompt_lookup_num_tokens=4, do_sample=False)
    assert events == []


def test_what_speculation_does_not_support_is_refused(model):
    mamba = AutoModelForTPU.from_config(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4), dtype="float32"
    )
    cases = [
        (model, PROMPT.repeat(2, 1), {"prompt_lookup_num_tokens": 3}, "one sequence"),
        (model, PROMPT, {"prompt_lookup_num_tokens": 3, "assistant_model": model}, "not both"),
        (model, PROMPT, {"assistant_model": qwen(1, 0, vocab_size=65)}, "vocabularies"),
        (model, PROMPT, {"assistant_model": torch.nn.Linear(1, 1)}, "Linear, which is neither an hfax model"),
        (mamba, PROMPT, {"prompt_lookup_num_tokens": 3}, "Recurrent layers"),
    ]
    for subject, prompt, options, reason in cases:
        with pytest.raises(UnsupportedOptionError, match=reason):
            subject.generate(prompt, max_new_tokens=4, **options)
    with pytest.raises(InvalidInputError, match="prompt_lookup_num_tokens"):
        model.generate(PROMPT, max_new_tokens=4, prompt_lookup_num_tokens=0)
