"""The engine against `generate`: the same tokens for each request, whatever else is in the batch and however it got there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.engine.core import EngineCore, Entry
from hfax.engine.sampling_params import StructuredOutputsParams
from hfax.engine.scheduler import Limits, Scheduler
from hfax.errors import (
    EngineBusyError,
    EngineDeadError,
    InvalidInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)


def _causal_models():
    """The table of small models that the parity tests have."""
    path = Path(__file__).parents[1] / "parity" / "test_checkpoints.py"
    spec = importlib.util.spec_from_file_location("parity_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CAUSAL


CAUSAL = _causal_models()
PAGED = {
    "llama",
    "llama, tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral with a window shorter than the prompt",
} | {
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "mixtral",
    "qwen3_moe",
}
SAMPLE = {
    "llama",
    "gemma3_text",
    "mistral with a window shorter than the prompt",
    "falcon with alibi",
    "mixtral",
}
"""One for each kind of attention, position, layer and cache of pages; the rest is the sweep's."""
SMALL = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, block_size=16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def in_sample(names):
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.sweep) for name in names]


def make_model(name: str, dtype: str = "float32"):
    cls, options = CAUSAL[name]
    return AutoModelForTPU.from_config(getattr(transformers, cls)(**options), dtype=dtype)


def some_prompts(lengths=(5, 40, 17, 60, 33, 1)) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 97, n).tolist() for n in lengths]


def by_generate(model, prompt, **options) -> list[int]:
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    return np.asarray(model.generate(jnp.asarray([prompt]), **options))[0, len(prompt) :].tolist()


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


@pytest.mark.parametrize("name", in_sample(CAUSAL))
def test_each_model_writes_what_generate_writes(name):
    model = make_model(name)
    prompts = some_prompts()
    expected = [by_generate(model, prompt) for prompt in prompts]
    with Engine(model, config=SMALL) as engine:
        assert engine.is_paged == (name in PAGED)
        assert tokens(engine.generate(prompts, GREEDY)) == expected  # more than fit at once, prompts in parts
        assert tokens([engine.generate(prompts[1], GREEDY)[0]]) == [expected[1]]  # alone, its beginning at hand
        if engine.pages is not None:
            assert engine.pages.counts.hits > 0
            assert engine.pages.num_held == 0


@pytest.mark.parametrize("name", in_sample(sorted(PAGED)))
def test_sequences_that_lose_their_pages_write_the_same(name):
    model = make_model(name)
    prompts = some_prompts((30, 40, 35, 50, 20))
    expected = [by_generate(model, prompt, max_new_tokens=40) for prompt in prompts]
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, block_size=16, num_blocks=8)
    with Engine(model, config=config) as engine:
        written = tokens(engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40)))
        assert engine.core.scheduler.num_preemptions > 0
        assert written == expected
        assert engine.pages.num_held == 0


@pytest.mark.usefixtures("cpu_kernels")
def test_bfloat16_logits_are_the_same_bit_for_bit_in_any_batch():
    """By the C++ kernels, which sum the rows of a product in one order however many there are."""
    model = make_model("llama", "bfloat16")
    prompt, *others = some_prompts((40, 7, 60, 21, 33, 50))
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, ignore_eos=True)
    with Engine(model, config=SMALL) as engine:
        alone = engine.generate(prompt, params)[0].outputs[0]
        among = engine.generate([others[0], prompt, *others[1:]], params)[1].outputs[0]
    with Engine(
        model, config=EngineConfig(max_num_batched_tokens=64, max_model_len=128, enable_prefix_caching=False)
    ) as engine:
        whole = engine.generate(prompt, params)[0].outputs[0]
    assert alone.token_ids == among.token_ids == whole.token_ids
    assert alone.logprobs == among.logprobs == whole.logprobs


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
        ({"temperature": 1.3}, {"temperature": 1.3, "top_k": 0}),
        ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8, "top_k": 0}),
        ({"temperature": 1.0, "top_k": 80, "min_p": 0.02}, {"temperature": 1.0, "top_k": 80, "min_p": 0.02}),
        ({"temperature": 1.0, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5, "top_k": 0}),
        (
            {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 0},
        ),
    ],
    ids=["top-k and top-p", "temperature", "top-p", "min-p", "repetition", "presence and frequency"],
)  # fmt: skip
def test_a_seed_draws_what_it_draws_in_generate(llama, options, theirs):
    prompt, *others = some_prompts()
    expected = by_generate(llama, prompt, do_sample=True, seed=7, **theirs)
    params = [SamplingParams(seed=7, max_tokens=16, **options), *[SamplingParams(max_tokens=30) for _ in others]]
    with Engine(llama, config=SMALL) as engine:
        assert engine.generate([prompt, *others], params)[0].outputs[0].token_ids == expected


def test_several_texts_of_a_prompt_are_those_of_generate(llama):
    prompt = some_prompts()[2]
    rows = llama.generate(
        jnp.asarray([prompt]), do_sample=True, top_k=0, seed=3, num_return_sequences=3, max_new_tokens=8
    )
    with Engine(llama, config=SMALL) as engine:
        output = engine.generate(prompt, SamplingParams(n=3, seed=3, max_tokens=8))[0]
    expected = [row[len(prompt) :].tolist() for row in np.asarray(rows)]
    ends = [r[: r.index(2) + 1] if 2 in r else r for r in expected]
    assert [text.token_ids for text in output.outputs] == ends


def test_log_probabilities_of_text_and_prompt(llama):
    prompt = some_prompts()[1]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    with Engine(llama, config=SMALL) as engine:
        output = engine.generate(prompt, params)[0]
    text = output.outputs[0]
    logits = np.asarray(llama(jnp.asarray([[*prompt, *text.token_ids]])).logits[0], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for place, found in enumerate(output.prompt_logprobs):
        assert found.token_id == prompt[place + 1]
        assert found.logprob == pytest.approx(log_probs[place, prompt[place + 1]], abs=1e-4)
        assert [token for token, _ in found.top] == np.argsort(-log_probs[place])[:2].tolist()
        assert found.rank == 1 + (log_probs[place] > log_probs[place, prompt[place + 1]] + 1e-9).sum()
    for place, found in enumerate(text.logprobs, len(prompt) - 1):
        assert found.logprob == pytest.approx(log_probs[place].max(), abs=1e-4)
        assert len(found.top) == 3


def test_scoring_a_prompt_alone_draws_nothing(llama):
    prompt = some_prompts()[3]
    with Engine(llama, config=SMALL) as engine:
        output = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
        assert len(output.prompt_logprobs) == len(prompt) - 1


def test_biases_and_least_lengths(llama):
    prompt = some_prompts()[0]
    first = by_generate(llama, prompt)[0]
    with Engine(llama, config=SMALL) as engine:
        banned = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, logit_bias={first: -100.0}))[0]
        forced = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=3, logit_bias={50: 100.0}))[0]
        ended = engine.generate(
            prompt, SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(50,), logit_bias={50: 100.0})
        )[0]
        held = engine.generate(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, stop_token_ids=(50,), logit_bias={50: 100.0}),
        )[0]
    assert banned.outputs[0].token_ids[0] != first
    assert forced.outputs[0].token_ids == [50] * 3
    assert (ended.outputs[0].token_ids, ended.outputs[0].stop_reason) == ([50], 50)
    assert len(held.outputs[0].token_ids) == 5
    assert 50 not in held.outputs[0].token_ids[:4]


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_an_aborted_request_frees_its_room_and_harms_nobody(name):
    model = make_model(name)
    prompts = some_prompts()
    expected = by_generate(model, prompts[1], max_new_tokens=60)
    with Engine(model, config=SMALL) as engine:
        long = engine.submit(prompts[0], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        deltas = engine.stream(prompts[1], SamplingParams(temperature=0.0, max_tokens=60))
        written = list(next(deltas).token_ids)
        long.abort()
        written += [token for delta in deltas for token in delta.token_ids]
        assert written == expected
        assert long.output.outputs[0].finish_reason == "abort"
        assert not engine.core.scheduler.has_work
        assert engine.core.scheduler.running == []
        assert engine.pages is None or engine.pages.num_held == 0


def test_a_step_that_fails_takes_its_own_requests_alone(llama):
    prompts = some_prompts()
    expected = [by_generate(llama, prompt) for prompt in prompts]
    with Engine(llama, config=SMALL) as engine:
        engine.generate(prompts, GREEDY)
        forward = engine._runner.forward

        def fails_once(parts, newest):
            engine._runner.forward = forward
            raise RuntimeError("injected")

        engine._runner.forward = fails_once
        with pytest.raises(RuntimeError, match="injected"):
            engine.generate(prompts[0], GREEDY)
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        assert engine.pages.num_held == 0


def test_sequences_that_were_not_in_a_failed_step_go_on(llama):
    prompts = some_prompts()
    expected = by_generate(llama, prompts[1], max_new_tokens=30)
    with Engine(llama, config=SMALL) as engine:
        forward, calls = engine._runner.forward, []

        def fails_for_the_first(parts, newest):
            calls.append([part.sequence.request_id for part in parts])
            if len(calls) == 6:
                raise RuntimeError("injected")
            return forward(parts, newest)

        schedule = engine.core.scheduler.schedule

        def without_the_second_once():
            parts = schedule()
            if len(calls) == 5:  # leave "second" out of the step that fails
                for part in [p for p in parts if p.sequence.request_id == "second"]:
                    part.sequence.num_computed -= part.count
                    part.sequence.num_pending -= part.draws
                parts = [p for p in parts if p.sequence.request_id != "second"]
            return parts

        engine._runner.forward = fails_for_the_first
        engine.core.scheduler.schedule = without_the_second_once
        first = engine.submit(
            prompts[0], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True), request_id="first"
        )
        written = []
        for delta in engine.stream(prompts[1], SamplingParams(temperature=0.0, max_tokens=30), request_id="second"):
            written += delta.token_ids
        assert str(first.error) == "injected"
        assert written == expected


def test_streams_of_asyncio(llama):
    prompts = some_prompts()
    expected = [by_generate(llama, prompt) for prompt in prompts]

    async def one(engine, prompt):
        return [token async for delta in engine.astream(prompt, GREEDY) for token in delta.token_ids]

    async def everything(engine):
        return await asyncio.gather(*(one(engine, prompt) for prompt in prompts))

    with Engine(llama, config=SMALL) as engine:
        assert asyncio.run(everything(engine)) == expected


def test_lower_priorities_go_first(llama):
    prompts = some_prompts((20, 20, 20))
    order = []
    with Engine(llama, config=EngineConfig(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=128)) as engine:
        done = threading.Event()
        hold = engine.submit(prompts[0], SamplingParams(max_tokens=40, ignore_eos=True))
        for name, priority in (("late", 5), ("soon", 0)):

            def hear(delta, name=name):
                if delta.finish_reason is not None:
                    order.append(name)
                    if len(order) == 2:
                        done.set()

            engine.submit(prompts[1], SamplingParams(max_tokens=2, ignore_eos=True), hear, priority=priority)
        assert done.wait(60)
        assert order == ["soon", "late"]
        assert hold.output.is_finished


def test_salts_keep_caches_apart(llama):
    prompt = some_prompts((64,))[0]
    with Engine(llama, config=SMALL) as engine:
        cached = []
        for salt in ("a", "b", "a"):
            stream = engine.stream(prompt, GREEDY, cache_salt=salt)
            for _ in stream:
                pass
            cached.append(engine.pages.counts.hits)
        assert cached == [0, 0, 48]


def test_encoder_decoders_get_slots():
    config = transformers.T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = AutoModelForTPU.from_config(config, task="text2text-generation")
    prompts = some_prompts((5, 20, 11))
    expected = [
        np.asarray(model.generate(jnp.asarray([p]), max_new_tokens=12, do_sample=False))[0, 1:].tolist()
        for p in prompts
    ]
    with Engine(model, config=EngineConfig(max_num_seqs=2, max_model_len=32)) as engine:
        assert not engine.is_paged
        written = tokens(engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12)))
    assert written == expected


def test_nothing_is_compiled_after_warming_up(llama):
    from hfax.phases import listen

    heard = []
    with Engine(llama, config=SMALL) as engine:
        engine.warm_up()
        made = set(llama.parts.programs.made)
        with listen(heard.append):
            engine.generate(
                some_prompts(),
                [
                    GREEDY,
                    SamplingParams(max_tokens=5),
                    *[SamplingParams(max_tokens=3, logprobs=2, repetition_penalty=1.2, top_k=70)] * 4,
                ],
            )
        assert set(llama.parts.programs.made) == made
    assert heard == []


def test_the_queue_is_bounded_and_a_closed_engine_says_so(llama):
    engine = Engine(llama, config=EngineConfig(max_num_seqs=1, max_model_len=128, max_waiting=1))
    requests = [engine.submit([5], SamplingParams(max_tokens=100, ignore_eos=True))]
    deadline = time.monotonic() + 60
    while not engine.core.scheduler.running and time.monotonic() < deadline:
        time.sleep(0.01)
    requests.append(engine.submit([5], GREEDY))
    with pytest.raises(EngineBusyError, match="waiting queue is full"):
        engine.submit([5], GREEDY)
    engine.close()
    assert [r.output.outputs[0].finish_reason for r in requests] == ["abort", "abort"]
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit([5], GREEDY)


def test_threads_together_do_not_exceed_the_waiting_queue():
    """The queue's length was compared with its bound under another lock than the one under which the queue grew."""
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, max_waiting=None)
    core = EngineCore(Scheduler(limits, None), runner=None, drawer=None, vocab_size=8)
    accepted = []

    def add_many():
        for index in range(100):
            entry = Entry(sequence=object(), listener=print, detokenizer=None, matcher=None)
            with contextlib.suppress(EngineBusyError):
                core.add([entry] * (1 + index % 2), max_waiting=50)
                accepted.append(1 + index % 2)

    threads = [threading.Thread(target=add_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(accepted) == core.num_waiting == 50


def test_what_comes_after_the_loop_has_ended_is_refused():
    """Between the check that the engine is alive and the queue, the loop could end; the caller then waited for ever."""
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, max_waiting=None)
    core = EngineCore(Scheduler(limits, None), runner=None, drawer=None, vocab_size=8)
    core.start()
    core.close()
    with pytest.raises(EngineDeadError, match="not running"):
        core.add([Entry(sequence=object(), listener=print, detokenizer=None, matcher=None)])


def test_a_loop_that_fails_tells_everyone(llama):
    engine = Engine(llama, config=SMALL)

    def fails():
        raise RuntimeError("scheduler")

    engine.core.scheduler.schedule = fails
    with pytest.raises(RuntimeError, match="scheduler"):
        engine.generate([5, 6], GREEDY)
    engine.core._thread.join(10)
    with pytest.raises(EngineDeadError, match="failed"):
        engine.submit([5], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([5] * 128, {}, "128 tokens"),
        ([5] * 100, {"max_tokens": 50}, "limit is 128"),
        ([97], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ("text", {}, "no tokenizer"),
        ([5], {"logit_bias": {97: 1.0}}, "outside the vocabulary"),
        ([5], {"stop": ("a",)}, "tokenizer"),
        ([5], {"max_tokens": 0}, "generates nothing"),
        ([None], {}, "list of token ids"),
    ],
)
def test_bad_requests(llama, prompt, options, message):
    with Engine(llama, config=SMALL) as engine, pytest.raises(InvalidInputError, match=message):
        engine.submit(prompt, SamplingParams(**options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_p", -0.1), ("top_p", 1.5), ("top_k", -2),
        ("seed", "a"),
        ("logprobs", 21), ("max_tokens", -1), ("max_tokens", True), ("presence_penalty", 3.0), ("logit_bias", {1: 200.0}),
        ("stop", [""]), ("repetition_penalty", 0.0), ("min_tokens", 1.5),
    ],
)  # fmt: skip
def test_bad_sampling_params(name, value):
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**{name: value})


def test_bad_setups(llama):
    with pytest.raises(InvalidInputError, match="context length of 256"):
        Engine(llama, config=EngineConfig(max_model_len=512))
    with pytest.raises(InvalidInputError, match="too few"):
        Engine(llama, config=EngineConfig(max_model_len=128, block_size=16, num_blocks=4))
    with pytest.raises(InvalidInputError, match="max_num_seqs"):
        Engine(llama, config=EngineConfig(max_num_seqs=0))
    bert = AutoModelForTPU.from_config(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
        ),
        task="fill-mask",
    )
    with pytest.raises(UnsupportedModelError, match="does not support autoregressive"):
        Engine(bert)
    with pytest.raises(UnsupportedOptionError, match="requires a tokenizer"), Engine(llama, config=SMALL) as engine:
        engine.generate([5], SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a")))
