"""Distillation on texts that the student or the teacher writes during training."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hfax import InvalidInputError, TrainingArguments
from hfax.train.data import PaddingCollator
from hfax.train.distillation import DistillationLoss
from hfax.train.distillation_trainer import DistillationTexts, DistillationTrainer, prompt_length

from .small_models import make

ROWS = [
    {"input_ids": ids, "labels": [-100] * 4 + ids[4:]}
    for ids in (np.random.default_rng(i).integers(3, 128, 9).tolist() for i in range(8))
]
GREEDY = 1e-6
"""A temperature so low that texts are the likeliest ones."""


class Recording:
    """The padding collator, which keeps the rows that it got."""

    def __init__(self):
        self.rows, self._collate = [], PaddingCollator()

    def __call__(self, rows):
        self.rows += rows
        return self._collate(rows)


def trainer(tmp_path, *, temperature=1.0, data=ROWS, folder="run", steps=1, collator=None, max_length=None, **texts):
    _, student = make("llama", tmp_path / "student", seed=0)
    _, teacher = make("llama", tmp_path / "teacher", seed=1)
    args = TrainingArguments(
        tmp_path / folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=2,
    )
    made = DistillationTrainer(
        student,
        args,
        data,
        teacher=teacher,
        loss=DistillationLoss(temperature=temperature),
        texts=DistillationTexts(max_new_tokens=6, **texts),
        max_length=max_length,
        data_collator=collator or PaddingCollator(),
    )
    return made, student, teacher


@pytest.mark.parametrize(("texts", "writer"), [({"lmbda": 1.0, "seq_kd": True}, 1), ({"seq_kd": True}, 2)])
def test_texts_are_those_of_the_student_or_the_teacher(texts, writer, tmp_path):
    collator = Recording()
    made = trainer(tmp_path, temperature=GREEDY, collator=collator, **texts)
    prompts = {tuple(row["input_ids"][:4]) for row in ROWS}
    model = made[writer]
    expected = {
        prompt: np.asarray(model.generate(np.array([prompt]), max_new_tokens=6, do_sample=False))[0].tolist()
        for prompt in prompts
    }
    made[0].train()
    assert len(collator.rows) == 4
    for row in collator.rows:
        assert row["input_ids"] == expected[tuple(row["input_ids"][:4])]
        assert row["labels"] == [-100] * 4 + row["input_ids"][4:]


def test_a_share_of_the_steps_has_texts_of_the_student(tmp_path):
    collator = Recording()
    trainer(tmp_path, steps=12, collator=collator, lmbda=0.5)[0].train()
    steps = [collator.rows[i : i + 4] for i in range(0, len(collator.rows), 4)]
    is_data = [[row in ROWS for row in rows] for rows in steps]
    assert all(all(each) or not any(each) for each in is_data)
    assert 2 < sum(map(all, is_data)) < 10


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    trainer(tmp_path, steps=4, folder="whole", lmbda=0.7)[0].train()
    trainer(tmp_path, steps=2, folder="parts", lmbda=0.7)[0].train()
    with pytest.raises(InvalidInputError, match="texts was"):
        trainer(tmp_path, steps=4, folder="parts", lmbda=0.8)[0].resume()
    trainer(tmp_path, steps=4, folder="parts", lmbda=0.7)[0].resume()
    found = []
    for folder in ("whole", "parts"):
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        found.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines])
    assert [step for step, *_ in found[1]] == [1, 2, 3, 4]
    assert found[0] == found[1]


def test_a_maximum_beyond_the_context_needs_no_room(tmp_path):
    """As `hfax train` passes its default of 1,024: the engine has room for the longest prompt and text alone."""
    collator = Recording()
    made, *_ = trainer(tmp_path, collator=collator, lmbda=1.0, max_length=100_000)
    made.train()
    assert max(len(row["input_ids"]) for row in collator.rows) <= 10
    made, *_ = trainer(tmp_path, folder="short", collator=collator, lmbda=1.0, max_length=6)
    made.train()
    assert {len(row["input_ids"]) for row in collator.rows[4:]} == {6}


def test_prompts_are_what_is_before_the_last_labels():
    assert prompt_length({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}) == 1
    assert prompt_length({"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, 4, -100]}) == 3
    assert prompt_length({"input_ids": [1, 2, 3]}) == 0
    assert prompt_length({"input_ids": [1, 2], "labels": [-100, -100]}) == 2


def test_what_does_not_fit_is_said(tmp_path):
    with pytest.raises(InvalidInputError, match="Row 1 has no prompt"):
        trainer(tmp_path, data=[{"input_ids": [1, 2, 3]}] * 4, lmbda=1.0)
    trainer(tmp_path, data=[{"input_ids": [1, 2, 3]}] * 4)  # texts of the data need none
    for wrong in ({"lmbda": 2}, {"max_new_tokens": 0}, {"max_num_seqs": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            DistillationTexts(**wrong)
