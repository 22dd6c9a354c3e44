"""The cache of one `generate` call, kept for the next: a conversation whose turns read only what is new.

Turns the last state of a loop and a longer text into a state in which the new tokens are read, too. `KeptCache` is opaque: hfax's
padded arrays, not transformers' cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.decoding import LoopSpec, State, begin
from hfax.generation.generation_request import Prompts
from hfax.kernels import paged
from hfax.kv_cache.axes import is_paged
from hfax.programs.buckets import prompt_bucket
from hfax.sharding.layout import to_host

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel

_HELD = ("cache", "tokens", "mask", "positions", "repeated")
_BESIDE = frozenset({"input_ids", "attention_mask"})


@dataclasses.dataclass(frozen=True, eq=False)
class KeptCache:
    """What `generate(..., return_dict_in_generate=True)` returns as `cache`, to be passed to the next call as `past_key_values`.

    It stays valid: several texts can be continued from one.

    Attributes:
        num_tokens: tokens in the cache for each sequence, padding of the prompts included.
        batch_size: sequences.
        capacity: tokens that fit; a later call makes it larger where needed.
    """

    num_tokens: int
    batch_size: int
    capacity: int
    model_key: str = dataclasses.field(repr=False)
    state: Mapping[str, Any] = dataclasses.field(repr=False)
    padding: int = dataclasses.field(repr=False)
    ids: np.ndarray = dataclasses.field(repr=False)
    attended: np.ndarray = dataclasses.field(repr=False)

    @property
    def rolls_back(self) -> bool:
        """Whether tokens at its end can be replaced: every layer keeps the keys and values of every token."""
        return can_roll_back(self.state["cache"], self.capacity)

    def can_continue(self, ids: Any) -> bool:
        """Whether the cache spares at least half of reading a text, [batch, length] ids without padding."""
        ids = np.asarray(ids)
        if len(ids) != self.batch_size:
            return False
        width = min(self.num_tokens, ids.shape[1] - 1)
        same = (self.ids[:, :width] == ids[:, :width]).all(axis=0)
        shared = width if same.all() else int(np.argmin(same))
        return 2 * shared >= ids.shape[1] and (self.rolls_back or shared == self.num_tokens)


def can_roll_back(cache: Mapping[str, Any], capacity: int) -> bool:
    """Whether every array of a cache has a place for every token: of axis -2, or in pages."""
    return all(
        paged.holds_all(array, capacity) if is_paged(name) else array.ndim == 4 and array.shape[-2] == capacity
        for name, array in cache.items()
    )


def keep(state: State, ids: np.ndarray, *, padding: int, model_key: str) -> KeptCache | None:
    """The cache after a call; None if it holds tokens past the end of the texts that cannot be taken back.

    Args:
        state: the last state of its loop.
        ids: [sequences, length], prompts as passed and new tokens; the last token is not in the cache.
        padding: columns before the prompts as passed.
        model_key: of the model.
    """
    capacity, num_tokens = state["tokens"].shape[1], ids.shape[1] - 1
    past = int(to_host(state["length"])) - padding - num_tokens
    if past and not can_roll_back(state["cache"], capacity):
        return None
    held = {name: state[name] for name in _HELD}
    return KeptCache(
        num_tokens=num_tokens,
        batch_size=len(ids),
        capacity=capacity,
        model_key=model_key,
        state=held | {"positions": state["positions"] - past},
        padding=padding,
        ids=ids[:, :num_tokens],
        attended=to_host(state["mask"])[: len(ids), padding : padding + num_tokens],
    )


def shared_length(kept: KeptCache, ids: np.ndarray, mask: np.ndarray, inputs: Mapping[str, Any], key: str) -> int:
    """Tokens of a longer text that a cache holds, at most all but one.

    Args:
        kept: the cache.
        ids: [batch, length], the text.
        mask: [batch, length], 0 at padding.
        inputs: the call's inputs by name.
        key: of the model that reads it.

    Raises:
        InvalidInputError: the cache is another model's, or that of another text.
        UnsupportedOptionError: there are inputs besides ids, or tokens of the cache would have to be replaced in layers that keep
            only the last ones.
    """
    if further := sorted(set(inputs) - _BESIDE):
        raise UnsupportedOptionError(
            f"past_key_values beside {', '.join(further)}.",
            "New tokens are read from their ids; images and audio of the first call are in the cache.",
            "Leave it out, or call without past_key_values.",
        )
    if kept.model_key != key or kept.batch_size != len(ids):
        raise InvalidInputError(
            f"past_key_values holds {kept.batch_size} sequences; input_ids has {len(ids)}, maybe of another model.",
            "A cache belongs to one model, and each of its sequences is continued.",
            "Pass the cache and the longer ids of one conversation.",
        )
    width = min(kept.num_tokens, ids.shape[1] - 1)
    differs = (kept.ids[:, :width] != ids[:, :width]) | (kept.attended[:, :width] != mask[:, :width])
    differs[(mask[:, :width] == 0) & (kept.attended[:, :width] == 0)] = False
    shared = int(np.argmax(differs.any(axis=0))) if differs.any() else width
    if shared == 0 or not mask[:, shared:].all():
        raise InvalidInputError(
            "input_ids does not continue the text in past_key_values, or its attention_mask has padding after it.",
            "The ids must begin with those of the earlier call, padded like them, and end with new ones.",
            "Pass the returned sequences with the new tokens after them, and their attention_mask; or no past_key_values.",
        )
    if shared < kept.num_tokens and not kept.rolls_back:
        raise UnsupportedOptionError(
            f"input_ids differs from past_key_values after {shared} of {kept.num_tokens} tokens.",
            "The model keeps a window or a state of its text, which cannot be taken back.",
            "Continue the returned sequences unchanged, or call without past_key_values.",
        )
    return shared


def resumed(kept: KeptCache, prompts: Prompts, inputs: Mapping[str, Any], key: str) -> Prompts:
    """Prompts of which a cache holds the beginning.

    Args:
        kept: the cache.
        prompts: the whole texts.
        inputs: the call's inputs by name.
        key: of the model that reads them.

    Raises:
        InvalidInputError: see `shared_length`.
        UnsupportedOptionError: see `shared_length`.
    """
    width, rows = prompts.given.shape[1], kept.state["tokens"].shape[0]
    mask = prompts.inputs["attention_mask"][: len(prompts.given), -width:]
    shared = shared_length(kept, prompts.given, mask, inputs, key)
    count = width - shared
    new = np.zeros((rows, prompt_bucket(count)), np.int32)
    new[: len(prompts.given), :count] = prompts.given[:, shared:]
    numbers = {"count": count, "length": kept.padding + shared, "back": kept.num_tokens - shared}
    return dataclasses.replace(
        prompts,
        inputs={"new": new, **{name: np.int32(number) for name, number in numbers.items()}},
        padded_length=kept.padding + width,
        num_padded_rows=rows,
        kept=kept,
    )


def resume(
    model: TracedModel,
    spec: LoopSpec,
    params: Mapping[str, jax.Array],
    held: Mapping[str, Any],
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    request: Mapping[str, Any],
) -> State:
    """Read the new tokens of kept texts, and sample the next of each: `decoding.start` with a cache that is not empty.

    Args:
        model: the traced module.
        spec: what the program is specialized for.
        params: the weights.
        held: `KeptCache.state`.
        inputs: `new` [batch, bucket] int32, the new tokens, and after them anything; `count` (), how many; `length` (), tokens in
            the cache, padding included; `back` (), how many tokens are replaced.
        static: forward arguments that are not traced.
        request: as for `decoding.start`.
    """
    new, count, length = inputs["new"], inputs["count"], inputs["length"]
    old = held["tokens"].shape[1]
    room = ((0, 0), (0, spec.capacity - old))
    tokens = jax.lax.dynamic_update_slice_in_dim(jnp.pad(held["tokens"], room), new, length, axis=1)
    mask = jnp.pad(held["mask"], room, constant_values=1)
    state: State = {
        "tokens": tokens,
        "mask": mask,
        "positions": held["positions"] - inputs["back"],
        "cache": _grown(held["cache"], old, spec.capacity),
        "repeated": held["repeated"],
    }
    options = {"attention_mask": mask, "capacity": spec.capacity, "static": static, "repeated": state["repeated"]}

    def read(cache: Any, some: jax.Array, done: Any) -> tuple[jax.Array, Any]:
        return model.decode_step(
            params, cache, some, length=length + done, positions=state["positions"] + done, **options
        )

    if can_roll_back(held["cache"], old):
        logits, cache = read(state["cache"], new, 0)
        logits = jax.lax.dynamic_index_in_dim(logits, count - 1, axis=1, keepdims=False)
    else:  # windows and states take one token at a time
        logits, cache = read(state["cache"], new[:, :1], 0)
        logits, cache = jax.lax.fori_loop(
            1,
            count,
            lambda done, carry: _last(read(carry[1], jax.lax.dynamic_slice_in_dim(new, done, 1, axis=1), done)),
            (logits[:, -1], cache),
        )
    end = length + count
    state |= {"cache": cache, "positions": state["positions"] + count, "finished": request["unused"]}
    is_text = (jnp.arange(spec.capacity) < end)[None] & (mask != 0)
    return begin(spec, state, logits, tokens, is_text, end, request)


def _last(read: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    return read[0][:, -1], read[1]


def _grown(cache: Mapping[str, jax.Array], old: int, new: int) -> dict[str, jax.Array]:
    """The arrays with places for `new` tokens: those with a place for each of `old`."""

    def grow(name: str, array: jax.Array) -> jax.Array:
        if is_paged(name):
            return paged.grown(array, old, new)
        if array.ndim != 4 or array.shape[-2] != old:
            return array
        return jnp.pad(array, ((0, 0), (0, 0), (0, new - old), (0, 0)))

    return {name: grow(name, array) for name, array in cache.items()}
