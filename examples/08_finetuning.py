"""Fine-tuning an adapter: labelled rows, a Trainer, the adapter saved in peft's format and then merged into the weights.

python examples/08_finetuning.py [MODEL]
"""

import itertools
import sys
import tempfile
from pathlib import Path

import transformers

from hfax import AutoModelForTPU, LoraConfig, Trainer, TrainingArguments
from hfax.demo import demo_folder
from hfax.train.examples import tokenize_rows

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
model = AutoModelForTPU.from_pretrained(name)

colours = ["red", "green", "blue", "white", "black", "grey"]
rows = [
    {"prompt": f"The colour after {one} is", "completion": f" {other}."} for one, other in itertools.pairwise(colours)
]
data = tokenize_rows(rows, tokenizer, max_length=64)

model.add_adapter(LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=60, per_device_train_batch_size=5, learning_rate=1e-2, lr_scheduler_type="cosine"
    )
    trainer = Trainer(model, arguments, data, data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"loss before {before:.3f}, after {trainer.evaluate()['eval_loss']:.3f}")
    print("saved:", ", ".join(sorted(path.name for path in Path(trainer.save()).iterdir())))

prompt = tokenizer(rows[1]["prompt"], return_tensors="pt")


def answer():
    ids = model.generate(**prompt, max_new_tokens=3, do_sample=False, repetition_penalty=1.0)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


print("with the adapter:", answer())
model.merge_adapter()
print("merged:", answer())
