"""Small models with adapters, as peft's and as hfax's."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
from tiny_models import random_model, save, tiny_llama_config

from hfax import AutoModelForTPU

WITHOUT_PEFTS_WARNINGS = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
"""Marks of tests that call peft."""
IDS = np.random.default_rng(0).integers(1, 96, (2, 9))
LLAMA = {"hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.02}


def base(folder, config=None, **options):
    """One checkpoint as plain transformers' model and hfax's."""
    plain = random_model(config or tiny_llama_config(**LLAMA))
    return plain, AutoModelForTPU.from_pretrained(save(folder, plain), **options)


def with_peft(plain, options, *, seed=1):
    """The model with an adapter that changes something."""
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return adapted.eval()


def logits(model):
    """Of IDS."""
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(input_ids=torch.tensor(IDS)).logits.numpy()
    return np.asarray(model(input_ids=IDS).logits)
