"""Steps of models with state that does not fit pages: each sequence has a slot with its own state.

Supports state-space and linear-attention models, encoder-decoders, models with image input, and any other that `generate` can run.
Prefill processes a whole prompt, as in `generate`, and stores its state in the slot. A step maps the single-sequence decoding step
over all slots (`jax.vmap`), so the state can have any structure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.engine.runner import Logits
from hfax.engine.scheduler import Limits, Part
from hfax.errors import InvalidInputError
from hfax.generation.decoding import read_prompts
from hfax.generation.generation_request import Prompts
from hfax.kernels import target
from hfax.programs.buckets import Buckets, prompt_bucket
from hfax.programs.checks import raise_failed, raise_unread
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import Program
from hfax.sharding.layout import describe

if TYPE_CHECKING:
    from hfax.backends.base_model import BaseModel

_SMALLEST = 16


class SlotRunner:
    """Runs steps over slots.

    Args:
        model: the model, for prefill.
        parts: the model's parts.
        limits: limits of a step.
        cache_dtype: of the keys and values in a slot; None: the model's.
    """

    def __init__(
        self, model: BaseModel, parts: ModelParts, limits: Limits, cache_dtype: jnp.dtype | None = None
    ) -> None:
        self._model = model
        self._cache_dtype = cache_dtype
        self._parts = parts
        self._limits = limits
        self._is_encoder_decoder = parts.traced.traits.is_encoder_decoder
        self._lengths = self._prompt_lengths()
        self._states: dict[str, Any] | None = None
        self._state_shapes: Any = None
        self._made: dict[Any, Any] = {}

    max_step_tokens = None

    @property
    def _buckets(self) -> Buckets:
        return self._buckets_of(*self._lengths)

    def _buckets_of(self, *lengths: int) -> Buckets:
        most_padding = self._capacity - self._limits.max_model_len
        return Buckets(made=tuple((1, length, self._capacity) for length in lengths), most_padding=most_padding)

    @property
    def _capacity(self) -> int:
        """Capacity of a slot's cache, in tokens: padding can double a prompt's length."""
        longest = self._limits.max_model_len
        return longest if self._is_encoder_decoder else longest + longest // 2 + 1

    def _prompt_lengths(self) -> list[int]:
        """Lengths that prompts are padded to."""
        longest = self._limits.max_model_len
        if self._is_encoder_decoder:  # the encoder output's keys must have the same length in all slots
            return [longest]
        sizes, size = [], _SMALLEST
        while size < longest:
            sizes.append(size)
            size *= 2
        return [*sizes, longest]

    def forward(self, parts: list[Part], newest: jax.Array) -> list[Logits]:
        """Implements `Runner`: decodes all running sequences first, then prefills each prompt."""
        found: list[Logits] = []
        writing = [part for part in parts if part.start]
        if writing:
            owners: list[tuple[Part, int] | None] = [None] * self._limits.max_num_seqs
            for part in writing:
                assert part.sequence.slot is not None
                owners[part.sequence.slot] = part, part.start
            found.append(Logits(array=self._decode(newest), owners=tuple(owners)))
        for part in parts:
            if part.start:
                continue
            sequence = part.sequence
            assert sequence.slot is not None
            ids = np.asarray([sequence.prompt], np.int32)
            try:
                prompts = self._model.read_prompt(ids, sequence.inputs, self._buckets)
                logits = self._read_prompt(prompts, sequence.slot)
            except InvalidInputError as error:
                found.append(Logits(array=newest, owners=((part, -1),), failure=error))
                continue
            found.append(Logits(array=logits, owners=((part, part.start + part.count - 1),)))
        return found

    def _read_prompt(self, prompts: Prompts, slot: int) -> jax.Array:
        """Prefill a prompt and store its state in the slot; returns logits, [1, vocab]."""
        put = self._parts.layout.put
        inputs = put(prompts.inputs)
        if self._states is None:
            self._states = self._make_states()
        program = self._read_program(prompts, (dict(self._parts.weights), inputs, put(np.int32(slot)), self._states))
        raise_unread(program.unread, inputs, self._parts.traced.traits)
        logits, self._states, checks = program.run(dict(self._parts.weights), inputs, put(np.int32(slot)), self._states)
        raise_failed(checks)
        return logits

    def _read_program(self, prompts: Prompts, args: tuple[Any, ...]) -> Program:
        inputs, static = args[1], prompts.static

        def run(params: Any, inputs: Any, slot: jax.Array, states: Any) -> Any:
            logits, state, checks = self._begin(params, inputs, static)

            def insert(old: jax.Array, new: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), slot, axis=0)

            return (logits, jax.tree.map(insert, states, state), checks), None

        shapes = tuple((name, array.shape) for name, array in sorted(inputs.items()))
        key = repr((shapes, static))
        if (program := self._made.get(key)) is None:
            name = f"read[{prompts.padded_shape[1]}]"
            program = self._made[key] = self._parts.programs.get(
                name, ("engine slots", self._capacity, static), run, args, donate=(3,), inputs_at=1
            )
        return program

    def _begin(self, params: Any, inputs: Any, static: Any) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        checks: dict[str, jax.Array] = {}
        with target.without_pages():  # kernels do not support vmap
            logits, state = read_prompts(
                self._parts.traced, params, inputs, static, self._capacity, checks, cache_dtype=self._cache_dtype
            )
        main = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        return logits, state | {"length": jnp.int32(main.shape[1])}, checks

    def _make_states(self) -> Any:
        """Zero-filled slots; a slot is only read after a prefill. A program, so that a stored one spares the model's code.

        Prompts of all lengths have states of the same shapes: those of the shortest are the quickest to find.
        """
        slots, layout, length = self._limits.max_num_seqs, self._parts.layout, self._prompt_lengths()[0]
        example = self._example(length, self._buckets_of(length))

        def make(params: Any, inputs: Any) -> Any:
            _, state, _ = jax.eval_shape(
                lambda params, inputs: self._begin(params, inputs, example.static), params, inputs
            )
            states = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), state)
            return states if layout.mesh is None else jax.lax.with_sharding_constraint(states, layout.replicated), None

        args = (dict(self._parts.weights), layout.put(example.inputs))
        key = ("engine slots", self._capacity, self._cache_dtype, slots, example.static)
        program = self._parts.programs.get("slots", key, make, args)
        self._state_shapes = program.results
        return program.run(*args)

    def _decode(self, newest: jax.Array) -> jax.Array:
        """Decode the newest token of every slot; returns logits, [slots, vocab]."""
        traced, capacity = self._parts.traced, self._capacity

        def one(params: Any, state: Any, token: jax.Array) -> Any:
            logits, cache = traced.decode_step(
                params,
                state["cache"],
                token[None, None],
                length=state["length"],
                positions=state["positions"],
                attention_mask=state["mask"],
                capacity=capacity,
                static={},
                repeated=state["repeated"],
            )
            more = {"cache": cache, "length": state["length"] + 1, "positions": state["positions"] + 1}
            return logits[0, -1], state | more

        def run(params: Any, states: Any, newest: jax.Array) -> Any:
            with target.plainly():  # kernels do not support vmap
                return jax.vmap(one, in_axes=(None, 0, 0))(params, states, newest), None

        args = (dict(self._parts.weights), self._states, newest)
        if "decode" not in self._made:
            name = f"slots[{self._limits.max_num_seqs}]"
            key = ("engine slots", capacity)
            self._made["decode"] = self._parts.programs.get(name, key, run, args, donate=(1,), is_step=True)
        logits, self._states = self._made["decode"].run(*args)
        return logits

    def reset(self) -> None:
        """Implements `Runner`."""
        self._states = None

    def update_weights(self, weights: Mapping[str, jax.Array]) -> None:
        """Implements `Runner`."""
        self._parts = dataclasses.replace(self._parts, weights=weights)

    def use_fewest(self) -> None:
        """Implements `Runner`: the longest prompt, and the decoding step."""
        self._lengths = self._lengths[-1:]

    def unused(self) -> list[int]:
        """Implements `Runner`: short prompts come first."""
        if self._parts.traced.traits.counts_padding:
            return []
        return [length for length in self._prompt_lengths() if length not in self._lengths]

    def compile(self, size: int) -> Any:
        """Implements `Runner`."""
        put, where = self._parts.layout.put, self._parts.layout.replicated
        prompts = self._example(size, self._buckets_of(size))
        states = jax.tree.map(lambda array: describe(array, where), self._state_shapes)
        args = (dict(self._parts.weights), put(prompts.inputs), put(np.int32(0)), states)
        program = self._read_program(prompts, args)
        return program.results[0]

    def use(self, size: int) -> None:
        """Implements `Runner`."""
        self._lengths = sorted([*self._lengths, size])

    def _example(self, length: int, buckets: Buckets) -> Prompts:
        ids = self._model.example_prompt(1, 1)
        return self._model.read_prompt(np.repeat(ids, min(length, prompt_bucket(length)), axis=1), {}, buckets)

    def warm_up(self, newest: jax.Array) -> list[jax.Array]:
        """Implements `Runner`. Image inputs compile separately."""
        logits = []
        for length in self._lengths:
            if self._parts.traced.traits.counts_padding:
                break  # each prompt length compiles its own program
            logits = [self._read_prompt(self._example(length, self._buckets), 0)]
        if self._states is not None:
            logits.append(self._decode(newest))
        return logits
