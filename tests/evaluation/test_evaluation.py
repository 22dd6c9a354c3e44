"""Log-likelihoods, perplexity, and the model "hfax" of lm-evaluation-harness beside the harness's own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfax
from hfax import AutoModelForTPU, InvalidInputError, UnsupportedOptionError
from hfax.evaluation.perplexity import perplexity
from hfax.evaluation.scoring import score

DEMO = Path(hfax.__file__).parent / "demo"
TEXT = "Return a new list. The name of the file is given. A function returns None if there is no such key. " * 12


@pytest.fixture(scope="module")
def plain():
    """The demo model by plain transformers."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model():
    """The demo model by hfax."""
    return AutoModelForTPU.from_pretrained("demo", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's."""
    return AutoTokenizer.from_pretrained(DEMO)


def log_probs(plain, ids):
    """Of each token from the second on."""
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([ids])).logits[0, :-1]
    found = torch.log_softmax(logits, dim=-1)
    return found[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


def test_scores_are_plain_transformers_whatever_the_lengths_side_by_side(plain, model, tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    pairs = [(ids[:5], ids[5:9]), (ids[:1], ids[1:140]), (ids[3:70], ids[70:71])]
    found = score(model, pairs, batch_size=3, max_length=256)
    for (context, continuation), each in zip(pairs, found, strict=True):
        expected = log_probs(plain, [*context, *continuation])[len(context) - 1 :]
        np.testing.assert_allclose(each.log_probs, expected, atol=1e-4)
    greedy = plain.generate(
        torch.tensor([ids[:8]]), do_sample=False, max_new_tokens=3, suppress_tokens=None, repetition_penalty=1.0
    )[0].tolist()
    assert score(model, [(ids[:8], greedy[8:]), (ids[:8], [5, 6])], max_length=64)[0].is_greedy
    assert not score(model, [(ids[:8], [5, 6])], max_length=64)[0].is_greedy


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(InvalidInputError, match="0 tokens of context"):
        score(model, [([], [1])], max_length=8)
    with pytest.raises(InvalidInputError, match="9 to score"):
        score(model, [([1], list(range(1, 10)))], max_length=8)
    with pytest.raises(InvalidInputError, match="vocabulary"):
        score(model, [([1], [10**6, 1])], max_length=8)
    from transformers import BertConfig

    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.architectures = ["BertForMaskedLM"]
    with pytest.raises(UnsupportedOptionError, match="does not compute log-likelihoods"):
        score(AutoModelForTPU.from_config(config), [([1], [2])], max_length=8)


@pytest.mark.parametrize("stride", [None, 16])
def test_perplexity_is_the_mean_over_windows(stride, plain, model, tokenizer):
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False).input_ids]
    window, step, total = 64, stride or 64, []
    for begin in range(1, len(ids), step):
        scored = ids[begin : begin + step]
        own = ids[max(0, begin + len(scored) - 1 - window) : begin + len(scored)]
        total += log_probs(plain, own)[-len(scored) :].tolist()
    found = perplexity(model, tokenizer, TEXT, max_length=64, stride=stride)
    assert found.tokens == len(total) == len(ids) - 1
    assert found.nats_per_token == pytest.approx(-np.mean(total), abs=1e-4)
    assert found.perplexity == pytest.approx(math.exp(-np.mean(total)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(-sum(total) / math.log(2) / len(TEXT), rel=1e-4)
    with pytest.raises(InvalidInputError, match="stride=65"):
        perplexity(model, tokenizer, TEXT, max_length=64, stride=65)
    with pytest.raises(InvalidInputError, match="nothing to predict"):
        perplexity(model, tokenizer, "")


def test_the_command_prints_it(tmp_path, capsys):
    from hfax.cli.app import run

    (tmp_path / "text.txt").write_text(TEXT)
    assert run(["perplexity", "demo", str(tmp_path / "text.txt"), "--json", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["perplexity"] < 1000
    assert found["tokens"] > 100
    assert run(["perplexity", "demo", str(tmp_path / "none.txt")]) == 1
    assert "could not be read" in capsys.readouterr().err


TASKS = {
    "choices": """
task: hfax_choices
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
task: hfax_rolling
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "until": """
task: hfax_until
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
ROWS = [
    {"text": "Return a new", "choices": [" list", " moon", " of of of"], "long": TEXT},
    {"text": "The name of the", "choices": [" file.", " xylophone", " a"], "long": "A short one."},
    {"text": "If the value is None", "choices": [", it is", " !!", " list list"], "long": TEXT[:300]},
]


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(tmp_path / "rows.jsonl")))
    return tmp_path


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # the harness's and its libraries'
def test_lm_eval_gives_what_its_own_backend_gives(tasks, monkeypatch):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hfax.evaluation.lm_eval_model import HfaxLM

    monkeypatch.setenv("HF_HOME", str(tasks / "home"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = ["hfax_choices", "hfax_rolling", "hfax_until"]
    found = {}
    for name, lm in (
        ("hf", HFLM(pretrained=str(DEMO), dtype="float32", device="cpu", batch_size=2)),
        ("hfax", HfaxLM("demo", dtype="float32", batch_size=2)),
    ):
        found[name] = lm_eval.simple_evaluate(
            lm, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, num_fewshot=0
        )
    for task in names:
        own, other = (found[name]["results"][task] for name in ("hfax", "hf"))
        for metric, value in other.items():
            if isinstance(value, float):
                assert own[metric] == pytest.approx(value, rel=1e-4), (task, metric)
        for one, two in zip(found["hfax"]["samples"][task], found["hf"]["samples"][task], strict=True):
            if task == "hfax_until":
                assert one["filtered_resps"] == two["filtered_resps"]
                assert one["filtered_resps"][0]


@pytest.mark.sweep
def test_the_command_line_knows_the_model(tasks):
    command = [
        sys.executable,
        "-m",
        "hfax",
        "lm-eval",
        "--model",
        "hfax",
        "--model_args",
        "pretrained=demo,dtype=float32",
    ]
    command += ["--tasks", "hfax_choices", "--include_path", str(tasks), "--output_path", str(tasks / "out")]
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[1]), "HF_HOME": str(tasks / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hfax_choices" in done.stdout
    assert "acc_norm" in done.stdout


@pytest.mark.sweep
def test_unknown_model_args_are_refused():
    from hfax.evaluation.lm_eval_model import HfaxLM

    with pytest.raises(InvalidInputError, match="Unknown model_args: pretraind"):
        HfaxLM("demo", pretraind="x")
