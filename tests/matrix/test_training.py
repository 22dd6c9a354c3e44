"""Training steps of small models of every kind beside torch's, as `hfax matrix --train` compares them."""

import copy
import dataclasses

import pytest
import torch

from hfax.matrix.architectures import Architecture, architectures
from hfax.matrix.case import TOLERANCE, CaseResult, run_case
from hfax.matrix.report import render
from hfax.matrix.runner import run_cases
from hfax.matrix.training import gradient_error, torch_gradients
from hfax.synthetic.inputs import CaseInputs

SAMPLE = {
    "causal-lm": ["mamba", "mixtral", "gemma3_text"],
    "seq2seq-lm": ["t5"],
    "masked-lm": ["bert"],
    "image-classification": ["convnext"],
}
LLAMA = Architecture(mapping="causal-lm", model_type="llama", class_name="LlamaForCausalLM")


@pytest.mark.sweep
def test_a_sample_trains_as_in_torch():
    chosen = [a for mapping, types in SAMPLE.items() for a in architectures(mapping) if a.model_type in types]
    results = run_cases(chosen, trains=True)
    assert [(r.model_type, r.reason) for r in results if r.outcome != "works"] == []
    assert all(r.gradient_error is not None and r.gradient_error < TOLERANCE for r in results)
    assert len(results) == 6


def test_a_wrong_gradient_is_found_and_named(hfax_llama, plain_llama):
    """The same inputs with other weights in one of the two."""
    plain = copy.deepcopy(plain_llama)  # its gradients and a weight are written to
    ids = torch.tensor([[3, 5, 7, 11, 2]])
    inputs = CaseInputs(forward={"input_ids": ids}, generate={}, mask=None)
    error, _ = gradient_error(hfax_llama, torch_gradients(plain, inputs), inputs)
    assert error < TOLERANCE
    with torch.no_grad():
        plain.lm_head.weight[4] += 0.1
    error, worst = gradient_error(hfax_llama, torch_gradients(plain, inputs), inputs)
    assert error > 100 * TOLERANCE
    assert worst in dict(plain.named_parameters())


def test_what_torch_has_no_gradient_for_is_not_compared(monkeypatch):
    def fail(*args):
        raise RuntimeError("modified by an inplace operation")

    monkeypatch.setattr("hfax.matrix.training.torch_gradients", fail)
    result = run_case(LLAMA, trains=True)
    assert (result.outcome, result.gradient_error) == ("works", None)
    assert "inplace operation" in result.torch_cannot_train
    assert "torch has no gradients to compare with: llama." in render([result])


def test_training_has_an_outcome_and_a_column(monkeypatch):
    def fail(*args):
        raise NotImplementedError("no gradient")

    monkeypatch.setattr("hfax.matrix.training.gradient_error", fail)
    result = run_case(LLAMA, trains=True)
    assert (result.outcome, result.gradient_error) == ("train fails", None)
    assert "no gradient" in result.reason
    fields = dataclasses.asdict(LLAMA)
    good = CaseResult(**{**fields, "model_type": "olmo"}, generates=True, gradient_error=1e-6)
    result.generates = True
    page = render([result, good])
    assert "| causal-lm | 2 | 0 | 0 | 2 of 2 | 2 of 2 | 1 of 2 | 1 of 2, 50.0% |" in page
    assert "trains the same" not in render([CaseResult(**fields)])
