"""Metrics of the user's own in evaluation, and noise on embeddings, as in transformers' Trainer."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
import torch
import transformers

from hfax import InvalidInputError, Trainer, TrainingArguments, UnsupportedOptionError, make_train_step
from hfax.train.data import PaddingCollator

from .small_models import batch, make, rows


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small model of transformers, and the same of hfax."""
    return make("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def accuracy(predicted):
    """Share of labels that are predicted, and the shapes that were given."""
    logits, labels = predicted
    best = logits.argmax(-1) if logits.ndim == 3 else logits
    counts = labels[:, 1:] != -100
    hits = (best[:, :-1] == labels[:, 1:])[counts].mean()
    return {"accuracy": hits, "eval_tokens": counts.sum(), "length": best.shape[1], "padded": (best == -100).sum()}


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
def test_metrics_are_those_of_transformers(models, tmp_path):
    """Batches of 3, 3 and 1 rows with different lengths."""
    plain, model = models
    data = [row for length in (9, 16, 12) for row in rows("llama", 3, length=length)][:7]
    collate = PaddingCollator(pad_to_multiple_of=1)
    plain_arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=3, use_cpu=True, report_to="none", disable_tqdm=True
    )
    expected = transformers.Trainer(
        plain,
        plain_arguments,
        eval_dataset=data,
        compute_metrics=accuracy,
        data_collator=lambda some: {name: torch.tensor(array).long() for name, array in collate(some).items()},
    ).evaluate()
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=3)
    for preprocess in (None, lambda logits, labels: logits.argmax(-1)):
        trainer = Trainer(
            model, arguments, None, data, data_collator=collate, compute_metrics=accuracy,
            preprocess_logits_for_metrics=preprocess,
        )  # fmt: skip
        found = trainer.evaluate()
        for name in ("eval_accuracy", "eval_tokens", "eval_length"):
            assert found[name] == pytest.approx(expected[name]), name
    assert found["eval_padded"] > 0


def test_the_best_model_may_be_chosen_by_a_metric_of_ones_own(models, tmp_path):
    values = iter([0.1, 0.9, 0.5])
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=3, per_device_train_batch_size=4, eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="score",
    )  # fmt: skip
    data = rows("llama", 12)
    trainer = Trainer(models[1], arguments, data, data[:2], compute_metrics=lambda _: {"score": next(values)})
    assert trainer.train()["eval_score"] == 0.5
    assert trainer.state.step == 2


def test_metrics_without_logits_are_refused(models, tmp_path, monkeypatch):
    arguments = TrainingArguments(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(UnsupportedOptionError, match="a run of 2 processes"):
            Trainer(models[1], arguments, compute_metrics=accuracy)
    with pytest.raises(InvalidInputError, match="does not go with a loss of your own"):
        Trainer(models[1], arguments, loss=lambda apply, batch: 0.0, compute_metrics=accuracy)
    with pytest.raises(InvalidInputError, match="without compute_metrics"):
        Trainer(models[1], arguments, preprocess_logits_for_metrics=lambda *_: 0)


def test_embeddings_are_noisy_in_training_alone(models):
    """Uniform noise of at most alpha / sqrt(length · width), anew at each step."""
    _, model = models
    inputs = batch("llama", 4)
    alpha = 5.0
    table = np.asarray(model.params["model.embed_tokens.weight"])

    def loss(apply, given):
        output = apply(**given, output_hidden_states=True, use_cache=False)
        noise = output.hidden_states[0] - table[inputs["input_ids"]]
        return output.loss, {"largest": abs(noise).max(), "deviation": noise.std(), "sum": noise.sum()}

    step = make_train_step(model, optax.sgd(0.0), loss, neftune_noise_alpha=alpha)
    state, first = step(step.init(), inputs)
    _, second = step(state, inputs)
    bound = alpha / np.sqrt(inputs["input_ids"].shape[1] * table.shape[1])
    assert 0.98 * bound < float(first["largest"]) <= bound * 1.0001
    assert float(first["deviation"]) == pytest.approx(bound / np.sqrt(3), rel=0.05)
    assert float(first["sum"]) != float(second["sum"])
    assert float(step.evaluate(model.params, inputs)["largest"]) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, step(step.init(), inputs)[1], first))  # the seed decides
    with pytest.raises(InvalidInputError, match="does not go with dropout=False"):
        make_train_step(model, optax.sgd(0.0), neftune_noise_alpha=alpha, dropout=False)
