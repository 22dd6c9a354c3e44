"""Calls whose types pyright checks with `make lint`; nothing runs them."""

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hfax import AutoModelForTPU
from hfax.backends.jax.model import JaxModel
from hfax.backends.torch_xla.model import TorchXlaModel


def of_jax(ids: torch.Tensor, array: np.ndarray) -> None:
    model = AutoModelForTPU.from_pretrained("demo", backend="jax")
    assert_type(model, JaxModel)
    assert_type(model.generate(ids, max_new_tokens=4), torch.Tensor)
    assert_type(model.generate(array, max_new_tokens=4), jax.Array)
    assert_type(model.generate([[1, 2]], do_sample=True), jax.Array)
    assert_type(model.generate(input_ids=ids), torch.Tensor | jax.Array)
    found = model.generate(ids, return_dict_in_generate=True, output_scores=True)
    assert_type(found, GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput)


def of_torch_xla(ids: torch.Tensor) -> None:
    model = AutoModelForTPU.from_pretrained("demo", backend="torch_xla")
    assert_type(model, TorchXlaModel)
    assert_type(model.generate(ids), torch.Tensor)
    found = model.generate(ids, return_dict_in_generate=True)
    assert_type(found, GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput)
