"""Two ways to classify: a sequence-classification head, and the likelihood of label words under a language model.

python examples/03_classification.py [MODEL]
"""

import sys

import torch
import transformers

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)

# A head on top of the model. The demo checkpoint has none, so a new one is initialized at random (strict=False). Its scores are
# meaningless until it is trained, but equal those of plain transformers.
torch.manual_seed(0)
model = AutoModelForTPU.from_pretrained(name, task="text-classification", strict=False)
classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
print("head:", classify("Return a new list."))

# Without a head: which continuation is more likely under the language model?
model = AutoModelForTPU.from_pretrained(name)
text, labels = "Return a new", [" list", " banana"]
scores = []
for label in labels:
    ids = tokenizer(text + label, return_tensors="pt")["input_ids"]
    start = tokenizer(text, return_tensors="pt")["input_ids"].shape[1]
    log_probs = model(ids).logits.float().log_softmax(-1)[0, start - 1 : -1]
    scores.append(log_probs.gather(1, ids[0, start:, None]).sum())
for label, score in zip(labels, torch.stack(scores).softmax(0), strict=True):
    print(f"label {label.strip()!r}: {score:.3f}")
