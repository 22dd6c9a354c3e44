"""Whole runs of training, beside transformers' own Trainer, and what may go wrong in them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
import torch
from transformers import Trainer as PlainTrainer
from transformers import TrainingArguments as PlainArguments
from transformers.trainer_pt_utils import LabelSmoother, get_length_grouped_indices

from hfax import HfaxError, InvalidInputError, Trainer, TrainingArguments, UnsupportedOptionError
from hfax.train.data import BatchOrder, PaddingCollator, grouped_by_length, pack

from .small_models import make, rows

STEPS, BATCH = 50, 4
OPTIONS = {
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
}


def losses_of(folder) -> list[float]:
    """Of each step, from the run's file."""
    lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def plain_losses(plain, data, folder, **options) -> list[float]:
    """Of transformers' Trainer on torch, which reads the rows in their order."""
    arguments = PlainArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **{**OPTIONS, **options},
    )
    trainer = PlainTrainer(plain, arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def own_losses(model, data, folder, **options) -> list[float]:
    """Of hfax."""
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, shuffle=False, **{**OPTIONS, **options}
    )
    Trainer(model, arguments, data, data_collator=PaddingCollator(pad_to_multiple_of=1)).train()
    return losses_of(folder)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.sweep) for k in ("t5", "mixtral"))])
@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
def test_losses_are_those_of_transformers_trainer(kind, tmp_path):
    plain, model = make(kind, tmp_path / "model")
    data = rows(kind, BATCH * 20)  # more than two epochs
    expected = plain_losses(plain, data, tmp_path / "plain")
    found = own_losses(model, data, tmp_path / "own")
    assert len(found) == len(expected) == STEPS
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found[-1] < found[0]


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
def test_smoothed_losses_are_those_of_transformers_trainer(tmp_path):
    """In training with parts of uneven numbers of labels, and in evaluation."""
    plain, model = make("llama", tmp_path / "model")
    data = rows("llama", BATCH * 8)
    for number, row in enumerate(data):
        row["labels"] = [-100] * (number % 9) + row["labels"][number % 9 :]
    options = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2, "max_steps": 6}
    expected = plain_losses(plain, data, tmp_path / "plain", **options)
    found = own_losses(model, data, tmp_path / "own", **options)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    smoother = LabelSmoother(epsilon=0.2)
    with torch.no_grad():
        logits = plain.eval()(input_ids=torch.tensor([row["input_ids"] for row in data])).logits
        loss = smoother({"logits": logits}, torch.tensor([row["labels"] for row in data]), shift_labels=True)
    arguments = TrainingArguments(tmp_path / "again", per_device_eval_batch_size=3, label_smoothing_factor=0.2)
    assert Trainer(model, arguments, data, data).evaluate()["eval_loss"] == pytest.approx(loss.item(), abs=1e-4)
    with pytest.raises(InvalidInputError, match="does not go with a loss of your own"):
        Trainer(model, arguments, data, loss=lambda apply, batch: apply(**batch).loss)
    no_labels = PaddingCollator(columns=("input_ids",), is_causal=False)
    with pytest.raises(InvalidInputError, match="needs labels that are classes"):
        Trainer(model, arguments, data, data_collator=no_labels).train()


@pytest.mark.sweep
def test_rematerialised_layers_give_the_same_losses(tmp_path):
    losses = []
    for remat in (False, True):
        _, model = make("llama", tmp_path / "model")
        losses.append(
            own_losses(model, rows("llama", 40), tmp_path / f"{remat}", gradient_checkpointing=remat, max_steps=10)
        )
    np.testing.assert_allclose(*losses, atol=1e-5)


def test_a_loss_that_is_no_number_stops_the_run_with_the_last_good_state(tmp_path):
    _, model = make("llama", tmp_path / "model")
    data = rows("llama", 40)
    import jax.numpy as jnp

    data[22]["labels"] = [7, *data[22]["labels"][1:]]  # in the sixth step

    def loss(apply, batch):
        found = apply(**batch, use_cache=False).loss
        is_bad = (batch["labels"][:, 0] == 7) & (batch["input_ids"][:, 0] != 7)
        return jnp.where(is_bad.any(), jnp.nan, found)

    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        per_device_train_batch_size=4,
        shuffle=False,
        save_steps=2,
        logging_steps=1,
        max_steps=10,
    )
    trainer = Trainer(model, arguments, data, loss=loss)
    with pytest.raises(HfaxError, match=r"(?s)loss of step 6 is nan.*resume from the last checkpoint"):
        trainer.train()
    assert all(np.isfinite(np.asarray(a)).all() for a in model.params.values())
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
    assert len(losses_of(tmp_path / "run")) == 5
    assert model.generate([[1, 2, 3]], max_new_tokens=2).shape == (1, 5)


FULL_DISK = """
import resource, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/support"]
from hfax import AutoModelForTPU, HfaxError, Trainer, TrainingArguments
from train.small_models import rows
model = AutoModelForTPU.from_pretrained(sys.argv[2])
def run(steps):
    arguments = TrainingArguments(
        output_dir=sys.argv[3], max_steps=steps, per_device_train_batch_size=4, save_steps=2, lr_scheduler_type="constant"
    )
    return Trainer(model, arguments, rows("llama", 40)).train(resume_from_checkpoint=True)
run(4)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    run(6)
except HfaxError as error:
    print(error)
"""


@pytest.mark.sweep
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    make("llama", tmp_path / "model")
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", FULL_DISK, tests, str(tmp_path / "model"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "could not be written" in done.stdout, done.stdout + done.stderr
    assert "step 4 is still there" in done.stdout
    assert len(done.stderr.splitlines()) < 30, done.stderr  # orbax's stack traces were hundreds of lines
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]
    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        max_steps=6,
        per_device_train_batch_size=4,
        save_steps=2,
        lr_scheduler_type="constant",
    )
    assert Trainer(model, arguments, rows("llama", 40)).resume()["steps"] == 6


def test_a_new_run_does_not_mix_with_an_earlier_one_and_resume_checks_the_model(tmp_path):
    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(output_dir=tmp_path / "run", max_steps=2, per_device_train_batch_size=4)
    Trainer(model, arguments, rows("llama", 8)).train()
    with pytest.raises(InvalidInputError, match="has a checkpoint of step 2"):
        Trainer(model, arguments, rows("llama", 8)).train()
    _, other = make("llama", tmp_path / "other", hidden_size=32)
    longer = TrainingArguments(output_dir=tmp_path / "run", max_steps=4, per_device_train_batch_size=4)
    with pytest.raises(HfaxError, match="could not be restored"):
        Trainer(other, longer, rows("llama", 8)).resume()


def test_rows_without_the_columns_are_named(tmp_path):
    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(output_dir=tmp_path / "run", max_steps=2, per_device_train_batch_size=2)
    with pytest.raises(InvalidInputError, match=r"(?s)no model input columns.*its columns are txt|Its columns are txt"):
        Trainer(model, arguments, [{"txt": "a"}, {"txt": "b"}]).train()
    data = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2]}]
    with pytest.raises(InvalidInputError, match="no 'labels'"):
        Trainer(
            model, TrainingArguments(output_dir=tmp_path / "b", per_device_train_batch_size=2, shuffle=False), data
        ).train()
    with pytest.raises(InvalidInputError, match="has 2 rows, but a step needs 8"):
        Trainer(model, TrainingArguments(output_dir=tmp_path / "c"), rows("llama", 2))
    with pytest.raises(InvalidInputError, match="generator yields its rows only once"):
        Trainer(model, arguments, iter(rows("llama", 3))).train()


def test_training_stops_early_and_evaluation_is_over_all_labels(tmp_path):
    plain, model = make("llama", tmp_path / "model")
    held = rows("llama", 5, seed=3)
    held[0]["labels"] = [-100] * 10 + held[0]["labels"][10:]
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([r["input_ids"] for r in held])).logits[:, :-1]
    labels = torch.tensor([r["labels"] for r in held])[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 128), labels.reshape(-1)).item()
    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        max_steps=40,
        per_device_train_batch_size=2,
        eval_steps=2,
        early_stopping_patience=2,
        learning_rate=0.0,
    )
    trainer = Trainer(model, arguments, rows("llama", 8), held)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert trainer.train()["steps"] == 6  # the first evaluation is the best one, and two more are not better


def test_packed_rows_have_the_losses_of_single_ones(tmp_path):
    _, model = make("llama", tmp_path / "model")
    rng = np.random.default_rng(0)
    texts = [{"input_ids": rng.integers(1, 128, n).tolist()} for n in (5, 9, 30, 14, 3, 22)]
    packed = pack(texts, 32)
    assert len(packed) == 3
    assert sum(label != -100 for row in packed for label in row["labels"]) == sum(
        len(t["input_ids"]) - 1 for t in texts
    )
    losses = []
    for name, data, size in (("packed", packed, 3), ("single", texts, 6)):
        arguments = TrainingArguments(output_dir=tmp_path / name, per_device_train_batch_size=size)
        losses.append(Trainer(model, arguments, data, data).evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_packing_is_refused_where_texts_would_mix(tmp_path):
    from transformers import MambaConfig

    from hfax import AutoModelForTPU

    config = MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    model = AutoModelForTPU.from_config(config)
    with pytest.raises(UnsupportedOptionError, match="does not isolate packed sequences"):
        Trainer(
            model, TrainingArguments(output_dir=tmp_path, per_device_train_batch_size=1), pack(rows("llama", 4), 32)
        )


def test_the_order_of_rows_depends_on_the_seed_and_step_alone():
    data = list(range(10))
    order = lambda seed: BatchOrder(data, 3, seed, True)  # noqa: E731
    from itertools import islice

    all_steps = [rows for _, rows in islice(order(1).after(0), 9)]
    assert [rows for _, rows in islice(order(1).after(4), 5)] == all_steps[4:]
    assert all_steps != [rows for _, rows in islice(order(2).after(0), 9)]
    for epoch in range(3):
        assert len({row for rows in all_steps[3 * epoch : 3 * epoch + 3] for row in rows}) == 9


@pytest.mark.parametrize("count", [3, 50, 1000])
def test_rows_are_grouped_by_length_as_in_transformers(count):
    lengths = np.random.default_rng(0).integers(1, 60, count)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(3)).numpy()
    expected = get_length_grouped_indices(lengths.tolist(), 4, generator=torch.Generator().manual_seed(3))
    assert grouped_by_length(shuffled, lengths, 4).tolist() == expected


def test_steps_of_grouped_rows_have_similar_lengths_and_resume(tmp_path):
    data = [{"input_ids": [1] * n} for n in np.random.default_rng(0).integers(1, 60, 80)]
    order = BatchOrder(data, 4, 1, True, group_by_length=True)
    steps = [[len(row["input_ids"]) for row in found] for _, found in itertools.islice(order.after(0), 40)]
    assert [[len(row["input_ids"]) for row in found] for _, found in itertools.islice(order.after(13), 27)] == steps[
        13:
    ]
    alone = BatchOrder(data, 4, 1, True)
    spread = lambda found: np.mean([max(step) - min(step) for step in found])  # noqa: E731
    mixed = [[len(row["input_ids"]) for row in found] for _, found in itertools.islice(alone.after(0), 40)]
    assert spread(steps) < spread(mixed) / 2
    for epoch in (steps[:20], steps[20:]):
        assert sorted(n for step in epoch for n in step) == sorted(len(row["input_ids"]) for row in data)
    with pytest.raises(InvalidInputError, match="needs the lengths of all rows"):
        BatchOrder(iter(data), 4, 1, True, group_by_length=True)
    with pytest.raises(InvalidInputError, match="does not go with shuffle=False"):
        TrainingArguments(tmp_path, group_by_length=True, shuffle=False)
    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(tmp_path / "run", group_by_length=True, max_steps=1, per_device_train_batch_size=4)
    lengths = []
    collate = lambda found: lengths.append([len(row["input_ids"]) for row in found]) or PaddingCollator()(found)  # noqa: E731
    Trainer(model, arguments, data, data_collator=collate).train()
    [(_, first)] = itertools.islice(BatchOrder(data, 4, 42, True, group_by_length=True).after(0), 1)
    assert lengths == [[len(row["input_ids"]) for row in first]]


def test_metrics_go_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=("jsonl", "tensorboard"),
    )
    Trainer(model, arguments, rows("llama", 8), optimizer=optax.sgd(0.1)).train()
    events = EventAccumulator(str(tmp_path / "run" / "runs"))
    events.Reload()
    np.testing.assert_allclose([e.value for e in events.Scalars("loss")], losses_of(tmp_path / "run"), rtol=1e-6)
