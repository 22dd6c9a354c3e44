"""NEFTune: noise on the embeddings of a model in train mode: Jain et al., 2023 (https://arxiv.org/abs/2310.05914)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from hfax.backends.jax.model import JaxModel
from hfax.patches.patch import forwards_replaced


@contextlib.contextmanager
def noisy_embeddings(model: JaxModel, alpha: float | None) -> Iterator[None]:
    """Within the block, passes in train mode add uniform noise to the input embeddings, as in transformers.

    Args:
        model: the model.
        alpha: the noise is at most alpha / sqrt(length · width), padding included; None: no noise.
    """
    if alpha is None:
        yield
        return
    module: Any = model.module
    layer = module.get_input_embeddings()
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if not layer.training:
            return result
        bound = alpha / math.sqrt(result.size(1) * result.size(2))
        return result + result.new_empty(result.shape).uniform_(-bound, bound)

    with model.skeleton.lock, forwards_replaced([(layer, run)]):
        yield
