"""The arguments of a `generate` call, checked and padded to the sizes that programs are compiled for.

Turns the user's arguments into host arrays and scalars; nothing here touches a device. All validation of prompts, masks and
lengths is in this file.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.processor_set import CustomProcessors
from hfax.generation.stopping import Stopping
from hfax.known_words import has_word, reject_arguments
from hfax.load.host_arrays import narrow
from hfax.programs.buckets import Buckets
from hfax.tracing.geometry import HostArray, keep_on_host
from hfax.tracing.traits import ModelTraits

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

EMBEDS = "inputs_embeds"
"""The input that replaces the embeddings of token ids in a decoder's prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch of prompts, as passed by the user and as programs take them.

    Args:
        given: [batch, length] int, the user's ids (for encoder-decoders, the decoder ids).
        inputs: the padded model inputs.
        padded_length: padded length of the (decoder) prompts, in tokens.
        longest: length of the longest (decoder) prompt in tokens, without padding.
        num_padded_rows: rows of `inputs`, a power of two; rows past `len(given)` are padding.
        static: inputs that are constants of the prefill program: the geometry of images and audio.
        kept: the `KeptCache` that holds the beginning of the prompts; `inputs` are then those of `kept_cache.resume`.
    """

    given: np.ndarray
    inputs: dict[str, np.ndarray]
    padded_length: int
    longest: int
    num_padded_rows: int
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    kept: Any = None

    @property
    def encoder_ids(self) -> np.ndarray | None:
        """[padded rows, length], what the encoder reads, or the prompts of a decoder, -1 at padding; None without token ids."""
        ids = self.inputs.get("input_ids")
        return None if ids is None or EMBEDS in self.inputs else np.where(self.inputs["attention_mask"] != 0, ids, -1)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Rows and padded length of the (encoder) prompts."""
        ids = self.inputs.get("input_ids")
        return self.num_padded_rows, self.padded_length if ids is None else ids.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Resolved options of one call.

    Args:
        config: every generation option.
        max_new_tokens: maximum number of tokens to generate.
        seed: sampling seed, 32 bits.
        eos_token_ids: end-of-sequence tokens.
        pad_token_id: fills the output after the end of a sequence.
        keep: per-step outputs, as in `LoopSpec.keep`.
        extra_sampling: options that GenerationConfig lacks (presence_penalty, frequency_penalty).
        custom: the caller's logits processors.
        stopping: the caller's stopping criteria.
        negative: for classifier-free guidance `input_ids` and `attention_mask` of the texts without the prompts, [padded rows,
            length] int32.
        speculation: how draft tokens are proposed, a `Speculation`; None: no speculative decoding.
        draft: the draft model and its weights, if there is one.
        cache_dtype: as in `LoopSpec`.
    """

    config: GenerationConfig
    max_new_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    keep: tuple[str, ...]
    extra_sampling: Mapping[str, Any]
    custom: CustomProcessors = dataclasses.field(default_factory=CustomProcessors)
    stopping: Stopping = dataclasses.field(default_factory=Stopping)
    negative: Mapping[str, np.ndarray] | None = None
    speculation: Any = None
    draft: Any = None
    cache_dtype: str | None = None


def resolve_generation_config(
    model_config: GenerationConfig, given: GenerationConfig | None, overrides: Mapping[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Resolve the options with transformers' precedence: overrides, then `given`, then the model's, then the defaults.

    Returns:
        The config and the overrides that are not generation options.

    Raises:
        InvalidInputError: transformers rejects the combination of options.
    """
    from transformers import GenerationConfig

    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    defaults = model_config._get_default_generation_params()
    has_own_length = _has_length(given, overrides)
    try:
        config.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        config.update(**defaults, defaults_only=True)
        if has_own_length:
            config.max_new_tokens = config.max_length = None
            for source in (vars(given) if given is not None else {}, overrides):
                if source.get("max_length") is not None:
                    config.max_length = source["max_length"]
                if source.get("max_new_tokens") is not None:
                    config.max_new_tokens = source["max_new_tokens"]
        rest = config.update(**{k: v for k, v in overrides.items() if k not in ("max_length", "max_new_tokens")})
    except ValueError as error:
        raise InvalidInputError(
            "The generation options are inconsistent.", str(error), "Change the options named in the message."
        ) from error
    if not has_own_length and config.max_new_tokens is None and model_config.max_length is None:
        config.max_new_tokens, config.max_length = defaults["max_length"], None
    return config, rest


def _has_length(given: GenerationConfig | None, overrides: Mapping[str, Any]) -> bool:
    names = ("max_length", "max_new_tokens")
    return any(overrides.get(n) is not None or (given is not None and getattr(given, n) is not None) for n in names)


def resolve_max_new_tokens(config: GenerationConfig, prompt_length: int, context: int | None) -> int:
    """The maximum number of tokens to generate.

    Args:
        config: from `resolve_generation_config`.
        prompt_length: length of the longest prompt, without padding.
        context: the model's context length in positions; None if it is unbounded.

    Raises:
        InvalidInputError: there is no room for a new token, or the prompt and new tokens exceed the context.
    """
    if config.max_new_tokens is not None:
        wanted, name = config.max_new_tokens, f"max_new_tokens={config.max_new_tokens}"
    else:
        wanted, name = config.max_length - prompt_length, f"max_length={config.max_length}"
    if not isinstance(wanted, (int, np.integer)) or wanted < 1:
        raise InvalidInputError(
            f"{name} leaves nothing to generate after a prompt of {prompt_length} tokens.",
            "generate() must produce at least one new token.",
            "Pass max_new_tokens of 1 or more; to score a prompt without generating, call the model directly.",
        )
    if context is not None and prompt_length >= context:
        raise InvalidInputError(
            f"The prompt has {prompt_length} tokens; the model's context holds {context}.",
            "There is no room for a new token.",
            f"Shorten the prompt to at most {context - 1} tokens, for example with truncation=True in the tokenizer.",
        )
    if context is not None and prompt_length + wanted > context:
        room = context - prompt_length
        raise InvalidInputError(
            f"A prompt of {prompt_length} tokens and {name} exceed the model's context of {context} tokens.",
            "Positions past the context have no trained (or no stored) embedding and would silently produce wrong output.",
            f"Pass max_new_tokens={room} or less, or shorten the prompt.",
        )
    return int(wanted)


def pad_decoder_prompts(
    input_ids: Any,
    attention_mask: Any | None,
    *,
    vocab_size: int | None,
    pad_token_id: int | None,
    eos_token_ids: tuple[int, ...],
    context: int | None,
    buckets: Buckets,
    is_exact: bool = False,
    extras: Mapping[str, np.ndarray] | None = None,
    traced_geometry: Collection[str] = (),
    more: int = 0,
) -> Prompts:
    """Check a batch of prompts and left-pad it to its buckets.

    Args:
        input_ids: [batch, length] or [length] token ids.
        attention_mask: [batch, length], 0 at padding; on the right, it is moved to the left, if there are only
            tokens; None: as in transformers, pad tokens are padding unless the pad token is also an end-of-sequence token.
        vocab_size: exclusive upper bound of the ids.
        pad_token_id: padding value (never read).
        eos_token_ids: end-of-sequence tokens.
        context: the model's context length.
        buckets: how sizes are rounded up.
        is_exact: add no padding, for models that treat padding as text.
        extras: further inputs by name. Per-token inputs are padded like the ids, and geometry becomes constants. With pixels or
            audio no rows are added, since their assignment to rows is unknown.
        traced_geometry: names of extras that are no constants, though they are named like geometry.
        more: tokens of padding that there must be at least.

    Raises:
        InvalidInputError: the prompts or the mask are invalid.
    """
    ids = as_ids("input_ids", input_ids, vocab_size)
    if attention_mask is None and pad_token_id is not None and pad_token_id not in eos_token_ids:
        attention_mask = ids != pad_token_id
    rows, length = ids.shape
    padded_rows, bucket = buckets.prompt(rows, length + more, None if context is None else max(context - 1, length))
    extras = dict(extras or {})
    static = {n: v for n, v in keep_on_host(extras, traced_geometry).items() if isinstance(v, HostArray)}
    by_token = {n for n, v in extras.items() if n not in static and _is_by_token(n, v, ids.shape)}
    moves = not is_exact and by_token == set(extras)
    mask = np.ones_like(ids) if attention_mask is None else _as_mask(attention_mask, ids.shape, moves=moves)
    if not mask[:, -1].all():
        _say_that_padding_moves()
        ends = np.argmax(mask[:, ::-1] != 0, axis=1)
        ids, mask = _moved_right(ids, ends, 0), _moved_right(mask, ends, 0)
        extras = {n: _moved_right(v, ends, v.ndim - 2 if n == "position_ids" else 0) for n, v in extras.items()}
    contents = {n: v for n, v in extras.items() if n not in static and n not in by_token}
    bucket = length if is_exact else bucket
    padded_rows = rows if contents else padded_rows
    fill = 0 if pad_token_id is None else pad_token_id
    full_ids = np.full((padded_rows, bucket), fill, np.int32)
    full_mask = np.zeros((padded_rows, bucket), np.int32)
    full_ids[:rows, bucket - length :] = ids
    full_mask[:rows, bucket - length :] = mask
    full_mask[rows:, -1] = 1
    inputs = {"input_ids": full_ids, "attention_mask": full_mask, **contents}
    for name in by_token:
        widths = [(0, 0)] * extras[name].ndim
        rows_axis = extras[name].ndim - 2 if name == "position_ids" else 0
        widths[rows_axis], widths[rows_axis + 1] = (0, padded_rows - rows), (bucket - length, 0)
        inputs[name] = np.pad(extras[name], widths)
    return Prompts(
        given=ids,
        inputs=inputs,
        static=static,
        padded_length=bucket,
        longest=int(mask.sum(axis=1).max()),
        num_padded_rows=padded_rows,
    )


def ids_of_embeds(embeds: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    """The ids of prompts given as embeddings, [batch, length]; -1 without any, which processors do not count as text.

    Args:
        embeds: [batch, length, hidden].
        ids: the ids that were given beside the embeddings, if any.

    Raises:
        InvalidInputError: the embeddings are not of that shape, or there is not one for each id.
    """
    if embeds.ndim != 3 or embeds.shape[1] == 0 or (ids is not None and np.atleast_2d(ids).shape != embeds.shape[:2]):
        beside = "" if ids is None else f" beside input_ids of shape {np.shape(ids)}"
        raise InvalidInputError(
            f"inputs_embeds has shape {embeds.shape}{beside}.",
            "It holds one embedding for each token of the prompts: [batch, length, hidden].",
            "Pass the output of the model's input embeddings, with the ids of the same tokens or without ids.",
        )
    return np.full(embeds.shape[:2], -1, np.int32) if ids is None else ids


def _is_by_token(name: str, array: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether an input has one value per token of prompts of `shape`."""
    if name == "position_ids":
        return array.shape[-2:] == shape
    return array.shape[:2] == shape and (array.dtype.kind in "biu" or name in ("bbox", EMBEDS))


def pad_encoder_inputs(
    inputs: Mapping[str, Any],
    decoder_input_ids: np.ndarray,
    *,
    main_input: str,
    vocab_size: int | None,
    pad_token_id: int | None,
    buckets: Buckets,
) -> Prompts:
    """Check encoder inputs; right-pad per-token inputs to their bucket, and pad other inputs (audio, pixels) in rows only.

    Args:
        inputs: encoder inputs by name; `main_input` must be among them.
        decoder_input_ids: [batch, length] int.
        main_input: name of the main encoder input.
        vocab_size: exclusive upper bound of token ids.
        pad_token_id: padding value.
        buckets: how sizes are rounded up.

    Raises:
        InvalidInputError: an input is invalid.
    """
    arrays = {name: narrow(np.asarray(value)) for name, value in inputs.items()}
    if main_input == "input_ids":
        ids = as_ids("input_ids", arrays.pop("input_ids"), vocab_size)
        mask = arrays.pop("attention_mask", None)
        mask = np.ones_like(ids) if mask is None else _as_mask(mask, ids.shape, side=None)
        _, bucket = buckets.prompt(*ids.shape)
        widths = ((0, 0), (0, bucket - ids.shape[1]))
        arrays["input_ids"] = np.pad(ids, widths, constant_values=pad_token_id or 0)
        arrays["attention_mask"] = np.pad(mask, widths)
        for name in [n for n, a in arrays.items() if not n.startswith("decoder_") and _is_by_token(n, a, ids.shape)]:
            arrays[name] = np.pad(arrays[name], (*widths, *[(0, 0)] * (arrays[name].ndim - 2)))
    rows, width = arrays[main_input].shape[:2]
    padded_rows, _ = buckets.prompt(rows, width)
    arrays["decoder_input_ids"] = decoder_input_ids.astype(np.int32)
    arrays = {
        name: np.concatenate([a, np.repeat(a[:1], padded_rows - rows, axis=0)]) if padded_rows > rows else a
        for name, a in arrays.items()
    }
    return Prompts(
        given=decoder_input_ids,
        inputs=arrays,
        padded_length=decoder_input_ids.shape[1],
        longest=decoder_input_ids.shape[1],
        num_padded_rows=padded_rows,
    )


def decoder_start(config: GenerationConfig, rows: int) -> np.ndarray:
    """The token with which the decoder of an encoder-decoder begins, [rows, 1] int32.

    Raises:
        InvalidInputError: the options do not say it.
    """
    start: Any = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if start is None:
        raise InvalidInputError(
            "generate() does not know the decoder's first token.",
            "Neither decoder_start_token_id nor bos_token_id is set in generation_config.json.",
            "Pass decoder_start_token_id=… or decoder_input_ids=….",
        )
    return np.full((rows, 1), start, np.int32)


def check_speculation(
    traits: list[ModelTraits],
    *,
    sequences: int,
    inputs: set[str],
    vocabularies: tuple[int, int] | None,
    is_both: bool,
    has_beams: bool = False,
    waits_for_host: bool = False,
    is_guided: bool = False,
) -> None:
    """Raise if a call does not support speculative decoding.

    Args:
        traits: traits of the model, and of the draft model if there is one.
        sequences: number of sequences the call generates.
        inputs: names of the inputs.
        vocabularies: vocabulary sizes of both models' logits.
        is_both: both prompt lookup and an assistant model were requested.
        has_beams: the call asks for beam search.
        waits_for_host: the host processes the scores of every token.
        is_guided: classifier-free guidance was requested.

    Raises:
        UnsupportedOptionError: the call does not support it; the message says why.
    """
    reasons = {
        "Draft tokens continue one text; beam search continues several.": has_beams,
        "It supports one sequence; the call generates several.": sequences > 1,
        "Draft tokens come from prompt lookup or an assistant model, not both.": is_both,
        "A logits processor of the call runs on the host, one token at a time.": waits_for_host,
        "Guidance reads a second text one token at a time.": is_guided,
        "The two models' vocabularies differ in size.": vocabularies is not None and len(set(vocabularies)) > 1,
        "Encoder-decoder models are not supported.": any(t.is_encoder_decoder for t in traits),
        "Recurrent layers cannot be rolled back to an earlier token.": any(t.has_recurrent_layers for t in traits),
        "The model has no KV cache that hfax can use.": any(not t.has_usable_cache for t in traits),
        "The assistant model reads only token ids.": len(traits) > 1 and not inputs <= {"input_ids", "attention_mask"},
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedOptionError(
                "Speculative decoding is not supported in this call (prompt_lookup_num_tokens or assistant_model).",
                reason,
                "Remove prompt_lookup_num_tokens and assistant_model.",
            )


def as_ids(name: str, value: Any, vocab_size: int | None) -> np.ndarray:
    """Check token ids and return them as [batch, length] int32.

    Raises:
        InvalidInputError: empty, not integers, not 1-D or 2-D, rows of unequal length, or ids outside the vocabulary.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInputError(
            f"{name} is not rectangular.", str(error), "Pad the prompts on the left and pass an attention_mask."
        ) from error
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.size == 0:
        raise InvalidInputError(
            f"{name} has shape {array.shape}; expected [batch, length] with at least one token.",
            "An empty prompt gives the model nothing to continue."
            if array.size == 0
            else "generate() takes token ids with a batch axis and a length axis.",
            "Pass at least one token, for example the tokenizer's BOS token."
            if array.size == 0
            else "Reshape the ids, or tokenize with return_tensors.",
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidInputError(
            f"{name} has dtype {array.dtype}; expected integers.", "Token ids are integers.", "Tokenize the text first."
        )
    check_vocabulary(name, array, vocab_size)
    return array.astype(np.int32)


def check_vocabulary(name: str, ids: np.ndarray, vocab_size: int | None) -> None:
    """Raise `InvalidInputError` if an id is negative or at least `vocab_size`; XLA would silently read another row."""
    if vocab_size is None or ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        row, column = np.argwhere(ids == bad)[0][:2] if ids.ndim >= 2 else (0, 0)
        raise InvalidInputError(
            f"{name} holds the id {bad} (row {row}, column {column}); the model's vocabulary has ids 0 to {vocab_size - 1}.",
            "The tokenizer does not match the model, or a token was added without resizing the embeddings.",
            "Use the tokenizer saved with this model.",
        )


def read_negative(
    ids: Any, mask: Any, *, config: GenerationConfig, prompts: Prompts, traits: ModelTraits, vocab_size: int | None
) -> dict[str, np.ndarray] | None:
    """The texts without the prompts for classifier-free guidance, as in `GenerationOptions.negative`; None without guidance.

    Args:
        ids: `negative_prompt_ids` of `generate`; None: the last token of each prompt, as in transformers.
        mask: `negative_prompt_attention_mask`.
        config: the options.
        prompts: the prompts.
        traits: the model's.
        vocab_size: exclusive upper bound of the ids.

    Raises:
        InvalidInputError: the ids are no batch of as many rows as the prompts, or there is no `guidance_scale`.
        UnsupportedOptionError: the call does not support guidance.
    """
    if config.guidance_scale in (None, 1):
        if ids is not None or mask is not None:
            raise InvalidInputError(
                "negative_prompt_ids without guidance_scale.",
                "It is the text that guidance moves away from.",
                "Pass guidance_scale above 1, or remove negative_prompt_ids.",
            )
        return None
    if traits.is_encoder_decoder or (config.num_beams or 1) > 1:
        raise UnsupportedOptionError(
            f"guidance_scale={config.guidance_scale} with an encoder-decoder or with beam search.",
            "The second text continues one sequence of a decoder.",
            "Pass guidance_scale=None.",
        )
    rows = len(prompts.given)
    found = prompts.given[:, -1:] if ids is None else as_ids("negative_prompt_ids", ids, vocab_size)
    if len(found) != rows:
        raise InvalidInputError(
            f"negative_prompt_ids has {len(found)} rows; there are {rows} prompts.",
            "Each prompt is moved away from one text.",
            "Pass as many rows, padded on the left.",
        )
    marks = np.ones_like(found) if mask is None else _as_mask(mask, found.shape)
    widths = ((0, prompts.num_padded_rows - rows), (0, 0))
    return {"input_ids": np.pad(found, widths).astype(np.int32), "attention_mask": np.pad(marks, widths, mode="edge")}


@functools.cache
def _say_that_padding_moves() -> None:
    logger.warning(
        'Prompts are padded on the right; their padding is moved to the left, also in the returned ids. Pass padding_side="left" '
        "to the tokenizer."
    )


def _moved_right(array: np.ndarray, by: np.ndarray, rows_axis: int) -> np.ndarray:
    """Each row of an array, [batch, length, …] from `rows_axis` on, with its last `by` tokens at its beginning."""
    rows = np.moveaxis(array, rows_axis, 0)
    moved = [np.roll(row, count, axis=rows_axis) for row, count in zip(rows, by, strict=True)]
    return np.moveaxis(np.stack(moved), 0, rows_axis)


def _as_mask(value: Any, shape: tuple[int, ...], side: str | None = "left", moves: bool = False) -> np.ndarray:
    mask = np.asarray(value)
    mask = (mask[None] if mask.ndim == 1 else mask) != 0
    if mask.shape != shape:
        raise InvalidInputError(
            f"attention_mask has shape {mask.shape}; input_ids has {shape}.",
            "The mask marks each token as real or padding.",
            "Pass the attention_mask that the tokenizer returned with the ids; generate() does not support 4-D masks.",
        )
    empty = np.flatnonzero(~mask.any(axis=1))
    if empty.size:
        raise InvalidInputError(
            f"Prompt {empty[0]} is empty: its attention_mask is all 0.",
            "An empty prompt gives the model nothing to continue.",
            "Pass at least one token, for example the tokenizer's BOS token.",
        )
    if side == "left" and not moves and not mask[:, -1].all():
        row = int(np.flatnonzero(~mask[:, -1])[0])
        raise InvalidInputError(
            f"Prompt {row} is padded on the right: its attention_mask ends in 0.",
            "New tokens would follow the padding, which cannot be moved for a model that counts it or that reads images too.",
            'Tokenize with padding_side="left".',
        )
    return mask.astype(np.int32)


_NOT_TAKEN = {
    "decoder_inputs_embeds": "Decoder prompts are token ids, which are embedded inside the program.",
    "encoder_outputs": "The encoder runs in the same program as the prompt.",
    "encoder_hidden_states": "Only the prompt would attend to it, not the generated tokens.",
    "input_shape_ids": "Only prompt tokens would have one, not generated tokens.",
    "input_pronunciation_ids": "Only prompt tokens would have one, not generated tokens.",
    "cache_params": "hfax allocates its own cache and fills it from the prompt.",
}
"""Forward inputs that transformers' `generate` accepts, and why hfax's does not."""


def reject_not_taken(inputs: Mapping[str, Any]) -> None:
    """Raise for inputs that would not reach every step that reads them.

    Raises:
        UnsupportedOptionError: names the first such input.
    """
    for name, why in _NOT_TAKEN.items():
        if inputs.get(name) is not None:
            raise UnsupportedOptionError(
                f"generate() does not support {name}.", why, "Remove it, or generate with plain transformers."
            )
    mask = inputs.get("decoder_attention_mask")
    if mask is not None and not np.asarray(mask).all():
        raise UnsupportedOptionError(
            "decoder_attention_mask marks padding (0).",
            "Decoder prompts are read without padding; decoding steps would treat padding as text.",
            "Pass decoder_input_ids of equal length, or one row at a time.",
        )


def reject_padding(attention_mask: Any, kind: str) -> None:
    """Raise for padded prompts of a model whose forward takes no mask.

    Args:
        attention_mask: [batch, length], 0 at padding.
        kind: the model's class.

    Raises:
        UnsupportedOptionError: there is padding.
    """
    if not np.asarray(attention_mask).all():
        raise UnsupportedOptionError(
            f"{kind} takes no attention_mask, and prompts are padded.",
            "It would read padding as text.",
            "Generate from prompts of one length together, or from each alone.",
        )


def reject_unknown(unknown: Mapping[str, Any], known: set[str]) -> None:
    """Raise for keyword arguments that are neither generation options nor model inputs.

    Raises:
        UnsupportedOptionError: names them, with the nearest known name.
    """
    from transformers import GenerationConfig

    named = [name for name in unknown if name not in known or has_word("generate", name)]
    reject_arguments("generate", named, known | set(vars(GenerationConfig())))


def as_ids_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids of an option given as one id, a list or None."""
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
