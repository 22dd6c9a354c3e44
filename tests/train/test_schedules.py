"""Learning rate schedules, beside those of transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import TrainingArguments as PlainArguments
from transformers import get_scheduler

from hfax import InvalidInputError, TrainingArguments

STEPS, PEAK = 40, 0.1
CASES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 0.25}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 50}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    *(
        (
            "warmup_stable_decay",
            {"num_decay_steps": 8, "num_stable_steps": 20, "min_lr_ratio": 0.1, "decay_type": d, "warmup_type": w},
        )
        for d, w in (("linear", "cosine"), ("1-sqrt", "linear"), ("cosine", "1-sqrt"))
    ),
]


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")  # transformers' own
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 7}, {"warmup_steps": 0.2}, {"warmup_ratio": 0.11}])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_schedules_are_those_of_transformers(kind, options, warmup, tmp_path):
    if kind == "constant" and warmup:
        with pytest.raises(InvalidInputError, match=r"(?s)has no warm-up.*constant_with_warmup"):
            TrainingArguments(tmp_path, lr_scheduler_type=kind, **warmup)
        return
    arguments = TrainingArguments(
        tmp_path, learning_rate=PEAK, lr_scheduler_type=kind, lr_scheduler_kwargs=options, **warmup
    )
    share = warmup.get("warmup_ratio", warmup.get("warmup_steps", 0))  # transformers 5 has one name for both
    steps = PlainArguments(str(tmp_path), warmup_steps=share, use_cpu=True).get_warmup_steps(STEPS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    plain = get_scheduler(kind, optimizer, steps, STEPS, scheduler_specific_kwargs=dict(options))
    expected = []
    for _ in range(STEPS):
        expected.append(plain.get_last_lr()[0])
        optimizer.step()
        plain.step()
    rate = arguments.schedule(STEPS)
    np.testing.assert_allclose([float(rate(step)) for step in range(STEPS)], expected, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_scheduler_type": "cosin"}, "is unknown.*linear, cosine, cosine_with_restarts, polynomial, constant"),
        ({"lr_scheduler_type": ["cosine"]}, "is unknown"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "'power', which 'linear' does not take"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "two"}}, "num_cycles='two'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs num_decay_steps"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "x"},
            },
            "decay_type='x'.*linear, cosine, 1-sqrt",
        ),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0}, "not above lr_end"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "are both given"),
        ({"warmup_ratio": 2}, "warmup_ratio=2 is too large.*from 0 to 1"),
        ({"learning_rate": "2e-4"}, "learning_rate='2e-4' is not a number"),
        ({"learning_rate": math.nan}, "learning_rate is not a number"),
        ({"max_steps": 2.5}, "max_steps=2.5 is not a whole number or None"),
        ({"max_steps": True}, "max_steps=True is not a whole number or None"),
        ({"shuffle": "no"}, "shuffle='no' is not True or False"),
        ({"adam_beta2": 1}, "adam_beta2=1 is too large.*below 1"),
        ({"adam_epsilon": 0}, "adam_epsilon=0 is too small"),
        ({"max_grad_norm": 0}, "max_grad_norm=0 is too small.*None for no clipping"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"report_to": 3}, "report_to=3 is not text or a tuple of names"),
        ({"output_dir": None}, "output_dir=None is not text or Path"),
        ({"eval_strategy": "best"}, "eval_strategy='best' is unknown.*no, steps, epoch"),
        ({"save_strategy": "no", "save_steps": 3}, "does not use save_steps=3"),
        ({"eval_strategy": "epoch", "eval_steps": 3}, "does not use eval_steps=3"),
        ({"save_strategy": "no", "load_best_model_at_end": True}, "does not go with save_strategy"),
    ],
)
def test_a_bad_value_is_named_with_what_exists(options, words):
    with pytest.raises(InvalidInputError, match=f"(?s){words}"):
        TrainingArguments(**{"output_dir": "run", **options})


def test_numbers_of_numpy_are_numbers():
    arguments = TrainingArguments("run", max_steps=np.int64(3), learning_rate=np.float32(0.5))
    assert float(arguments.schedule(3)(0)) == 0.5
