"""A model that generates from stored programs without its modelling code, and becomes the full model where it needs more."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfax.errors import BackendNotAvailableError, HfaxError
from hfax.generation.host_loop import Streamer
from hfax.launch.cluster import default_device
from hfax.programs.buckets import Buckets
from hfax.programs.bundle import read_bundle
from hfax.programs.bundle_file import PROGRAMS, START
from hfax.programs.model_parts import ModelParts
from hfax.stored.call import read_prompt
from hfax.stored.reader import WeightReader
from hfax.stored.runs import StoredRuns
from hfax.stored.start import read_start, start_file

if TYPE_CHECKING:
    from hfax.backends.protocol import LoadOptions
    from hfax.generation.generate import GenerationLoop
    from hfax.generation.generation_request import Prompts
    from hfax.load.source import CheckpointSource

logger = logging.getLogger(__name__)

_becoming = threading.RLock()


def open_stored(source: CheckpointSource, options: LoadOptions, reader: WeightReader) -> Any:
    """The model of a checkpoint from its record, with its weights on the device; None if it cannot start from one.

    Returns a `StoredModel`, which has every attribute of the `JaxModel` that it stands for.

    Args:
        source: the checkpoint.
        options: how to load it.
        reader: reads its weights.
    """
    device = default_device()
    if jax.process_count() > 1:
        return None
    programs, sizes = None, ()
    if reader.is_of_bundle:
        bundle = read_bundle(source.folder)
        if bundle is None or bundle.make_mesh() is not None:
            return None
        start = read_start(source.folder / START, is_of_cache=False)
        programs, sizes = source.folder / PROGRAMS, tuple(bundle.sizes)
    else:
        start = read_start(start_file(reader, options, device))
    if start is None:
        return None
    try:
        runs = StoredRuns.open(start, reader, device, programs=programs, buckets=Buckets(made=sizes))
    except HfaxError as error:  # the full model reports it, or finds room on several devices
        logger.info("not started from the record: %s", error.what)
        return None
    return StoredModel(runs, source, options)


class StoredModel:
    """A model whose `generate` and `output` run stored programs. All else turns it into the `JaxModel` of its class, in place.

    It never gives other results than that model: calls that need more than stored programs are left to it. Until then neither torch
    nor transformers is imported. A call that has begun is not affected by another thread that needs the full model.

    Args:
        runs: runs the programs.
        source: the checkpoint.
        options: how it is loaded.

    Attributes:
        params: weights by checkpoint name, tied weights once.
        name_or_path: source of the weights.
        folder: local folder of the checkpoint.
        task: as given to `from_pretrained`.
    """

    backend = "jax"

    def __init__(self, runs: StoredRuns, source: CheckpointSource, options: LoadOptions) -> None:
        self.__dict__.update(
            params=runs.params,
            name_or_path=str(source.name),
            folder=source.folder,
            task=options.task,
            _origin=_Origin(runs=runs, source=source, options=options),
        )

    @property
    def context_length(self) -> int | None:
        """Maximum positions of the text model; None if unbounded."""
        return _origin_of(self).runs.start.context

    @property
    def vocabulary_size(self) -> int | None:
        """Rows of the embedding table; None if there is no single table."""
        return _origin_of(self).runs.start.vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return _origin_of(self).runs.start.traits.is_encoder_decoder

    @property
    def has_own_generate(self) -> bool:
        """Whether the class replaces transformers' general `generate`."""
        return False

    @property
    def parts(self) -> ModelParts:
        """As `JaxModel.parts`; the model's code is loaded when something is traced."""
        return _origin_of(self).runs.parts(lambda: _built(self).parts.traced)

    def can_generate(self) -> bool:
        """Whether `generate` works on this class."""
        return _origin_of(self).runs.start.generates

    def config_value(self, name: str) -> Any:
        """As `JaxModel.config_value`."""
        config: dict[str, Any] = json.loads(_origin_of(self).runs.start.model_key["config"])
        has_parts = any(isinstance(value, dict) and "model_type" in value for value in config.values())
        return _full(self).config_value(name) if has_parts else config.get(name)

    def default_option(self, name: str) -> Any:
        """As `JaxModel.default_option`."""
        return _origin_of(self).runs.start.generation_config.get(name)

    def example_prompt(self, rows: int, length: int) -> np.ndarray:
        """As `JaxModel.example_prompt`."""
        return np.full((rows, length), int(self.default_option("pad_token_id") == 0), np.int32)

    def read_prompt(self, prompt: Any, inputs: Mapping[str, Any], buckets: Buckets) -> Prompts:
        """As `JaxModel.read_prompt`."""
        found = None if inputs else read_prompt(_origin_of(self).runs.start, prompt, buckets)
        return _full(self).read_prompt(prompt, inputs, buckets) if found is None else found

    def generate(self, inputs: Any = None, *, streamer: Streamer | None = None, **options: Any) -> Any:
        """As `JaxModel.generate`."""
        runs = _origin_of(self).runs
        if (
            self.can_generate()
            and "past_key_values" not in options
            and (found := runs.run(inputs, streamer, options)) is not None
        ):
            return jax.device_put(found[0])
        return _full(self).generate(inputs, streamer=streamer, **options)

    def generate_and_keep(
        self, inputs: Any = None, *, streamer: Streamer | None = None, **options: Any
    ) -> tuple[np.ndarray, Any]:
        """As `JaxModel.generate_and_keep`."""
        runs = _origin_of(self).runs
        if self.can_generate() and (found := runs.run(inputs, streamer, options)) is not None:
            return found
        return _full(self).generate_and_keep(inputs, streamer=streamer, **options)

    def open_call(self, inputs: Any, **options: Any) -> tuple[GenerationLoop, dict[str, jax.Array], Prompts]:
        """As `JaxModel.open_call`."""
        if self.can_generate() and (found := _origin_of(self).runs.open_call(inputs, options)) is not None:
            loop, arrays, prompts, _ = found
            return loop, arrays, prompts
        return _full(self).open_call(inputs, **options)

    def compile_call(self, inputs: Any, **options: Any) -> None:
        """As `JaxModel.compile_call`."""
        if not (self.can_generate() and _origin_of(self).runs.has_programs(inputs, options)):
            _full(self).compile_call(inputs, **options)

    def output(self, name: str, **inputs: Any) -> Any:
        """As `JaxModel.output`."""
        if (found := _origin_of(self).runs.output(name, inputs)) is not None:
            return found
        return _full(self).output(name, **inputs)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The full model's class, for `isinstance`, during which the object's own class must stay."""
        return type(_built(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_full(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_full(self), name, value)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """As `JaxModel.__call__`."""
        return _full(self)(*args, **inputs)

    def __repr__(self) -> str:
        return repr(_full(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Origin:
    """What a stored model was opened from."""

    runs: StoredRuns
    source: CheckpointSource
    options: LoadOptions


def _origin_of(model: Any) -> _Origin:
    return vars(model)["_origin"]


def _loader() -> Any:
    """`model_around`; raises `BackendNotAvailableError` where only stored programs can run."""
    try:
        from hfax.backends.jax.backend import model_around
    except ImportError as error:
        raise BackendNotAvailableError(
            "This needs the model's own code, beyond the stored programs.",
            f"It is traced with torch and transformers, which cannot be imported: {error}",
            "Install hfax[cpu], hfax[tpu] or hfax[cuda]; or export programs for these sizes and options.",
        ) from error
    return model_around


def _built(model: Any) -> Any:
    """The full model around the same weights, made once."""
    with _becoming:
        own = vars(model)
        if "_built" not in own:
            model_around = _loader()
            began, origin = time.perf_counter(), _origin_of(model)
            tied, layout = dict(origin.runs.start.tied), origin.runs.layout
            own["_built"] = model_around(
                origin.source,
                origin.options,
                own["params"],
                tied,
                layout,
                programs=origin.runs.programs,
                sizes=origin.runs.buckets.made,
            )
            logger.info("the model's code was loaded in %.1f s", time.perf_counter() - began)
        return own["_built"]


def _full(model: Any) -> Any:
    """The model after it has become the full one."""
    with _becoming:
        if type(model) is StoredModel:
            full = _built(model)
            object.__setattr__(model, "__dict__", {**vars(full), "_origin": _origin_of(model)})
            vars(object)["__class__"].__set__(model, type(full))
    return model
