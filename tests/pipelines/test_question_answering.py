"""The task that transformers 5 removed: spans against a search through all spans, and against the same pipeline over torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hfax
from hfax.errors import InvalidInputError
from hfax.pipelines.question_answering import QuestionAnsweringPipeline

from .checkpoints import SAVE

QUESTION = "who lives in the house ?"
CONTEXT = (
    "the quick brown fox jumps over the lazy dog . a small red fish lives near the old mill , and eats every day ."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVE["question-answering"](tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def answer(folder: Path) -> Any:
    return hfax.pipeline("question-answering", folder)


@pytest.fixture(scope="module")
def over_torch(folder: Path) -> Any:
    model = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
    return QuestionAnsweringPipeline(
        model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder), device="cpu"
    )


def _best_span(folder: Path, longest: int) -> tuple[float, str]:
    """By trying every span of the context in one window."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
    encoded = tokenizer(QUESTION, CONTEXT, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        out = model(**encoded)
    sequences = encoded.encodings[0].sequence_ids
    allowed = [i for i, s in enumerate(sequences) if s == 1 or i == 0]
    starts, ends = (torch.softmax(x[0, allowed].double(), 0).numpy() for x in (out.start_logits, out.end_logits))
    best = (0.0, "")
    for a in range(1, len(allowed)):
        for b in range(a, min(a + longest, len(allowed))):
            span = CONTEXT[offsets[allowed[a]][0] : offsets[allowed[b]][1]]
            best = max(best, (float(starts[a] * ends[b]), span))
    return best


@pytest.mark.parametrize("longest", [1, 4, 15])
def test_the_best_of_all_spans(answer: Any, folder: Path, longest: int) -> None:
    found = answer(question=QUESTION, context=CONTEXT, max_answer_len=longest)
    score, text = _best_span(folder, longest)
    assert found["answer"] == text == CONTEXT[found["start"] : found["end"]]
    assert found["score"] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"handle_impossible_answer": True, "top_k": 3},
        {"max_seq_len": 16, "doc_stride": 4, "top_k": 4},
        {"align_to_words": False},
        {"batch_size": 2, "max_seq_len": 18, "doc_stride": 3},
    ],
    ids=str,
)
def test_the_same_over_torch(answer: Any, over_torch: Any, options: dict[str, Any]) -> None:
    examples = [{"question": QUESTION, "context": CONTEXT}, {"question": "fish ?", "context": CONTEXT * 3}]
    mine, theirs = answer(examples, **options), over_torch(examples, **options)
    flat = lambda found: [a for f in found for a in (f if isinstance(f, list) else [f])]  # noqa: E731
    assert [a["answer"] for a in flat(mine)] == [a["answer"] for a in flat(theirs)]
    np.testing.assert_allclose([a["score"] for a in flat(mine)], [a["score"] for a in flat(theirs)], rtol=1e-4)


def test_one_context_for_several_questions(answer: Any) -> None:
    found = answer(question=[QUESTION, "what ?"], context=CONTEXT)
    assert [f["answer"] in CONTEXT for f in found] == [True, True]
    assert isinstance(answer({"question": QUESTION, "context": CONTEXT}), dict)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"question": "", "context": CONTEXT}, "no question or no context"),
        ({"question": QUESTION, "context": "  "}, "no question or no context"),
        ({"question": [QUESTION] * 3, "context": [CONTEXT] * 2}, "3 questions and 2 contexts"),
        ({}, "No question"),
        ({"question": QUESTION, "context": CONTEXT, "top_k": 0}, "top_k=0"),
        ({"question": QUESTION, "context": CONTEXT, "max_question_len": 2}, "max_question_len is 2"),
        ({"question": QUESTION, "context": CONTEXT, "max_seq_len": 12, "doc_stride": 11}, "doc_stride=11"),
        ({"question": QUESTION, "context": CONTEXT, "topk": 2}, "topk"),
    ],
)
def test_what_cannot_be_answered(answer: Any, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        answer(**inputs)
