"""Records a loaded model, so that the next process that loads its checkpoint starts from stored programs.

Only what `StoredModel` does exactly as the model itself is recorded: text generation and forward passes over token ids on one
device, with weights whose rows are in the checkpoint, at most cast, or quantized by hfax.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfax.errors import HfaxError
from hfax.generation.beam_config import make_beam_spec
from hfax.generation.sampling_config import make_sampling_spec
from hfax.programs.buckets import Buckets
from hfax.programs.bundle_file import START, TOKENIZER, is_bundle
from hfax.programs.program_files import is_enabled
from hfax.stored.call import read_call, read_inputs
from hfax.stored.reader import WeightReader
from hfax.stored.records import is_recordable, renew, write_into_bundle, write_record
from hfax.stored.start import ForwardStart, ModelStart, TextPositions, start_file
from hfax.stored.tokenizer import describe_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.backends.protocol import LoadOptions
    from hfax.generation.generation_request import GenerationOptions, Prompts
    from hfax.load.source import CheckpointSource

logger = logging.getLogger(__name__)

_MOST_BUFFER_BYTES = 64 << 20
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "watermarking_config": (None,),
    "max_time": (None,),
    **dict.fromkeys(("output_scores", "output_logits", "output_hidden_states", "output_attentions"), (None, False)),
    "return_dict_in_generate": (None, False),
}
"""Options that a model may not set by default, and their values without effect."""


def store_start(source: CheckpointSource, options: LoadOptions, model: JaxModel) -> None:
    """Write the record of a model, unless it exists or the model is not of the kind that records cover.

    Args:
        source: the checkpoint that it was loaded from.
        options: how it was loaded.
        model: the model, as it was loaded.
    """
    if is_bundle(source) or not (is_enabled() and is_recordable(source, options)):
        return
    if model.mesh is not None:
        return
    reader = WeightReader(source)
    if renew(path := start_file(reader, options, model.jax_device)):
        return
    start, why = _describe(reader, source.folder, model, model.buffers, options.quantization)
    if start is None:
        logger.info("every start will import torch and transformers: %s", why)
        return
    write_record(path, start.as_content(), start.buffers)


def store_in_bundle(source: CheckpointSource, model: JaxModel, buffers: Mapping[str, jax.Array]) -> None:
    """Write the records of a bundle's model and tokenizer into its folder, where they can be made.

    Args:
        source: the bundle, complete.
        model: its model; it may be abstract.
        buffers: the arrays that the bundle's weights lack.

    Raises:
        OSError: the disk is full.
    """
    start, why = _describe(WeightReader(source), source.folder, model, buffers, has_own_names=True)
    if start is None:
        logger.info("the bundle's model will start with torch and transformers: %s", why)
        return
    write_into_bundle(source.folder / START, start.as_content(), start.buffers)
    if any((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        if (described := describe_tokenizer(tokenizer)) is not None:
            write_into_bundle(source.folder / TOKENIZER, *described)


def _describe(
    reader: WeightReader,
    folder: Path,
    model: JaxModel,
    buffers: Mapping[str, jax.Array],
    quantization: str | None = None,
    *,
    has_own_names: bool = False,
) -> tuple[ModelStart | None, str]:
    """The record of a model; None, and why there is none."""
    from safetensors.flax import save

    from hfax.generation.generation_request import resolve_generation_config
    from hfax.stored.find_weights import find_weights

    traits, cls = model.parts.traced.traits, type(model.module)
    generates = model.can_generate()
    if traits.main_input != "input_ids" or (generates and model.has_own_generate):
        return None, "it does not read token ids alone, or generates by a loop of its own"
    if not cls.__module__.startswith("transformers."):
        return None, "its class is not transformers' own"
    if (weights := find_weights(reader, folder, model, quantization, has_own_names=has_own_names)) is None:
        return None, "its weights are converted when they are loaded"
    if sum(array.nbytes for array in buffers.values()) > _MOST_BUFFER_BYTES:
        return None, "it has large arrays that the checkpoint does not hold"
    own = _public(model.generation_config) if generates else {}
    named = _public(resolve_generation_config(model.generation_config, None, {})[0]) if generates else {}
    if wrong := [name for name, neutral in _NEUTRAL.items() if named.get(name) not in neutral]:
        return None, f"it generates with {', '.join(wrong)}"
    if not _is_json([own, named]):
        return None, "its generation options are not plain values"
    start = ModelStart(
        model_key=model.parts.traced.key_parts,
        traits=traits,
        forward=_describe_forward(model),
        generates=generates,
        weights=weights,
        num_bytes=sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(model.params)),
        tied=model.parts.tied,
        generation_config=own,
        options=named,
        vocab_size=model.vocabulary_size,
        num_logits=model.num_logits() if generates else 0,
        context=model.context_length,
        positions=_describe_positions(model) if generates else None,
        buffers=save(dict(buffers)),
    )
    try:
        if generates and not _reads_alike(start, model):
            return None, "it reads its prompts or options in a way of its own"
    except HfaxError as error:  # some options must be passed with each call
        return None, f"it does not generate by its own options: {error.what}"
    if not _reads_inputs_alike(start, model):
        start = dataclasses.replace(start, forward=None)
    if not generates and start.forward is None:
        return None, "it reads its inputs in a way of its own"
    return start, ""


def _describe_positions(model: JaxModel) -> TextPositions | None:
    """The positions of a model with several axes of them; whether they are counted is seen when calls are compared."""
    try:
        found = model.read_prompt(model.example_prompt(1, 1), {}, Buckets()).inputs.get("position_ids")
    except HfaxError:  # see `_describe`
        return None
    if found is None or found.ndim != 3:
        return None
    config = model.config.to_dict()
    ids = [value for name, value in config.items() if name.endswith("_token_id") and name not in _OF_TEXT]
    return TextPositions(axes=len(found), other_ids=tuple(value for value in ids if isinstance(value, int)))


def _describe_forward(model: JaxModel) -> ForwardStart | None:
    """How a model's forward calls are read; None if patches change their inputs."""
    from hfax.backends.jax.size_classes import size_classes_of
    from hfax.patches.registry import InputPatch, all_patches

    patches = [patch for patch in all_patches("jax") if isinstance(patch, InputPatch)]
    if any(patch.holder(model.module) is not None for patch in patches):
        return None
    taken = inspect.signature(model.module.forward).parameters
    classes = size_classes_of(model.module, model.parts.traced.traits)
    return ForwardStart(inputs=tuple(name for name in _TOKEN_INPUTS if name in taken), padding=classes.settings)


def _reads_inputs_alike(start: ModelStart, model: JaxModel) -> bool:
    """Whether a forward call read from the record is that which the model reads."""
    if start.forward is None:
        return False
    ids = np.repeat(model.example_prompt(2, 1), 3, axis=1).astype(np.int64)
    others = {name: np.array([[1, 1, 1], [1, 1, 0]]) for name in start.forward.inputs if name != "input_ids"}
    given = {"input_ids": ids, **others}
    theirs, ours = model.prepare_inputs(given), read_inputs(start, given)
    if ours is None or list(ours) != list(theirs):
        return False
    return all(
        isinstance(theirs[name], np.ndarray)
        and ours[name].dtype == theirs[name].dtype
        and np.array_equal(ours[name], theirs[name])
        for name in ours
    )


def _reads_alike(start: ModelStart, model: JaxModel) -> bool:
    """Whether some calls read from the record are those that the model reads."""
    ids = np.repeat(model.example_prompt(1, 1), 3, axis=1)
    padded = {"attention_mask": np.array([[0, 1, 1]])} if start.traits.takes_attention_mask else {}
    drawn: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "max_new_tokens": 2,
        "seed": 3,
    }
    ended = [{"do_sample": False, "eos_token_id": ends} for ends in ([], [2, 1])]
    calls: list[dict[str, Any]] = [{"do_sample": False}, {**drawn, **padded}, *ended]
    for options in calls:
        theirs, ours = model.read_request(ids, **options), read_call(start, ids, options, Buckets())
        if ours is None or theirs.static:
            return False
        mine, asked = (*ours,), (theirs.prompts, theirs.options)
        if _as_values(start, *mine) != _as_values(start, *asked):
            return False
    return True


def _as_values(start: ModelStart, prompts: Prompts, options: GenerationOptions) -> Any:
    """All that a loop takes of a call, in comparable form."""
    sizes = {"vocab_size": start.num_logits, "prompt_length": prompts.padded_length}
    spec, values = make_sampling_spec(
        options.config, max_new_tokens=options.max_new_tokens, **sizes, **options.extra_sampling
    )
    arrays = {**prompts.inputs, **values, "given": prompts.given}
    plain = (prompts.longest, prompts.padded_length, prompts.num_padded_rows, prompts.static, options.keep)
    ends = (options.max_new_tokens, options.eos_token_ids, options.pad_token_id, options.config.stop_strings)
    beams, of_beams = make_beam_spec(
        options.config, num_eos=len(options.eos_token_ids), max_new_tokens=options.max_new_tokens, capacity=64
    )
    arrays |= of_beams
    custom = (
        beams,
        options.cache_dtype,
        options.custom,
        options.stopping,
        options.negative,
        options.speculation,
        options.draft,
    )
    return spec, {n: (a.dtype.name, a.tolist()) for n, a in arrays.items()}, plain, ends, custom


def _public(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _is_json(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read again."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
