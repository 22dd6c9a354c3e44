"""Calls of `generate` that stored programs answer, from token ids to token ids. Imports neither torch nor transformers."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.flax import load

from hfax.generation.generate import GenerationLoop, open_loop, run_loop
from hfax.generation.generation_request import (
    GenerationOptions,
    Prompts,
)
from hfax.generation.host_loop import Generated, Streamer
from hfax.generation.kept_cache import KeptCache
from hfax.programs.buckets import Buckets
from hfax.programs.checks import raise_failed
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import ProgramCache, compiling_ahead
from hfax.sharding.layout import Layout
from hfax.stored.call import read_call, read_inputs
from hfax.stored.reader import WeightReader
from hfax.stored.start import ModelStart
from hfax.stored.weights import read_weights
from hfax.tracing.structure import Leaf, Node, Structure, unflatten
from hfax.tracing.traits import ModelTraits

if TYPE_CHECKING:
    from hfax.backends.jax.size_classes import SizeClasses

logger = logging.getLogger(__name__)


class _NotStoredError(LookupError):
    """A program is not stored."""


def _reject(name: str) -> None:
    raise _NotStoredError(name)


class RecordedModel:
    """A `TracedModel` of which a record knows what is asked outside of traces.

    Args:
        start: the record.
        whole: gives the model's own, once something is to be traced.
    """

    def __init__(self, start: ModelStart, whole: Callable[[], Any]) -> None:
        self.traits: ModelTraits = start.traits
        self.key = start.key
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole(), name)


class StoredRuns:
    """The stored programs of a model on one device, and its weights.

    Args:
        start: the model's record.
        params: its weights by name.
        layout: where they are.
        programs: folder of programs compiled ahead, beside those of the cache.
        buckets: how sizes are rounded up.
    """

    def __init__(
        self,
        start: ModelStart,
        params: dict[str, jax.Array],
        layout: Layout,
        *,
        programs: Path | None = None,
        buckets: Buckets,
    ) -> None:
        self.start, self.params, self.layout, self.programs, self.buckets = start, params, layout, programs, buckets
        self._buffers = layout.put(load(start.buffers))
        self._programs = ProgramCache(start.model_key, layout, bundled=programs, before_tracing=_reject)

    @classmethod
    def open(
        cls, start: ModelStart, reader: WeightReader, device: jax.Device, *, programs: Path | None, buckets: Buckets
    ) -> StoredRuns:
        """The runs of a record, with the weights of a checkpoint.

        Raises:
            CheckpointCorruptError: a weight cannot be read.
            OutOfMemoryError: the weights do not fit the device.
        """
        layout = Layout.on(device)
        weights: Any = read_weights(start.weights, start.num_bytes, reader, layout)
        return cls(start, weights, layout, programs=programs, buckets=buckets)

    def run(
        self, inputs: Any, streamer: Streamer | None, options: Mapping[str, Any]
    ) -> tuple[np.ndarray, KeptCache | None] | None:
        """Run a call of `generate`.

        Args:
            inputs: as in `generate`.
            streamer: as in `generate`.
            options: as in `generate`.

        Returns:
            The ids, [batch, length] int32, and the cache of the next call, if there is one. None if stored programs do not answer
            the call: the streamer was not called.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
        """
        if (opened := self.open_call(inputs, options)) is None:
            return None
        loop, arrays, prompts, resolved = opened
        generated = run_loop(loop, arrays, prompts, resolved, streamer=streamer, tokenizer=options.get("tokenizer"))
        kept = None if self.start.traits.is_encoder_decoder else loop.keep(generated, prompts)
        return _sequences(prompts, resolved, generated), kept

    def open_call(
        self, inputs: Any, options: Mapping[str, Any]
    ) -> tuple[GenerationLoop, dict[str, jax.Array], Prompts, GenerationOptions] | None:
        """The loop of a call before its first step, the inputs of its `start`, its prompts and options; None as from `run`.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
        """
        if (call := read_call(self.start, inputs, options, self.buckets)) is None or not self._are_stored(*call):
            return None
        return *self._open(*call), *call

    def has_programs(self, inputs: Any, options: Mapping[str, Any]) -> bool:
        """Whether `run` would answer the call."""
        call = read_call(self.start, inputs, options, self.buckets)
        return call is not None and self._are_stored(*call)

    def output(self, name: str, inputs: Mapping[str, Any]) -> jax.Array | None:
        """An output of a forward call, by its name; None if stored programs do not compute the call.

        Raises:
            InvalidInputError: ids are outside the vocabulary.
        """
        from hfax.backends.jax.forward import (  # not needed by `run`, whose start it would delay
            exact_outputs,
            padded_outputs,
        )

        if (prepared := read_inputs(self.start, inputs)) is None or self._classes is None:
            return None
        for call in self._classes.calls(prepared):
            with contextlib.suppress(_NotStoredError):
                return _picked(name, *padded_outputs(self._programs, self.layout, self._arrays, call, _untraced))
        with contextlib.suppress(_NotStoredError):
            return _picked(name, *exact_outputs(self._programs, self.layout, self._arrays, prepared, _untraced))
        return None

    @functools.cached_property
    def _classes(self) -> SizeClasses | None:
        from hfax.backends.jax.size_classes import SizeClasses

        return None if self.start.forward is None else SizeClasses(**self.start.forward.padding)

    def _are_stored(self, prompts: Prompts, resolved: GenerationOptions) -> bool:
        """Find the programs of a call, as if they were compiled ahead of it."""
        loop, arrays = self._open(prompts, resolved)
        try:
            with compiling_ahead():
                state = loop.start(arrays)
                if resolved.max_new_tokens > 1:
                    loop.advance(state, 2)
        except _NotStoredError as error:
            logger.info("%s is not stored", error)
            return False
        return True

    def parts(self, whole: Callable[[], Any]) -> ModelParts:
        """The components from which programs are built, for code that builds further ones.

        Args:
            whole: gives the model's `TracedModel`; called before a program that is not stored is traced.
        """
        traced: Any = RecordedModel(self.start, whole)
        return ModelParts(
            traced=traced,
            programs=ProgramCache(
                self.start.model_key, self.layout, bundled=self.programs, before_tracing=lambda name: whole()
            ),
            layout=self.layout,
            weights=self._arrays,
            tied=self.start.tied,
            num_logits=lambda: self.start.num_logits,
            context=self.start.context,
        )

    @property
    def _arrays(self) -> dict[str, jax.Array]:
        return {**self._buffers, **self.params}

    def _open(self, prompts: Prompts, resolved: GenerationOptions) -> tuple[GenerationLoop, dict[str, jax.Array]]:
        traced: Any = RecordedModel(self.start, lambda: None)
        return open_loop(
            traced,
            self._programs,
            self._arrays,
            self.layout,
            prompts,
            resolved,
            static={},
            vocab_size=self.start.num_logits,
            buckets=self.buckets,
        )


def _untraced(*_: Any) -> Any:
    raise _NotStoredError("a forward pass whose operations run one by one")


def _picked(name: str, outputs: list[Any], note: Structure) -> jax.Array | None:
    """The output of this name, after the program's checks; None if there is none, or it is not an array."""
    assert isinstance(note, Node)
    result, checks = note.children
    raise_failed(unflatten(checks, outputs))
    found = result.child(name) if isinstance(result, Node) and name in (result.keys or ()) else None
    return outputs[found.index] if isinstance(found, Leaf) else None


def _sequences(prompts: Prompts, resolved: GenerationOptions, generated: Generated) -> np.ndarray:
    given = np.repeat(prompts.given, resolved.config.num_return_sequences or 1, axis=0)
    return np.concatenate([given, generated.new_tokens], axis=1).astype(np.int32)
