"""Which kinds of cache layers a model has, by its config: one for each layer of the text model, and for each loop over one."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs


def layer_kinds(config: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The kind of each cache layer of the text model, and its arguments.

    Models that run some layers in a loop (Dory) keep keys and values of each loop: those of the later loops follow the others.
    """
    text_config: Any = config.get_text_config(decoder=True)
    types, kwargs = get_layer_types_and_kwargs(text_config)
    crossing = getattr(text_config, "cross_attention_layers", None) or ()  # layers that attend only to images
    types = ["cross_attention" if index in crossing else kind for index, kind in enumerate(types)]
    kwargs = list(kwargs)
    if getattr(text_config, "recurrent_kv_cache_mode", None) == "per_loop":
        looped = slice(text_config.n_input_layers, text_config.n_input_layers + text_config.n_recurrent_layers)
        further = text_config.n_recurrent_loops - 1
        return types + types[looped] * further, kwargs + kwargs[looped] * further
    return types, kwargs
