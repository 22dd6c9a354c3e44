"""Draft models for speculative decoding: hfax models, and models of plain transformers, which are copied to the device."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from hfax.errors import UnsupportedOptionError
from hfax.load.host_arrays import to_numpy
from hfax.programs.model_parts import ModelParts
from hfax.tracing.abstract import open_skeleton, without_weights


class DraftModels:
    """The draft models of a model. A copy of a torch model lives as long as the torch model."""

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[torch.nn.Module, ModelParts] = weakref.WeakKeyDictionary()

    def parts_of(self, assistant_model: Any, model: ModelParts) -> ModelParts | None:
        """The parts of a draft model.

        Args:
            assistant_model: an hfax model on JAX, or a model of plain transformers; of the latter, the weights of the first call
                are used, also if they change later. None: there is none.
            model: the model that verifies the drafts.

        Raises:
            UnsupportedOptionError: it is another object, or its weights are not those of its class.
        """
        parts = getattr(assistant_model, "parts", None)
        if assistant_model is None or isinstance(parts, ModelParts):
            return parts
        if not isinstance(assistant_model, PreTrainedModel):
            raise UnsupportedOptionError(
                f"assistant_model is a {type(assistant_model).__name__}, which is neither an hfax model nor a transformers model.",
                "Draft tokens are computed and verified on the device.",
                "Load it with AutoModelForTPU.from_pretrained(…, backend='jax').",
            )
        if assistant_model not in self._copies:
            self._copies[assistant_model] = _copied(assistant_model, model)
        return self._copies[assistant_model]


def _copied(assistant: PreTrainedModel, model: ModelParts) -> ModelParts:
    config = copy.deepcopy(assistant.config)
    config.architectures = [type(assistant).__name__]
    skeleton = open_skeleton(config, dtype=assistant.dtype)
    weights = assistant.state_dict()
    missing = [
        name for name, shape in skeleton.shapes.items() if name not in weights or weights[name].shape != shape.shape
    ]
    if missing or type(skeleton.module) is not type(assistant):
        raise UnsupportedOptionError(
            f"assistant_model, a {type(assistant).__name__}, cannot be copied to the device.",
            f"It has other weights than its class: {', '.join(missing[:3]) or type(skeleton.module).__name__}.",
            "Save it, and load it with AutoModelForTPU.from_pretrained(…, backend='jax').",
        )
    traced, _ = without_weights(skeleton)
    arrays = {name: to_numpy(weights[name].detach().cpu()) for name in skeleton.shapes}
    buffers = {name: to_numpy(buffer) for name, buffer in skeleton.buffers.items()}
    num_logits = int(getattr(skeleton.module.get_output_embeddings(), "out_features", 0))
    return dataclasses.replace(
        model,
        traced=traced,
        weights=model.layout.put({**buffers, **arrays}),
        tied=skeleton.tied,
        num_logits=lambda: num_logits,
        context=None,
    )
