"""When a run is evaluated and saved, and which model it ends with, beside transformers' Trainer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import Trainer as PlainTrainer
from transformers import TrainingArguments as PlainArguments

from hfax import AutoModelForTPU, CheckpointCorruptError, InvalidInputError, Trainer, TrainingArguments
from hfax.train.data import PaddingCollator
from hfax.train.occasions import BestEvaluation

from .small_models import make, rows

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
DATA, HELD = rows("llama", 12), rows("llama", 6, seed=1)
OPTIONS = {"max_steps": 7, "per_device_train_batch_size": 4, "learning_rate": 2e-2, "logging_steps": 2}


@pytest.fixture
def pair(tmp_path):
    """Plain transformers' model, and hfax's."""
    return make("llama", tmp_path / "model")


def run_plain(plain, where, **options):
    """transformers' Trainer after a run, which reads the rows in their order."""
    arguments = PlainArguments(
        output_dir=str(where),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **{**OPTIONS, **options},
    )
    trainer = PlainTrainer(plain, arguments, train_dataset=DATA, eval_dataset=HELD)
    trainer.train()
    return trainer


def run_own(model, where, **options):
    """hfax's."""
    trainer = Trainer(
        model,
        TrainingArguments(where, shuffle=False, **{**OPTIONS, **options}),
        DATA,
        HELD,
        data_collator=PaddingCollator(pad_to_multiple_of=1),
    )
    trainer.train()
    return trainer


def evaluated(where):
    """Steps of evaluations."""
    lines = (json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "eval_loss" in line]


def saved(where):
    """Steps of checkpoints."""
    return sorted(int(path.name) for path in (where / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "no", "save_strategy": "no"},
        {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2},
        {"eval_strategy": "steps", "save_strategy": "steps"},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
        {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    ],
)
def test_strategies_are_those_of_transformers(options, pair, tmp_path):
    plain, model = pair
    expected = run_plain(plain, tmp_path / "plain", **{"save_total_limit": None, **options})
    run_own(model, tmp_path / "own", **{"save_total_limit": None, **options})
    history = expected.state.log_history
    assert evaluated(tmp_path / "own") == [entry["step"] for entry in history if "eval_loss" in entry]
    folders = (tmp_path / "plain").glob("checkpoint-*")
    assert saved(tmp_path / "own") == sorted(int(path.name.split("-")[1]) for path in folders)


def test_without_strategies_a_run_is_evaluated_each_epoch_and_saved_at_its_end(pair, tmp_path):
    run_own(pair[1], tmp_path / "own")
    assert evaluated(tmp_path / "own") == [3, 6, 7]
    assert saved(tmp_path / "own") == [7]


def test_the_best_model_is_loaded_at_the_end_and_its_checkpoint_kept(pair, tmp_path):
    plain, model = pair
    options = {
        **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
        **{"load_best_model_at_end": True, "save_total_limit": 1},
    }
    expected = run_plain(plain, tmp_path / "plain", **options)
    best = expected.state.best_global_step
    assert best not in (None, 7)
    trainer = run_own(model, tmp_path / "own", **options)
    assert saved(tmp_path / "own") == [best, 7]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.state.best_metric, abs=1e-4)
    for name, tensor in plain.state_dict().items():
        np.testing.assert_allclose(np.asarray(model.params[name]), tensor.numpy(), atol=2e-4, err_msg=name)
    # a resumed run knows it, and says so if it is damaged
    again = AutoModelForTPU.from_pretrained(tmp_path / "model")
    run_resumed = lambda m: Trainer(  # noqa: E731
        m,
        TrainingArguments(tmp_path / "own", shuffle=False, **{**OPTIONS, **options}),
        DATA,
        HELD,
        data_collator=PaddingCollator(pad_to_multiple_of=1),
    ).resume()
    run_resumed(again)
    for name, array in model.params.items():
        np.testing.assert_array_equal(np.asarray(again.params[name]), np.asarray(array))
    next((tmp_path / "own" / "checkpoints" / str(best) / "state" / "d").iterdir()).unlink()
    with pytest.raises(CheckpointCorruptError, match=rf"(?s)step {best}, which has the best model.*is missing"):
        run_resumed(again)


def test_the_best_evaluation_of_a_run_without_its_own_checkpoints_is_kept(pair, tmp_path):
    trainer = run_own(pair[1], tmp_path / "own", eval_steps=1, load_best_model_at_end=True, save_total_limit=1)
    assert trainer.state is not None
    assert saved(tmp_path / "own") == [int(trainer.state.step), 7]


@pytest.mark.parametrize(
    ("metric", "greater", "values", "best"),
    [
        ("loss", None, [3.0, 2.0, 2.5], 2),
        ("eval_perplexity", None, [3.0, 2.0, 2.5], 2),
        ("accuracy", None, [0.1, 0.3, 0.2], 2),
        ("accuracy", False, [0.1, 0.3, 0.2], 1),
        ("loss", True, [3.0, 2.0, 2.5], 1),
        ("loss", None, [float("nan"), 2.0, float("nan")], 2),
    ],
)
def test_the_best_evaluation_is_the_one_that_the_metric_says(metric, greater, values, best):
    found = BestEvaluation(metric, greater)
    for step, value in enumerate(values, start=1):
        found.note(step, {found.metric: value})
    assert found.step == best
    assert found.worse == 3 - best
    again = BestEvaluation(metric, greater)
    again.restore(json.loads(json.dumps(found.state())))
    assert again.state() == found.state()


def test_what_cannot_be_evaluated_is_said(pair, tmp_path):
    arguments = TrainingArguments(tmp_path / "a", load_best_model_at_end=True, **OPTIONS)
    with pytest.raises(InvalidInputError, match="no evaluation data"):
        Trainer(pair[1], arguments, DATA).train()
    with pytest.raises(InvalidInputError, match=r"(?s)no metric 'eval_accuracy'.*eval_loss, eval_perplexity"):
        run_own(pair[1], tmp_path / "b", metric_for_best_model="accuracy")
