"""The tasks that transformers 5 removed: texts of encoder-decoders, beside plain `generate` on the same token ids."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import random_model, save, word_tokenizer

import hfax
from hfax.errors import InvalidInputError

TEXTS = ["w5 w17 w40 w8", "w61 w33 w9 w9 w12 w70", "w20 w21"]
_BART: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "init_std": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "initializer_factor": 4.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "task_specific_params": {
        "summarization": {"prefix": "w30 w31 ", "num_beams": 3, "max_length": 9, "length_penalty": 2.0},
        "translation_en_to_de": {"prefix": "w32 w33 w34 ", "num_beams": 2, "max_length": 7},
    },
}


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(transformers.BartConfig(**_BART))
    model.generation_config.update(num_beams=4, max_length=12)
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"
    return save(tmp_path_factory.mktemp("bart"), model, tokenizer)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"
    return save(tmp_path_factory.mktemp("t5"), random_model(transformers.T5Config(**_T5)), tokenizer)


def _expected(folder: Path, texts: list[str], prefix: str = "", **options: Any) -> list[str]:
    """What plain transformers writes for each text alone."""
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = []
    for text in texts:
        ids = torch.tensor([tokenizer(prefix + text)["input_ids"]])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        written += tokenizer.batch_decode(out, skip_special_tokens=True)
    return written


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
        ("text2text-generation", "generated_text"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_writes_what_generate_writes(bart: Path, task: str, name: str, batch_size: int) -> None:
    write = hfax.pipeline(task, bart, batch_size=batch_size)
    expected = _expected(bart, TEXTS)
    assert len(set(expected)) > 1
    assert write(TEXTS) == [{name: text} for text in expected]
    assert write(TEXTS[0]) == [{name: expected[0]}]


def test_several_texts_of_each(bart: Path) -> None:
    write = hfax.pipeline("summarization", bart)
    options: dict[str, Any] = {"num_return_sequences": 2, "num_beams": 3, "max_length": 8}
    expected = [{"summary_text": text} for text in _expected(bart, TEXTS[:2], **options)]
    assert write(TEXTS[:2], **options) == [expected[:2], expected[2:]]


@pytest.mark.parametrize("option", [{"return_tensors": True}, {"return_text": False}])
def test_token_ids_instead_of_text(bart: Path, option: dict[str, Any]) -> None:
    [found] = hfax.pipeline("text2text-generation", bart)(TEXTS[0], **option)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    text = tokenizer.decode(found["generated_token_ids"], skip_special_tokens=True)
    assert [text] == _expected(bart, TEXTS[:1])


def test_truncation_cuts_long_texts(bart: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart, model_max_length=6)
    write = hfax.pipeline("summarization", bart, tokenizer=tokenizer)
    long = " ".join(f"w{i}" for i in range(5, 60))
    cut = " ".join(f"w{i}" for i in range(5, 11))
    assert [one["summary_text"] for one in write(long, truncation=True)] == _expected(bart, [cut])
    assert [one["summary_text"] for one in write(long)] == _expected(bart, [long]) != _expected(bart, [cut])


@pytest.mark.parametrize("task", ["summarization", "translation_en_to_de"])
def test_the_config_of_a_task_gives_prefix_and_options(t5: Path, task: str) -> None:
    of_task = dict(_T5["task_specific_params"][task])
    prefix = of_task.pop("prefix")
    write = hfax.pipeline(task, t5)
    [name] = {"summarization": ["summary_text"]}.get(task, ["translation_text"])
    assert [one[name] for one in write(TEXTS)] == _expected(t5, TEXTS, prefix, **of_task)
    own: dict[str, Any] = {"max_length": 6, "num_beams": 1}
    assert [one[name] for one in write(TEXTS, **own)] == _expected(t5, TEXTS, prefix, **{**of_task, **own})


def test_languages_mark_the_text_and_begin_the_translation(tmp_path: Path) -> None:
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4, **{f"▁{c}": 5 + i for i, c in enumerate("abcdefgh")}}
    words |= {c: 20 + i for i, c in enumerate("abcdefgh")}
    tokenizer = transformers.NllbTokenizer(vocab=words, merges=[("▁", c) for c in "abcdefgh"])
    ids: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "vocab_size": len(tokenizer) + 30}
    config = transformers.M2M100Config(**_BART | ids)
    save(tmp_path, random_model(config), tokenizer)
    options: dict[str, Any] = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn", "max_new_tokens": 8}
    translate = hfax.pipeline("translation", tmp_path)
    tokenizer.src_lang = "eng_Latn"
    encoded = tokenizer(["a b c d"], return_tensors="pt")
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    french = tokenizer.convert_tokens_to_ids("fra_Latn")
    out = plain.generate(**encoded, num_beams=4, max_new_tokens=8, forced_bos_token_id=french)
    assert translate("a b c d", **options, return_tensors=True)[0]["translation_token_ids"].tolist() == out[0].tolist()
    several = translate(["a b c d", "e f", "a b c d"], **options, batch_size=3, return_tensors=True)
    assert several[0]["translation_token_ids"].tolist() == several[2]["translation_token_ids"].tolist()
    assert int(several[1]["translation_token_ids"][1]) == french
    for wrong in ({"tgt_lang": "klingon"}, {"src_lang": "klingon"}, {"tgt_lang": None, "src_lang": None}):
        with pytest.raises(InvalidInputError, match="two languages of NllbTokenizer"):
            translate("a b", **options | wrong)


def test_what_is_no_text_is_refused(bart: Path) -> None:
    with pytest.raises(InvalidInputError, match="summarization got int"):
        hfax.pipeline("summarization", bart)([3])
