"""Preferences: direct preference optimization (DPO) of an adapter. The reference model is the model without the adapter.

`hfax train dpo.yaml` does the same from files.

python examples/09_preferences.py [MODEL]
"""

import sys

import numpy as np
import optax
import transformers

from hfax import AutoModelForTPU, LoraConfig, make_train_step
from hfax.demo import demo_folder
from hfax.train.dpo import DPOLoss

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
model = AutoModelForTPU.from_pretrained(name)

PAIRS = [  # prompt, chosen, rejected
    ("Return a new", " set.", " list."),
    ("The name of the", " key.", " file."),
    ("If the value is", " zero.", " None."),
    ("A function that", " waits.", " returns."),
]


def rows(which):
    """Token ids and labels, [pairs, length] int32, of prompts with their chosen (1) or rejected (2) completions."""
    ids = np.zeros((len(PAIRS), 24), np.int32)
    labels = np.full_like(ids, -100)
    for row, pair in enumerate(PAIRS):
        prompt = tokenizer(pair[0]).input_ids
        whole = prompt + tokenizer(pair[which], add_special_tokens=False).input_ids
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels


batch = {}
for word, which in (("chosen", 1), ("rejected", 2)):
    batch[f"{word}_ids"], batch[f"{word}_labels"] = rows(which)

model.add_adapter(LoraConfig(r=8, target_modules="all-linear"))
step = make_train_step(model, optax.adam(3e-3), DPOLoss(beta=0.1))
state = step.init()
for number in range(30):
    state, metrics = step(state, batch)
    if number in (0, 29):
        accuracy, margin = metrics["rewards/accuracies"], metrics["rewards/margins"]
        print(f"step {number + 1:2d}  loss {metrics['loss']:.3f}  accuracy {accuracy:.2f}  margin {margin:.2f}")
