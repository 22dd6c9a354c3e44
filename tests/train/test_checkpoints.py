"""Damaged checkpoints are found and passed over, and a run is resumed only as it was."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys

import numpy as np
import optax
import pytest

from hfax import AutoModelForTPU, CheckpointCorruptError, InvalidInputError, LoraConfig, Trainer, TrainingArguments
from hfax.train.checkpoints import Checkpoints
from hfax.train.data import PaddingCollator
from hfax.train.dpo import DPOLoss
from hfax.train.manifest import MANIFEST_NAME
from hfax.train.resumption import described, fingerprint

from .small_models import make, rows

OPTIONS = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "save_steps": 2,
    "save_total_limit": None,
    "logging_steps": 1,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model."""
    where = tmp_path_factory.mktemp("model")
    make("llama", where)
    return where


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6."""
    where = tmp_path_factory.mktemp("whole")
    trainer(folder, where).train()
    return where


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def model(folder):
    """Loaded once, for runs that do not begin."""
    return AutoModelForTPU.from_pretrained(folder)


def trainer(folder, where, data=None, *, lora=None, model=None, **options):
    """Of a run with `OPTIONS`, apart from those given."""
    model = model or AutoModelForTPU.from_pretrained(folder)
    if lora is not None:
        model.add_adapter(lora)
    parts = {name: options.pop(name) for name in ("optimizer", "loss", "data_collator") if name in options}
    return Trainer(model, TrainingArguments(where, **{**OPTIONS, **options}), data or rows("llama", 40), **parts)


def losses(where):
    lines = (json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def arrays_of(checkpoint):
    """The largest file, which holds weights."""
    return max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def zero(checkpoint):
    file = arrays_of(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    file.write_bytes(content)


def truncate(checkpoint):
    file = arrays_of(checkpoint)
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "the contents of .* have changed": zero,
    r"has \d+ bytes instead of \d+": truncate,
    r"state/.* is missing": lambda checkpoint: arrays_of(checkpoint).unlink(),
    f"{MANIFEST_NAME} is missing": lambda checkpoint: (checkpoint / MANIFEST_NAME).unlink(),
    f"{MANIFEST_NAME} cannot be read": lambda checkpoint: (checkpoint / MANIFEST_NAME).write_bytes(bytes(64)),
    r"run/.* is missing": lambda checkpoint: shutil.rmtree(checkpoint / "run"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_checkpoint_is_found_and_passed_over(words, run, caplog):
    DAMAGES[words](run / "checkpoints" / "6")
    checkpoints = Checkpoints(run, None)
    with caplog.at_level(logging.WARNING, "hfax.train.checkpoints"):
        assert checkpoints.latest_whole() == 4
    checkpoints.close()
    assert re.search(f"step 6 is damaged .*{words}.*; resuming from that of step 4", caplog.text)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(folder, whole, run):
    """One with 64 zeroed bytes was restored in silence, and the loss of step 22 was NaN."""
    zero(run / "checkpoints" / "6")
    assert trainer(folder, run).resume()["steps"] == 6
    np.testing.assert_array_equal(losses(run), losses(whole))
    assert [p.name for p in (run / "damaged_checkpoints").iterdir()] == ["6-0"]
    checkpoints = Checkpoints(run, None)
    assert checkpoints.latest_whole() == 6  # the one that was written in its place
    checkpoints.close()


def test_what_orbax_writes_after_the_manifest_does_not_matter(folder, whole, run):
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (run / "checkpoints" / "6" / name).unlink()
    zero(run / "checkpoints" / "4")
    assert trainer(folder, run).resume()["steps"] == 6
    assert not (run / "damaged_checkpoints").exists()


def test_without_a_whole_checkpoint_nothing_is_resumed_or_moved(folder, run):
    for checkpoint in (run / "checkpoints").iterdir():
        zero(checkpoint)
    with pytest.raises(CheckpointCorruptError, match=r"(?s)No checkpoint in .* is whole.*step 6: .*step 4: .*step 2: "):
        trainer(folder, run).resume()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert not (run / "damaged_checkpoints").exists()


TWO_PROCESSES = """
import json, sys
import jax
from hfax import AutoModelForTPU, Trainer, TrainingArguments

folder, out, data = sys.argv[1:]
model = AutoModelForTPU.from_pretrained(folder, parallelism={"fsdp": 2})
arguments = TrainingArguments(
    f"{out}/run", max_steps=6, per_device_train_batch_size=1, save_steps=2, save_total_limit=None, report_to="none", logging_steps=1
)
trainer = Trainer(model, arguments, json.load(open(data)))
metrics = trainer.train(resume_from_checkpoint=True)
json.dump(metrics["loss"], open(f"{out}/loss.{jax.process_index()}", "w"))
"""


@pytest.mark.multiprocess
def test_two_processes_write_one_manifest_and_pass_over_a_damaged_checkpoint_together(folder, tmp_path):
    script, data = tmp_path / "script.py", tmp_path / "data.json"
    script.write_text(TWO_PROCESSES)
    data.write_text(json.dumps(rows("llama", 40)))

    def run():
        arguments = ["launch", "--local", "2", "--cpu-devices", "1", script, folder, tmp_path, data]
        command = [sys.executable, "-c", "from hfax.cli.app import main; main()", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr, [json.loads((tmp_path / f"loss.{i}").read_text()) for i in range(2)]

    _, first = run()
    checkpoint = tmp_path / "run" / "checkpoints" / "6"
    manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())["files"]
    assert {"state/ocdbt.process_0/manifest.ocdbt", "state/ocdbt.process_1/manifest.ocdbt"} <= set(manifest)
    zero(checkpoint)
    errors, again = run()
    assert "step 6 is damaged" in errors
    assert again == first
    assert first[0] == first[1]


ONE_MORE = [*rows("llama", 40), *rows("llama", 1, seed=9)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"per_device_train_batch_size": 2}, r"rows_per_step \(.*\) was 4 and is now 2"),
        ({"gradient_accumulation_steps": 2}, r"rows_per_step \(.*\) was 4 and is now 8"),
        ({"learning_rate": 1e-3}, r"learning_rate was 0\.01 and is now 0\.001"),
        ({"seed": 1}, "seed was 42 and is now 1"),
        ({"shuffle": False}, "shuffle was true and is now false"),
        ({"group_by_length": True}, "group_by_length was false and is now true"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor was 0\.0 and is now 0\.1"),
        ({"dropout": False}, "dropout was true and is now false"),
        ({"adam_beta1": 0.8}, r"adam_beta1 was 0\.9 and is now 0\.8"),
        ({"adam_beta2": 0.8}, r"adam_beta2 was 0\.999 and is now 0\.8"),
        ({"adam_epsilon": 1e-6}, "adam_epsilon was"),
        ({"weight_decay": 0.1}, "weight_decay was"),
        ({"max_grad_norm": None}, r"max_grad_norm was 1\.0 and is now null"),
        ({"lr_scheduler_type": "cosine"}, 'lr_scheduler_type was "linear" and is now "cosine"'),
        ({"warmup_steps": 2}, "warmup_steps was 0 and is now 2"),
        ({"max_steps": 8}, r"max_steps \(.*\) was 6 and is now 8"),
        ({"data": rows("llama", 40, seed=5)}, "train_dataset was"),
        ({"data": ONE_MORE}, 'train_dataset was {"rows": 40'),
        ({"loss": lambda apply, batch: apply(**batch).loss}, "loss was null and is now"),
        ({"data_collator": PaddingCollator(max_length=8)}, "data_collator was"),
    ],
)
def test_what_changes_the_losses_is_refused_by_name(changes, words, folder, model, whole):
    with pytest.raises(InvalidInputError, match=f"(?s){words}.*accept_changes=") as caught:
        trainer(folder, whole, model=model, **changes).resume()
    assert f"--accept-change {caught.value.what.split(': ')[1].split()[0]}" in caught.value.fix


def test_a_change_can_be_accepted_by_name(folder, run, caplog):
    shutil.rmtree(run / "checkpoints" / "6")
    changes = {"learning_rate": 1e-3, "weight_decay": 0.1}
    with pytest.raises(InvalidInputError, match=r"another one: weight_decay was 0\.0 and is now 0\.1\."):
        trainer(folder, run, **changes).resume(accept_changes=["learning_rate"])
    with caplog.at_level(logging.WARNING, "hfax.train.resumption"):
        trainer(folder, run, **changes).resume(accept_changes=["weight_decay", "learning_rate"])
    assert "resuming with another learning_rate: 0.01, now 0.001" in caplog.text
    trainer(folder, run, **changes).resume()  # they are the run's own now


def test_what_does_not_change_the_losses_is_allowed(folder, run):
    """So does a longer run whose learning rate does not depend on its end."""
    again = trainer(
        folder,
        run,
        logging_steps=3,
        save_steps=1,
        save_total_limit=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        report_to="none",
    )
    assert again.resume()["steps"] == 6


def test_a_longer_run_goes_on_where_the_schedule_has_no_end(folder, tmp_path):
    options = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}
    for steps in (2, 4):
        assert trainer(folder, tmp_path / "run", max_steps=steps, **options).resume()["steps"] == steps


def test_an_adapter_and_an_optimizer_are_compared(folder, tmp_path):
    where = tmp_path / "run"
    trainer(folder, where, lora=LoraConfig(r=2, lora_alpha=4), optimizer=optax.sgd(0.1)).train()
    with pytest.raises(InvalidInputError, match=r'(?s)adapter was .*"lora_alpha": 4.*is now .*"lora_alpha": 8'):
        trainer(folder, where, lora=LoraConfig(r=2, lora_alpha=8), optimizer=optax.sgd(0.1)).resume()
    # the options of an optimizer that is not used do not matter
    options = {"lora": LoraConfig(r=2, lora_alpha=4), "learning_rate": 3.0}
    assert trainer(folder, where, optimizer=optax.sgd(0.1), **options).resume()["steps"] == 6


def test_arguments_of_resuming_are_checked(folder, model, whole):
    with pytest.raises(InvalidInputError, match="accept_changes names 'logging_steps'"):
        trainer(folder, whole, model=model).resume(accept_changes=["logging_steps"])
    with pytest.raises(InvalidInputError, match="accept_changes='seed' is a text"):
        trainer(folder, whole, model=model).resume(accept_changes="seed")
    with pytest.raises(InvalidInputError, match="is not True or False"):
        trainer(folder, whole, model=model).train(resume_from_checkpoint=str(whole / "checkpoints" / "4"))
    with pytest.raises(InvalidInputError, match=r"(?s)'adamw' is not an optimizer of optax.*adafactor"):
        trainer(folder, whole, model=model, optimizer="adamw")


def test_losses_and_data_are_told_apart_by_what_they_are_made_of():
    assert described(DPOLoss(beta=0.1)) != described(DPOLoss(beta=0.2))
    assert described(DPOLoss(beta=0.1)) == described(DPOLoss(beta=0.1))
    data = rows("llama", 2000)
    as_arrays = [{name: np.array(ids, np.int32) for name, ids in row.items()} for row in data]
    assert fingerprint(data, data[0]) == fingerprint(as_arrays, as_arrays[0])
    assert fingerprint(data, data[0]) != fingerprint(data[::-1], data[-1])
    assert fingerprint(iter(data), data[0]) == fingerprint(iter(data[:3]), data[0])

    class Drawn(list):
        """Rows with noise."""

        def __getitem__(self, index):
            return {"input_ids": np.random.default_rng().integers(0, 9, 50)}

    assert fingerprint(Drawn([0] * 7), {"input_ids": [1]}) == {"rows": 7}
