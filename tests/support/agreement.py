"""What every format's tests check: hfax's weights are the given numbers, bit for bit, and its greedy tokens transformers'."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.kernels.quantized import QuantizedArray
from hfax.load.config import read_any_config
from hfax.load.stored_weights import stored_weights
from hfax.parallelism import weight_bytes
from hfax.tracing.abstract import open_skeleton

IDS = torch.tensor([[3, 17, 5, 40, 41, 9, 60, 22]])


def numbers_of(model) -> dict[str, np.ndarray]:
    """The model's weights in float32, packed ones dequantized."""
    return {
        name: np.asarray(
            dataclasses.replace(p, dtype=jnp.dtype("float32")).dequantize() if isinstance(p, QuantizedArray) else p
        )
        for name, p in model.params.items()
    }


def check(folder, reference: transformers.PreTrainedModel, *, exact: bool = True, tokens: int = 0):
    """Load a folder in float32, compare its weights with those of transformers' model, and so many tokens; returns hfax's model."""
    model = AutoModelForTPU.from_pretrained(folder, dtype="float32")
    wanted = reference.float().state_dict()
    found = numbers_of(model)
    for name, array in found.items():
        expected = wanted[name].numpy()
        if exact:
            assert np.array_equal(array, expected), (name, np.abs(array - expected).max())
        else:
            np.testing.assert_allclose(array, expected, rtol=3e-7, atol=0, err_msg=name)
    check_planned_bytes(folder, model)
    if not tokens:
        return model
    options = {"max_new_tokens": tokens, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), reference.generate(IDS, **options))
    return model


def check_planned_bytes(folder, model) -> None:
    """What a plan tells from the headers of the files: which weights are packed, and their bytes with scales and offsets."""
    config = read_any_config(str(folder), trust_remote_code=False)
    stored = stored_weights(str(folder), config)
    skeleton = open_skeleton(config, dtype="float32")
    packed = {} if stored is None else stored.layouts(skeleton, jax.default_backend())
    planned = weight_bytes(skeleton, packed)
    assert set(packed) == {name for name, weight in model.params.items() if isinstance(weight, QuantizedArray)}
    for name, weight in model.params.items():
        if not isinstance(weight, QuantizedArray):
            assert planned[name] == weight.nbytes, name
            continue
        parts = [part for part in (weight.values, weight.scale, weight.offset) if part is not None]
        unused = weight.scale.size * packed[name].offset_bytes if weight.offset is None else 0  # all are 0
        assert planned[name] - unused == sum(part.nbytes for part in parts), name


def plain_reference(folder) -> transformers.PreTrainedModel:
    """transformers' model of a plain folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
