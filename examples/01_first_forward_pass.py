"""One forward pass: torch ids in, logits out, equal to those of plain transformers.

python examples/01_first_forward_pass.py [MODEL]
"""

import sys

import jax.numpy as jnp
from transformers import AutoTokenizer

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForTPU.from_pretrained(name, dtype="float32")
print(model)

batch = tokenizer("Return a new list containing", return_tensors="pt")
logits = model(**batch).logits
print("logits:", tuple(logits.shape), logits.dtype)
for score, token in zip(*logits[0, -1].topk(3), strict=True):
    print(f"  next token {tokenizer.decode(token)!r}: {score:.2f}")

# The same forward pass as a pure function of the weights, for jax.jit, jax.grad and jax.vmap.
pure = model.apply(model.params, input_ids=jnp.array(batch["input_ids"].numpy()), use_cache=False).logits
print("apply gives the same logits:", bool(jnp.allclose(pure, jnp.array(logits.numpy()), atol=1e-3)))
