"""What every format's tests check: hfax's weights are the given numbers, bit for bit, and its greedy tokens transformers'."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.kernels.quantized import QuantizedArray

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
    if not tokens:
        return model
    options = {"max_new_tokens": tokens, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), reference.generate(IDS, **options))
    return model


def plain_reference(folder) -> transformers.PreTrainedModel:
    """transformers' model of a plain folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
