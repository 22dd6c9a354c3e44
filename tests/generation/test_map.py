"""`model.map`: a data set through the model, in order, resumable."""

import json

import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.load.source import resolve_checkpoint

TEXTS = ["Return a new", "The first", "A list of", "It is", "def add(a, b):"]


@pytest.fixture(scope="module")
def demo():
    return AutoModelForTPU.from_pretrained("demo")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(resolve_checkpoint("demo").folder)


def test_texts_in_order_as_generate_writes_them(demo, tokenizer):
    found = demo.map(TEXTS, batch_size=2, tokenizer=tokenizer, max_new_tokens=6, do_sample=False)
    for text, result in zip(TEXTS, found, strict=True):
        inputs = tokenizer(text, return_tensors="np")
        ids = np.asarray(demo.generate(**inputs, max_new_tokens=6, do_sample=False))[0, inputs["input_ids"].shape[1] :]
        assert result == {"text": tokenizer.decode(ids, skip_special_tokens=True)}


def test_rows_of_ids_and_mappings(demo, tokenizer):
    ids = [tokenizer(text).input_ids for text in TEXTS]
    options = {"batch_size": 3, "max_new_tokens": 4, "do_sample": False}
    plain = demo.map(ids, **options)
    assert plain == demo.map([{"input_ids": row} for row in ids], **options)
    texts = demo.map([{"prompt": text} for text in TEXTS], column="prompt", tokenizer=tokenizer, **options)
    assert [tokenizer.decode(row["tokens"], skip_special_tokens=True) for row in plain] == [t["text"] for t in texts]


def test_an_interrupted_run_goes_on_where_it_stopped(demo, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    options = {"batch_size": 2, "tokenizer": tokenizer, "output": out, "max_new_tokens": 4, "do_sample": False}
    own, calls = type(demo).generate, []

    def generate(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(demo), "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        demo.map(TEXTS, **options)
    assert len(out.read_text().splitlines()) == 2
    with out.open("a") as file:
        file.write('{"text": "half a li')
    found = demo.map(TEXTS, **options)
    assert len(calls) == 4  # two batches more
    assert [json.loads(line) for line in out.read_text().splitlines()] == found
    assert demo.map(TEXTS, **options) == found
    assert len(calls) == 4


def test_forward_passes_give_what_is_selected(demo, tokenizer):
    found = demo.map(
        TEXTS[:2], batch_size=2, tokenizer=tokenizer, select=lambda out: {"best": out.logits[:, -1].argmax(-1)}
    )
    assert set(found[0]) == {"best"}
    assert isinstance(found[0]["best"], int)


def test_a_classifier_gives_its_outputs():
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3
    )
    model = AutoModelForTPU.from_config(config, task="text-classification")
    found = model.map([[3, 4, 5], [6, 7]], batch_size=2)
    assert np.shape(found[0]["logits"]) == (3,)
    expected = np.asarray(model(input_ids=[[6, 7]]).logits)[0]
    np.testing.assert_allclose(found[1]["logits"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "words"), [(["text"], "no tokenizer"), ([3.5], "rows of float"), ([{"label": 1}], "rows of NoneType")]
)
def test_rows_that_are_none(demo, rows, words):
    with pytest.raises(InvalidInputError, match=words):
        demo.map(rows, batch_size=1)


def test_an_output_of_something_else(demo, tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("no json\n")
    with pytest.raises(InvalidInputError, match="does not hold JSON lines"):
        demo.map(TEXTS, batch_size=2, tokenizer=tokenizer, output=out)
    out.write_text('{"text": ""}\n' * 9)
    with pytest.raises(InvalidInputError, match="holds 9 results"):
        demo.map(TEXTS, batch_size=2, tokenizer=tokenizer, output=out)
    with pytest.raises(InvalidInputError, match="batch_size=0"):
        demo.map(TEXTS, batch_size=0, tokenizer=tokenizer)


def test_rows_of_any_length_compile_one_program_for_each_size_class(tmp_path):
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = AutoModelForTPU.from_config(config, task="feature-extraction")
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 60, n).tolist() for n in rng.integers(4, 257, 1000)]
    options = {"batch_size": 32, "select": lambda out: {"pooled": out.pooler_output}, "output": tmp_path / "out.jsonl"}
    found = model.map(rows, **options)
    assert len(model.parts.programs.made) <= 7  # 16, 32, 64, 96, 128, 192, 256
    for place in (0, 511, 512, 999):  # in two windows, and at their ends
        alone = model(input_ids=[rows[place]]).pooler_output[0]
        np.testing.assert_allclose(found[place]["pooled"], alone, atol=1e-5)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == found


def test_an_interrupted_run_over_sorted_rows_goes_on_after_its_last_window(tmp_path):
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = AutoModelForTPU.from_config(config, task="feature-extraction")
    rows, seen = [[3 + i % 50] * (1 + i % 7) for i in range(40)], []

    def select(out):
        seen.append(1)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return {"pooled": out.pooler_output}

    options = {"batch_size": 2, "select": select, "output": tmp_path / "out.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        model.map(rows, **options)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 32
    found = model.map(rows, **options)
    assert len(seen) == 24
    for place in (0, 31, 32, 39):
        np.testing.assert_allclose(found[place]["pooled"], model(input_ids=[rows[place]]).pooler_output[0], atol=1e-5)
