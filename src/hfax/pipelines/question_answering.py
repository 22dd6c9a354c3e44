"""Extractive question answering: finds the context span that answers a question, with transformers 4's options.

Splits a question and a context into overlapping windows, runs each, and takes the spans with the most likely start and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from hfax.errors import InvalidInputError

Example = dict[str, str]
_CALL_OPTIONS = ("doc_stride", "max_seq_len", "max_question_len")
_ANSWER_OPTIONS = ("top_k", "max_answer_len", "handle_impossible_answer", "align_to_words")


class QuestionAnsweringPipeline(ChunkPipeline):
    """Finds answers. Call it with `question=` and `context=` (strings or lists of strings), a dict of both, or a list of dicts.

    Pipeline or call options: `top_k` (1), `doc_stride` (128, overlap of windows in tokens), `max_seq_len` (384, window length in
    tokens including the question), `max_question_len` (64 tokens; a longer question is an error), `max_answer_len` (15 tokens),
    `handle_impossible_answer` (False: always answer), `align_to_words` (True: answers start and end at word boundaries).

    Returns `{"score", "start", "end", "answer"}`: the probability, and the character offsets in the context; with `top_k` above 1
    a list of them, best first; for several questions a list of results.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args: Any, task: str = "question-answering", **kwargs: Any) -> None:
        super().__init__(*args, task=task, **kwargs)
        if not getattr(self.tokenizer, "is_fast", False):
            raise InvalidInputError(
                f"question-answering needs a fast tokenizer, not {type(self.tokenizer).__name__}.",
                "Only fast tokenizers provide token offsets.",
                "Convert it to a fast tokenizer (tokenizer.json), or pass another tokenizer=.",
            )

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if wrong := sorted(set(options) - {*_CALL_OPTIONS, *_ANSWER_OPTIONS}):
            raise InvalidInputError(
                f"question-answering does not take {', '.join(wrong)}.",
                "This pipeline has no such option.",
                f"Use only: {', '.join((*_CALL_OPTIONS, *_ANSWER_OPTIONS))}.",
            )
        for name in ("top_k", "max_answer_len", "max_seq_len"):
            if name in options and (not isinstance(options[name], int) or options[name] < 1):
                raise InvalidInputError(
                    f"{name}={options[name]!r} is not a positive integer.",
                    "It is a count.",
                    f"Pass {name}=1 or more.",
                )
        return (
            {n: v for n, v in options.items() if n in _CALL_OPTIONS},
            {},
            {n: v for n, v in options.items() if n in _ANSWER_OPTIONS},
        )

    def __call__(self, inputs: Any = None, *, question: Any = None, context: Any = None, **options: Any) -> Any:
        """Answer one or more questions.

        Args:
            inputs: a dict with "question" and "context", or a list of such dicts.
            question: one question, or a list.
            context: one context for all questions, or a list with one per question.
            **options: see `QuestionAnsweringPipeline`.

        Returns:
            See `QuestionAnsweringPipeline`.

        Raises:
            InvalidInputError: empty or malformed questions or contexts.
        """
        examples = _examples(inputs, question, context)
        answers: Any = super().__call__(examples, **options)
        is_one = isinstance(inputs, Mapping) or (inputs is None and isinstance(question, str))
        return answers[0] if is_one else answers

    def preprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        example: Example,
        *,
        doc_stride: int | None = None,
        max_seq_len: int | None = None,
        max_question_len: int = 64,
    ) -> Iterator[dict[str, Any]]:
        """Windows of one example, each with the question and part of the context."""
        tokenizer: Any = self.tokenizer
        length = min(max_seq_len or 384, tokenizer.model_max_length or 384)
        question = tokenizer(example["question"], add_special_tokens=False)["input_ids"]
        if len(question) > max_question_len:
            raise InvalidInputError(
                f"The question has {len(question)} tokens; max_question_len is {max_question_len}.",
                "A long question leaves little room for the context in each window.",
                "Shorten it, or pass a larger max_question_len.",
            )
        stride = min(length // 2, 128) if doc_stride is None else doc_stride
        room = length - len(question) - tokenizer.num_special_tokens_to_add(pair=True)
        if not 0 <= stride < room:
            raise InvalidInputError(
                f"doc_stride={stride} does not fit: a window of max_seq_len={length} has {room} context tokens.",
                "Windows must advance, so their overlap must be shorter than their context.",
                "Pass a smaller doc_stride or a larger max_seq_len.",
            )
        is_right = tokenizer.padding_side == "right"
        pair = (example["question"], example["context"]) if is_right else (example["context"], example["question"])
        encoded = tokenizer(
            *pair,
            padding="longest",
            truncation="only_second" if is_right else "only_first",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        names = [n for n in tokenizer.model_input_names if n in encoded]
        windows = len(encoded["input_ids"])
        for index in range(windows):
            sequences = encoded.encodings[index].sequence_ids
            yield {
                "is_last": index == windows - 1,
                "example": example,
                "encoding": encoded.encodings[index],
                "is_context": [s == (1 if is_right else 0) for s in sequences],
                "no_answer": _place(encoded["input_ids"][index], tokenizer.cls_token_id),
                **{n: torch.tensor([encoded[n][index]]) for n in names},
            }

    def _forward(self, input_tensors: dict[str, Any], **_: Any) -> Any:
        kept = {n: input_tensors.pop(n) for n in ("is_last", "example", "encoding", "is_context", "no_answer")}
        output = self.model(**input_tensors)
        return {"start": output["start_logits"], "end": output["end_logits"], **kept}

    def postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        windows: Sequence[Mapping[str, Any]],
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> Any:
        """The best spans of all windows of one example."""
        context, impossible = windows[0]["example"]["context"], 1.0
        found: list[dict[str, Any]] = []
        for window in windows:
            start, end, no_answer = _probabilities(window, is_right=self.tokenizer.padding_side == "right")  # type: ignore[union-attr]
            impossible = min(impossible, no_answer)
            scores = np.triu(np.outer(start, end))
            scores -= np.triu(scores, max_answer_len)
            best = np.argsort(-scores, axis=None, kind="stable")[:top_k]
            for first, last in zip(*np.unravel_index(best, scores.shape), strict=True):
                if scores[first, last] > 0:
                    place = _characters(window["encoding"], int(first), int(last), align_to_words)
                    found.append({"score": float(scores[first, last]), "start": place[0], "end": place[1]})
        answers = [{**f, "answer": context[f["start"] : f["end"]]} for f in _merged(found)]
        if handle_impossible_answer:
            answers.append({"score": float(impossible), "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda a: -a["score"])[:top_k]
        return answers if top_k > 1 else answers[0]


def _examples(inputs: Any, question: Any, context: Any) -> list[Example]:
    if inputs is None:
        questions = [question] if isinstance(question, str) else list(question or [])
        contexts = [context] * len(questions) if isinstance(context, str) else list(context or [])
        if len(contexts) != len(questions):
            raise InvalidInputError(
                f"{len(questions)} questions and {len(contexts)} contexts were given.",
                "Each question needs one context.",
                "Pass one context for all questions, or one per question.",
            )
        given: list[Any] = [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]
    else:
        given = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for index, example in enumerate(given):
        texts = [example.get(n) if isinstance(example, Mapping) else None for n in ("question", "context")]
        if not all(isinstance(t, str) and t.strip() for t in texts):
            raise InvalidInputError(
                f"Example {index} has no question or no context.",
                "Both must be non-blank strings.",
                'Pass question="…" and context="…", or dicts with both.',
            )
    if not given:
        raise InvalidInputError(
            "No question was given.", "The pipeline needs at least one question.", 'Pass question="…" and context="…".'
        )
    return [{"question": e["question"], "context": e["context"]} for e in given]


def _place(ids: list[int], token: int | None) -> str:
    """A token's index, as a string so that batching ignores it; "" if absent."""
    return str(ids.index(token)) if token in ids else ""


def _probabilities(window: Mapping[str, Any], *, is_right: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Start and end probabilities of each token, [tokens], 0 outside the context; and the no-answer probability.

    Args:
        window: an output of `_forward`; in a batch its logits include padding.
        is_right: whether padding is on the right.
    """
    is_allowed = np.array(window["is_context"])
    cut = slice(None, len(is_allowed)) if is_right else slice(-len(is_allowed), None)
    is_allowed[no_answer := [int(window["no_answer"])] if window["no_answer"] else []] = True  # included in the softmax
    found = []
    for name in ("start", "end"):
        values = np.asarray(window[name][0].float(), np.float64)[cut]
        weights = np.where(is_allowed, np.exp(values - values[is_allowed].max()), 0.0)
        found.append(weights / weights.sum())
    start, end = found
    impossible = float((start * end)[no_answer].sum())
    start[no_answer] = end[no_answer] = 0.0
    return start, end, impossible


def _characters(encoding: Any, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Character offsets of tokens `first` to `last` in the context."""
    if align_to_words:
        words = encoding.word_ids
        sequence = encoding.sequence_ids[first]
        if words[first] is not None and words[last] is not None:
            start = encoding.word_to_chars(words[first], sequence)
            end = encoding.word_to_chars(words[last], sequence)
            return start[0], end[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def _merged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deduplicate spans from overlapping windows, keeping the best score."""
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for span in found:
        place = (span["start"], span["end"])
        if place not in best or span["score"] > best[place]["score"]:
            best[place] = span
    return list(best.values())
