"""Inputs that a class itself leaves out while it writes, though its forward takes them.

Asks the class's own `prepare_inputs_for_generation`, on the host and before anything is traced. It does not know why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin

logger = logging.getLogger(__name__)

_METHOD = "prepare_inputs_for_generation"


def without_dropped(module: Any, ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a decoder's prompts without those that transformers' `generate` would not hand to forward.

    Only inputs with a value for each token are asked about: images and sound may be encoded before, and are left out then.

    Args:
        module: the model.
        ids: the prompts, [batch, length].
        inputs: beside ids, by name.
    """
    prepare = getattr(type(module), _METHOD, None)
    ids = np.atleast_2d(ids)
    names = set(inputs) - {"attention_mask"}
    asked = {n: inputs[n] for n in names if inputs[n].shape[:2] == ids.shape and inputs[n].dtype.kind in "biu"}
    if not asked or prepare is None or prepare is getattr(GenerationMixin, _METHOD):
        return dict(inputs)
    given = {n: torch.from_numpy(np.array(a)).long() for n, a in asked.items()}
    prompt = torch.from_numpy(ids.copy()).long()
    try:
        kept = module.prepare_inputs_for_generation(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=DynamicCache(),
            use_cache=True,
            is_first_iteration=True,
            **given,
        )
    except Exception as error:  # a method that needs more than a prompt says nothing about these
        logger.debug("%s cannot be asked for its inputs: %s", type(module).__name__, error)
        return dict(inputs)
    return {n: a for n, a in inputs.items() if n not in asked or kept.get(n) is not None}
