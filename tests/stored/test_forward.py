"""Forward passes of a checkpoint that was run before: without torch and transformers, with the same outputs."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers
from torch_free import WITHOUT_TORCH, run_script

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.tracing.structure import class_of, flatten, unflatten

_ENCODER = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
}
_MODELS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a classifier": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_ENCODER)),
        "text-classification",
        "logits",
    ),
    "an encoder": (
        lambda: transformers.BertModel(transformers.BertConfig(**_ENCODER)),
        "feature-extraction",
        "last_hidden_state",
    ),
    "a language model": (
        lambda: tiny_models.random_model(tiny_models.tiny_llama_config()),
        "text-generation",
        "logits",
    ),
}
"""A class, its task, and an output."""
_IDS = [[5, 9, 17, 33, 60], [7, 8, 9, 10, 11]]
_CALLS: dict[str, dict[str, Any]] = {
    "ids alone": {"input_ids": _IDS},
    "padded": {"input_ids": _IDS, "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]},
    "of another length": {"input_ids": [[*_IDS[0], 3, 4]], "attention_mask": [[1] * 7]},
}
_SCRIPT = (
    WITHOUT_TORCH
    + """
import numpy as np
from hfax import AutoModelForTPU
folder, task, name, calls, static = json.loads(sys.stdin.read())
model = AutoModelForTPU.from_pretrained(folder, task=task)
found = {}
for call, inputs in calls.items():
    found[call] = np.asarray(model.output(name, **{n: np.array(v) for n, v in inputs.items()}, **static)).tolist()
print(json.dumps(found))
"""
)


@pytest.mark.parametrize("name", _MODELS)
def test_outputs_are_those_of_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    make, task, output = _MODELS[name]
    folder = tiny_models.save(tmp_path / "model", make())
    model = AutoModelForTPU.from_pretrained(folder, task=task)
    static = {"use_cache": False} if task == "text-generation" else {}  # a cache's class has torch's objects
    arrays = {call: {n: np.array(v) for n, v in inputs.items()} | static for call, inputs in _CALLS.items()}
    theirs = {call: np.asarray(model(**inputs)[output]) for call, inputs in arrays.items()}
    text = json.dumps([str(folder), task, output, _CALLS, static])
    ours = json.loads(run_script(_SCRIPT, text=text, HFAX_HOME=str(tmp_path / "home")))
    for call, expected in theirs.items():
        np.testing.assert_array_equal(np.array(ours[call], np.float32), expected)
        np.testing.assert_array_equal(model.output(output, **arrays[call]), expected)
    with pytest.raises(InvalidInputError, match="returns no 'nonsense'"):
        model.output("nonsense", **arrays["padded"])


_WATCHED = """
import sys
from hfax.cli.app import main
try:
    main()
finally:
    print("imported:", *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def _classify(home: Path, *arguments: str) -> tuple[Any, str]:
    *answer, imported = run_script(_WATCHED, "classify", *arguments, "--json", HFAX_HOME=str(home)).strip().splitlines()
    found = json.loads(answer[-1])
    del found["seconds"]
    return found, imported


def test_the_second_classify_imports_no_modelling_code(tmp_path: Path) -> None:
    call = ("demo", "What a lovely day", "--labels", "GOOD,BAD")
    first, _ = _classify(tmp_path / "home", *call)
    second, imported = _classify(tmp_path / "home", *call)
    assert imported == "imported:"
    assert second == first


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_the_second_run_of_a_classifier_imports_no_modelling_code(problem: str | None, tmp_path: Path) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = transformers.BertConfig(**_ENCODER, problem_type=problem, id2label=labels)
    model = transformers.BertForSequenceClassification(config)
    folder = tiny_models.save(tmp_path / "model", model, tiny_models.word_tokenizer())
    first, _ = _classify(tmp_path / "home", str(folder), "w5 w9 w17")
    second, imported = _classify(tmp_path / "home", str(folder), "w5 w9 w17")
    assert imported == "imported:"
    assert second == first
    assert {score["label"] for score in first["scores"]} == set(labels.values())


def test_a_pickled_structure_names_its_classes() -> None:
    given = transformers.modeling_outputs.SequenceClassifierOutput(logits=np.ones(3))
    arrays, structure = flatten((given, {"a": 1}))
    data = pickle.dumps(structure)
    assert b"transformers.modeling_outputs:SequenceClassifierOutput" in data
    read = pickle.loads(data)
    assert class_of(read.children[0]) is type(given)
    found, plain = unflatten(read, arrays)
    assert type(found) is type(given)
    assert found.logits is arrays[0]
    assert plain == {"a": 1}
    assert read.children[0].child("logits").index == 0
    with pytest.raises(KeyError):
        read.children[0].child("nonsense")


def test_a_class_without_a_name_is_kept() -> None:
    class Own(dict[str, Any]):
        pass

    arrays, structure = flatten(Own(a=np.ones(2)))
    assert type(unflatten(structure, arrays)) is Own


_UNKNOWN = """
import sys
import numpy as np
from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
model = AutoModelForTPU.from_pretrained(sys.argv[1], task="feature-extraction")
ids = np.array([[5, 9, 17]])
print(model.output("last_hidden_state", input_ids=ids).shape, "torch" in sys.modules)
try:
    model.output("nonsense", input_ids=ids)
except InvalidInputError as error:
    print(error.what)
"""


def test_an_output_that_there_is_not_is_refused_from_stored_programs_too(tmp_path: Path) -> None:
    """It was a KeyError."""
    folder = tiny_models.save(tmp_path / "model", transformers.BertModel(transformers.BertConfig(**_ENCODER)))
    first, second = (run_script(_UNKNOWN, str(folder), HFAX_HOME=str(tmp_path / "home")) for _ in range(2))
    assert first == second.replace("False", "True") == "(1, 3, 64) True\nBertModel returns no 'nonsense'.\n"
    assert "False" in second
