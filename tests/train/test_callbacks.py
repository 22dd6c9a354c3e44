"""Callbacks, trackers and uploads of a run: transformers' events in transformers' order."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

from hfax import BackendNotAvailableError, InvalidInputError, Trainer, TrainingArguments, UnsupportedOptionError

from .small_models import make, rows

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
WITHIN_STEP = ("on_pre_optimizer_step", "on_substep_end", "on_prediction_step")


def recorder(**answers):
    """A callback that lists events with the step, and answers some."""

    def listen(event):
        def call(self, args, state, control, **more):
            if event == "on_log" and "train_runtime" in more["logs"]:
                return  # transformers' summary of the run
            self.events.append((event, state.global_step, round(state.epoch or 0, 3)))
            if event in answers:
                answers[event](control, state, more)

        return call

    methods = {event: listen(event) for event in EVENTS if event not in WITHIN_STEP}
    found = type("Recorder", (TrainerCallback,), methods)()
    found.events = []
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small model of transformers and the same of hfax, shared: what is trained does not matter here."""
    return make("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def train(model, folder, *callbacks, **options):
    """A run of four steps over two epochs."""
    data = rows("llama", 8)
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "logging_steps": 1, **options}
    trainer = Trainer(model, TrainingArguments(folder, **options), data, data[:2], callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
def test_events_come_in_the_order_of_transformers(models, tmp_path):
    plain, model = models
    expected, found = recorder(), recorder()
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    arguments = transformers.TrainingArguments(
        str(tmp_path / "plain"), num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, **strategies,
    )  # fmt: skip
    data = rows("llama", 8)
    transformers.Trainer(plain, arguments, train_dataset=data, eval_dataset=data, callbacks=[expected]).train()
    train(model, tmp_path / "own", found, **strategies)
    assert found.events == expected.events
    assert len(found.events) > 25


def test_callbacks_decide_and_see_the_current_weights(models, tmp_path):
    _, model = models
    losses = []

    def ask(control, state, more):
        control.should_log = control.should_save = control.should_evaluate = state.global_step == 2
        control.should_training_stop = state.global_step == 3

    def look(control, state, more):
        own = Trainer(
            more["model"], TrainingArguments(tmp_path, report_to="none"), None, rows("llama", 8)[:2]
        ).evaluate()
        losses.append((own["eval_loss"], more["metrics"]["eval_loss"]))

    asking = recorder(on_step_end=ask, on_evaluate=look)
    trainer = train(
        model, tmp_path / "run", asking, logging_steps=50, save_strategy="no", learning_rate=1e-2, eval_steps=50
    )
    told = [event[:2] for event in asking.events if event[0] in ("on_log", "on_evaluate", "on_save")]
    evaluated = [("on_log", 2), ("on_log", 2), ("on_evaluate", 2), ("on_save", 2)]
    assert told == [*evaluated, ("on_log", 3), ("on_log", 3), ("on_evaluate", 3)]
    assert trainer.state.step == 3
    assert all(own == pytest.approx(metric, abs=1e-6) for own, metric in losses)
    assert losses[0] != losses[1]


def test_transformers_early_stopping_stops(models, tmp_path):
    _, model = models
    options = {"learning_rate": 0.0, "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    assert train(model, tmp_path / "run", EarlyStoppingCallback(2), **options).state.step == 1  # the best is the first
    assert train(model, tmp_path / "again", EarlyStoppingCallback, eval_steps=1, learning_rate=0.0).state.step == 2


def test_what_cannot_be_called_is_refused(models, tmp_path):
    _, model = models
    within = type("Within", (TrainerCallback,), {"on_substep_end": lambda self, *args, **more: None})
    with pytest.raises(UnsupportedOptionError, match="Within has on_substep_end"):
        train(model, tmp_path / "a", within)
    with pytest.raises(InvalidInputError, match="is not a callback"):
        train(model, tmp_path / "a", print)
    leaving = recorder(on_step_end=lambda control, *_: setattr(control, "should_epoch_stop", True))
    with pytest.raises(UnsupportedOptionError, match="should_epoch_stop"):
        train(model, tmp_path / "a", leaving)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_metrics_go_to_trackers(name, models, tmp_path, monkeypatch):
    calls = []
    package = types.ModuleType(name)
    for function in ("init", "log", "finish"):
        setattr(package, function, lambda *args, function=function, **options: calls.append((function, args, options)))
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    train(
        models[1], tmp_path, report_to=name, project="mine", run_name="first", push_to_hub=False, hub_token="hf_secret"
    )
    (_, _, options), *logged = calls
    assert (options["project"], options["name"], options["config"]["logging_steps"]) == ("mine", "first", 1)
    assert "hf_secret" not in str(calls)
    assert [(c[0], c[2].get("step")) for c in logged] == [("log", n) for n in (1, 2, 2, 3, 4, 4)] + [("finish", None)]
    assert {"train/loss", "train/grad_norm", "train/global_step"} <= set(logged[0][1][0])
    assert {"eval/loss", "eval/perplexity"} <= set(logged[2][1][0])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named(name, models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendNotAvailableError, match=f"pip install {name}"):
        train(models[1], tmp_path, report_to=["jsonl", name])


def test_the_model_is_uploaded_after_training(models, tmp_path, monkeypatch):
    calls = []

    class Api:
        """The Hub's client."""

        def __init__(self, token):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options["private"]))
            return types.SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, *, folder_path, repo_id, commit_message, **_):
            calls.append((repo_id, commit_message, sorted(p.name for p in Path(folder_path).iterdir())))
            return types.SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    trainer = train(models[1], tmp_path / "run", push_to_hub=True, hub_private_repo=True, hub_token="hf_t")
    assert calls[:2] == ["hf_t", ("run", True)]
    assert calls[2][:2] == ("me/run", "End of training")
    assert {"config.json", "model.safetensors"} <= set(calls[2][2])
    assert trainer.push_to_hub("Again") == "https://hub/commit"
    with pytest.raises(InvalidInputError, match="without push_to_hub"):
        TrainingArguments(tmp_path, hub_model_id="me/model")
