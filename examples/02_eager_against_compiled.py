"""Eager PyTorch against compiled XLA: the same output, and the time of each.

python examples/02_eager_against_compiled.py [MODEL]
"""

import sys
import time

import torch
import transformers

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

NEW_TOKENS = 64
name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
batch = tokenizer("Return a new list", return_tensors="pt")
options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


def timed(label, model):
    start = time.perf_counter()
    ids = model.generate(**batch, **options)
    seconds = time.perf_counter() - start
    print(f"{label:34} {seconds:7.2f} s {NEW_TOKENS / seconds:8.1f} tokens/s")
    return ids


eager = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
compiled = AutoModelForTPU.from_pretrained(name, dtype="float32")
timed("eager transformers, first call", eager)
expected = timed("eager transformers, second call", eager)
timed("hfax, first call (trace, compile)", compiled)
ids = timed("hfax, second call", compiled)
print("same tokens:", ids.tolist() == expected.tolist())
