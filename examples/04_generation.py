"""Generation: greedy, sampled, a batch of prompts with different lengths, and streaming.

python examples/04_generation.py [MODEL]
"""

import sys

import transformers

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForTPU.from_pretrained(name)


def text(ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


prompt = tokenizer("Return a new list", return_tensors="pt")
print("greedy:  ", text(model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]))
for seed in (1, 2, 1):
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=True, temperature=0.8, top_p=0.95, seed=seed)
    print(f"seed {seed}:  ", text(ids[0]))

# Prompts of different lengths are left-padded and generate the same tokens as each prompt alone.
prompts = ["Return", "If the file does not exist,"]
batch = model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=12, do_sample=False)
for row, single in zip(batch, prompts, strict=True):
    alone = model.generate(**tokenizer(single, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    print("in a batch as alone:", text(row) == text(alone[0]), "|", text(row))

print("streamed:")
streamer = transformers.TextStreamer(tokenizer, skip_special_tokens=True)
model.generate(**prompt, max_new_tokens=24, do_sample=False, streamer=streamer)
