"""Distillation: a small model learns a teacher's token probabilities. In plain JAX, with both models' `apply` under one `jax.grad`.

python examples/10_distillation.py [TEACHER]
"""

import copy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
teacher = AutoModelForTPU.from_pretrained(name, dtype="float32")

config = copy.deepcopy(teacher.config)
config.num_hidden_layers = 2
student = AutoModelForTPU.from_config(config, dtype="float32")

text = "Return a new list of the names of the files in the folder. If there is no such file, the value is None. " * 8
ids = np.array(tokenizer(text).input_ids[: 8 * 24], np.int32).reshape(8, 24)
optimizer = optax.adam(3e-3)


def loss(student_params, teacher_params, ids):
    """Kullback-Leibler divergence of the student from the teacher, in nats per token."""
    wanted = jax.nn.log_softmax(teacher.apply(teacher_params, input_ids=ids).logits)
    found = jax.nn.log_softmax(student.apply(student_params, input_ids=ids).logits)
    return (jnp.exp(wanted) * (wanted - found)).sum(axis=-1).mean()


@jax.jit
def step(student_params, state, teacher_params, ids):
    value, gradients = jax.value_and_grad(loss)(student_params, teacher_params, ids)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(student_params, updates), state, value


params, state = dict(student.params), optimizer.init(student.params)
for number in range(40):
    params, state, value = step(params, state, teacher.params, ids)
    if number in (0, 39):
        print(f"step {number + 1:2d}  {value:.3f} nats from the teacher")
student.update(params)
print(f"{teacher.num_parameters():,} parameters taught {student.num_parameters():,}")
