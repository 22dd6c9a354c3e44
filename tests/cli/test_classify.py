"""`hfax classify` on small checkpoints; the reference is plain transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_checkpoints import LABELS, make_tokenizer, save_classifier

TEXT = "What a lovely day!"
CANDIDATES = ["POSITIVE", "NEGATIVE", "a quick {text} fox"]


def log_probs_by_transformers(folder, template: str, label: str) -> list[float]:
    """Log-probabilities of the label's tokens, from one unpadded pass."""
    from transformers import LlamaForCausalLM

    tokenizer = make_tokenizer()
    prompt = template.replace("{text}", TEXT).removesuffix("{label}")
    full, start = tokenizer(prompt + label)["input_ids"], len(tokenizer(prompt.rstrip(" "))["input_ids"])
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([full])).logits[0]
    log_probs = logits.log_softmax(-1)
    return [log_probs[i - 1, full[i]].item() for i in range(start, len(full))]


@pytest.mark.parametrize("template", [None, "{text} This is {label}", 'He said: {"x": 1} {text}\n{label}'])
def test_scores_of_labels_under_a_causal_model(hfax_here, checkpoint, template):
    options = [] if template is None else ["--template", template]
    done = hfax_here("classify", checkpoint, TEXT, "--labels", ",".join(CANDIDATES), "--json", *options)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    scores = {s["label"]: s for s in record["scores"]}
    expected = {
        label: log_probs_by_transformers(checkpoint, template or "Text: {text}\nLabel: {label}", label)
        for label in CANDIDATES
    }
    sums = np.array([sum(expected[label]) for label in CANDIDATES])
    np.testing.assert_allclose([scores[c]["log_prob"] for c in CANDIDATES], sums, rtol=1e-4)
    assert [scores[c]["num_tokens"] for c in CANDIDATES] == [len(expected[c]) for c in CANDIDATES]
    shares = np.exp(sums - sums.max()) / np.exp(sums - sums.max()).sum()
    np.testing.assert_allclose([scores[c]["score"] for c in CANDIDATES], shares, rtol=1e-3, atol=1e-6)
    assert record["label"] == CANDIDATES[int(np.argmax(shares))]


def test_per_token_compares_means(hfax_here, checkpoint):
    done = hfax_here("classify", checkpoint, TEXT, "--labels", ",".join(CANDIDATES), "--json", "--per-token")
    scores = json.loads(done.out)["scores"]
    means = np.array([s["log_prob"] / s["num_tokens"] for s in scores])
    np.testing.assert_allclose([s["score"] for s in scores], np.exp(means) / np.exp(means).sum(), rtol=1e-6)


def test_causal_model_needs_labels(hfax_here, checkpoint):
    done = hfax_here("classify", checkpoint, TEXT)
    assert done.code == 2
    assert "--labels" in done.err
    assert "load " not in done.err


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification", "regression"])
def test_classification_head_gives_its_own_labels(hfax_here, tmp_path, problem_type):
    from transformers import DistilBertForSequenceClassification

    folder = save_classifier(tmp_path / "classifier", problem_type)
    done = hfax_here("classify", folder, TEXT, "--json")
    assert done.code == 0, done.err
    with torch.no_grad():
        inputs = make_tokenizer()(TEXT, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        logits = DistilBertForSequenceClassification.from_pretrained(folder)(**inputs).logits[0]
    expected = {None: logits.softmax(-1), "multi_label_classification": logits.sigmoid(), "regression": logits}[
        problem_type
    ]
    scores = {s["label"]: s["score"] for s in json.loads(done.out)["scores"]}
    np.testing.assert_allclose([scores[LABELS[i]] for i in range(3)], expected.numpy(), rtol=1e-4, atol=1e-6)


def test_best_label_comes_first(hfax_here, classifier):
    done = hfax_here("classify", classifier, "-", stdin=TEXT + "\n")
    rows = [line.split() for line in done.out.splitlines()]
    assert {label for label, _ in rows} == set(LABELS.values())
    values = [float(score) for _, score in rows]
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(1, abs=1e-3)


def test_labels_for_a_model_with_its_own_are_wrong_usage(hfax_here, classifier):
    done = hfax_here("classify", classifier, TEXT, "--labels", "A,B")
    assert done.code == 2
    assert "sad" in done.err


def test_text_past_the_context_is_refused(hfax_here, classifier, checkpoint):
    for arguments in ([classifier], [checkpoint, "--labels", "A,B"]):
        done = hfax_here("classify", *arguments, TEXT * 100)
        assert done.code == 1
        assert "context" in done.err


def test_empty_text_is_refused(hfax_here, classifier):
    assert "empty" in hfax_here("classify", classifier, " ").err
