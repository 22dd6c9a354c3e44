"""A model that generates from stored programs without its modelling code, and becomes the full model where it needs more."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfax.errors import HfaxError
from hfax.generation.generate import GenerationLoop, open_loop
from hfax.generation.generation_request import (
    GenerationOptions,
    Prompts,
    as_ids_tuple,
    pad_decoder_prompts,
    resolve_max_new_tokens,
)
from hfax.generation.host_loop import Generated, Streamer, make_stop_check, run_generation
from hfax.generation.kept_cache import KeptCache, resumed
from hfax.launch.cluster import default_device
from hfax.load.host_arrays import narrow
from hfax.load.placement import check_fits
from hfax.load.safetensors_file import SafetensorsFile
from hfax.programs.buckets import Buckets
from hfax.programs.program_cache import ProgramCache, ProgramNotStoredError, compiling_ahead
from hfax.sharding.layout import Layout
from hfax.stored.recording import is_recordable
from hfax.stored.start import ModelStart, read_start, start_file
from hfax.tracing.structure import is_array
from hfax.tracing.traits import ModelTraits

if TYPE_CHECKING:
    from hfax.backends.protocol import LoadOptions
    from hfax.load.source import CheckpointSource

logger = logging.getLogger(__name__)

_READERS = 2
_CHECKED = {
    "do_sample": lambda v: isinstance(v, bool),
    "temperature": lambda v: _is_number(v) and v > 0,
    "top_k": lambda v: _is_whole(v) and v > 0,
    "top_p": lambda v: _is_number(v) and 0 < v <= 1,
    "min_p": lambda v: _is_number(v) and 0 <= v <= 1,
    "max_new_tokens": lambda v: _is_whole(v) and v > 0,
    "stop_strings": lambda v: isinstance(v, list) and all(isinstance(s, str) and s for s in v),
}
"""Options of `generate` that programs take as values, with the values that transformers does not check further."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recorded:
    """What the generation loop asks of a `TracedModel` outside of traces."""

    traits: ModelTraits
    key: str


def open_stored(source: CheckpointSource, options: LoadOptions) -> Any:
    """The model of a checkpoint from its record, with its weights on the device; None if it cannot start from one.

    Returns a `StoredModel`, which has every attribute of the `JaxModel` that it stands for.

    Args:
        source: the checkpoint.
        options: how to load it.
    """
    if not is_recordable(source, options):
        return None
    device = default_device()
    if jax.process_count() > 1 or (start := read_start(start_file(source, options, device))) is None:
        return None
    try:
        return StoredModel(start, source, options, device)
    except HfaxError as error:  # the full model reports it, or finds room on several devices
        logger.info("not started from the record: %s", error.what)
        return None


class StoredModel:
    """A model whose `generate` runs stored programs. Everything else turns it into the `JaxModel` of its class, in place.

    It never gives other results than that model: calls with options that need more than a stored program are left to it.

    Args:
        start: the model's record.
        source: the checkpoint.
        options: how to load it.
        device: of weights and programs.

    Attributes:
        params: weights by checkpoint name, tied weights once.
        name_or_path: source of the weights.
        folder: local folder of the checkpoint.
        task: None.

    Raises:
        CheckpointCorruptError: a weight cannot be read.
        OutOfMemoryError: the weights do not fit the device.
    """

    backend = "jax"

    def __init__(self, start: ModelStart, source: CheckpointSource, options: LoadOptions, device: jax.Device) -> None:
        from safetensors.flax import load

        layout = Layout.on(device)
        self._set(
            params=_read_weights(start, source.weight_files, layout),
            name_or_path=str(source.name),
            folder=source.folder,
            task=None,
            _buffers=load(start.buffers),
            _start=start,
            _source=source,
            _options=options,
            _layout=layout,
            _programs=ProgramCache(start.model_key, layout, is_complete=True),
            _lock=threading.RLock(),
        )

    def _set(self, **values: Any) -> None:
        self.__dict__.update(values)

    @property
    def context_length(self) -> int | None:
        """Maximum positions of the text model; None if unbounded."""
        return self._start.context

    @property
    def vocabulary_size(self) -> int | None:
        """Rows of the embedding table; None if there is no single table."""
        return self._start.vocab_size

    @property
    def main_input_name(self) -> str:
        """The name of the first input."""
        return self._start.traits.main_input

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return self._start.traits.is_encoder_decoder

    def can_generate(self) -> bool:
        """Whether `generate` works on this class."""
        return True

    def default_option(self, name: str) -> Any:
        """The value of a generation option where a call passes none."""
        return self._start.options.get(name)

    def generate(self, inputs: Any = None, *, streamer: Streamer | None = None, **options: Any) -> Any:
        """As `JaxModel.generate`."""
        given = {name: value for name, value in options.items() if value is not None}
        if "past_key_values" not in given and (found := self._run(inputs, streamer, given)) is not None:
            return jax.device_put(found[0])
        return self._become_full().generate(inputs, streamer=streamer, **options)

    def generate_and_keep(self, inputs: Any, *, streamer: Streamer | None = None, **options: Any) -> Any:
        """As `JaxModel.generate_and_keep`."""
        given = {name: value for name, value in options.items() if value is not None}
        if (found := self._run(inputs, streamer, given)) is not None:
            return found
        return self._become_full().generate_and_keep(inputs, streamer=streamer, **options)

    def _run(
        self, inputs: Any, streamer: Streamer | None, options: Mapping[str, Any]
    ) -> tuple[np.ndarray, KeptCache | None] | None:
        """The ids of a call, [batch, length] int32, and its cache; None if it needs the full model. Nothing was passed on then."""
        further = {"attention_mask", "seed", "tokenizer", "past_key_values"}
        if inputs is None or any(not _is_plain(v) for v in (inputs, options.get("attention_mask"))):
            return None
        if any(not (name in further or _CHECKED.get(name, lambda v: False)(v)) for name, v in options.items()):
            return None
        if options.get("do_sample", self.default_option("do_sample")) and "seed" not in options:
            return None  # drawn from torch's generator
        prompts, resolved = self._request(inputs, options)
        loop, arrays = self._open(prompts, resolved)
        try:
            with compiling_ahead():
                state = loop.start(arrays)
                if resolved.max_new_tokens > 1:
                    loop.advance(state, 2)
        except ProgramNotStoredError as error:
            logger.info("%s is not stored", error)
            return None
        loop, arrays = self._open(prompts, resolved)
        check = make_stop_check(resolved.config.stop_strings, options.get("tokenizer"))
        generated = run_generation(loop, arrays, prompts, resolved, streamer=streamer, stop_check=check)
        return _sequences(prompts, generated), loop.keep(generated, prompts)

    def _open(self, prompts: Prompts, resolved: GenerationOptions) -> tuple[GenerationLoop, dict[str, jax.Array]]:
        traced: Any = _Recorded(traits=self._start.traits, key=self._start.key)
        return open_loop(
            traced,
            self._programs,
            {**self._buffers, **self.params},
            self._layout,
            prompts,
            resolved,
            static={},
            vocab_size=self._start.num_logits,
            buckets=Buckets(),
        )

    def _request(self, inputs: Any, options: Mapping[str, Any]) -> tuple[Prompts, GenerationOptions]:
        """The checked call, as `BaseModel` reads it."""
        start = self._start
        config: Any = SimpleNamespace(**start.options)
        for name in _CHECKED.keys() & options.keys():
            setattr(config, name, options[name])
        if "max_new_tokens" in options:
            config.max_length = None
        eos = as_ids_tuple(config.eos_token_id)
        mask = options.get("attention_mask")
        prompts = pad_decoder_prompts(
            narrow(np.asarray(inputs)),
            None if mask is None else narrow(np.asarray(mask)),
            vocab_size=start.vocab_size,
            pad_token_id=config.pad_token_id,
            eos_token_ids=eos,
            context=start.context,
            buckets=Buckets(),
            is_exact=start.traits.counts_padding,
        )
        if (kept := options.get("past_key_values")) is not None:
            prompts = resumed(kept, prompts, {} if mask is None else {"attention_mask": mask}, start.key)
        resolved = GenerationOptions(
            config=config,
            max_new_tokens=resolve_max_new_tokens(config, prompts.longest, start.context),
            seed=int(options.get("seed", 0)),
            eos_token_ids=eos,
            pad_token_id=config.pad_token_id if config.pad_token_id is not None else (eos or (0,))[0],
            keep=(),
            extra_sampling={"encoder_ids": prompts.encoder_ids},
        )
        return prompts, resolved

    def _become_full(self) -> Any:
        """Load the modelling code and turn this object into the full model, around the same weights."""
        with self._lock:
            if type(self) is StoredModel:
                from hfax.backends.jax.backend import model_around

                start = time.perf_counter()
                full = model_around(self._source, self._options, self.params, dict(self._start.tied), self._layout)
                logger.info("the model's code was loaded in %.1f s", time.perf_counter() - start)
                self.__dict__ = full.__dict__
                vars(object)["__class__"].__set__(self, type(full))
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`isinstance` asks for it: this is a `JaxModel`."""
        return object.__getattribute__(self._become_full(), "__class__")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_lock":
            raise AttributeError(name)
        return getattr(self._become_full(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":
            object.__setattr__(self, name, value)
        else:
            setattr(self._become_full(), name, value)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """As `JaxModel.__call__`."""
        return self._become_full()(*args, **inputs)

    def __repr__(self) -> str:
        return repr(self._become_full())


def _is_plain(value: Any) -> bool:
    """Whether a value is None, an array of numpy or JAX, or lists of numbers."""
    return value is None or isinstance(value, list) or (is_array(value) and isinstance(value, (np.ndarray, jax.Array)))


def _sequences(prompts: Prompts, generated: Generated) -> np.ndarray:
    return np.concatenate([prompts.given, generated.new_tokens], axis=1).astype(np.int32)


def _read_weights(start: ModelStart, files: Sequence[Path], layout: Layout) -> dict[str, jax.Array]:
    """The weights of a record, placed."""
    opened = [SafetensorsFile(path) for path in files]
    needed = sum(info.end - info.begin for file in opened for info in file.tensors.values())
    check_fits(needed, layout.device, "Loading the weights", "Use a smaller dtype (dtype='bfloat16').")

    def read(name: str) -> jax.Array:
        weight = start.weights[name]
        return layout.place(opened[weight.file].read(weight.stored), layout.weight(name))

    with concurrent.futures.ThreadPoolExecutor(_READERS, thread_name_prefix="hfax-load") as pool:
        return dict(zip(start.weights, pool.map(read, start.weights), strict=True))
