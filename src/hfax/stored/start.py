"""What a model's record holds, and the key by which it is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hfax.programs.program_cache import environment_parts
from hfax.stored.reader import KIND, WeightReader
from hfax.stored.records import key_of, read_record, record_file
from hfax.stored.weights import StoredWeight
from hfax.tracing.traits import ModelTraits

if TYPE_CHECKING:
    from pathlib import Path

    import jax

    from hfax.backends.protocol import LoadOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardStart:
    """How a model's forward calls are read and padded.

    Args:
        inputs: names of the inputs with an entry for each token that it takes.
        padding: the arguments of `SizeClasses`.
    """

    inputs: tuple[str, ...]
    padding: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPositions:
    """The positions of a prompt without images, of a model whose positions have several axes: on each, tokens are counted.

    Args:
        axes: number of axes.
        other_ids: ids of tokens that stand for images, video or audio, or surround them. Prompts with one are not read here.
    """

    axes: int
    other_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStart:
    """A model that reads token ids on one device, as far as stored programs depend on it.

    Args:
        model_key: what the model's programs depend on, by name (`TracedModel.key_parts`).
        traits: of the module.
        forward: of its forward calls; None: only the full model reads them.
        generates: whether `generate` works on its class; if not, its options are empty.
        weights: by the model's name.
        num_bytes: of the weights on the device.
        tied: alias mapped to name, for weights that share an array.
        generation_config: the model's own generation options.
        options: those that hold where a call passes none, transformers' defaults included.
        vocab_size: exclusive upper bound of token ids; None if unknown.
        num_logits: logits of each token.
        context: maximum positions; None if unbounded.
        positions: positions that are passed with a prompt; None: none are.
        buffers: safetensors of the arrays that the checkpoint does not hold.
    """

    model_key: Mapping[str, str]
    traits: ModelTraits
    forward: ForwardStart | None
    generates: bool
    weights: Mapping[str, StoredWeight]
    num_bytes: int
    tied: Mapping[str, str]
    generation_config: Mapping[str, Any]
    options: Mapping[str, Any]
    vocab_size: int | None
    num_logits: int
    context: int | None
    positions: TextPositions | None
    buffers: bytes

    @property
    def key(self) -> str:
        """As `TracedModel.key`."""
        return repr(tuple(self.model_key.values()))

    def as_content(self) -> dict[str, Any]:
        """JSON values by name, without the buffers."""
        content = dataclasses.asdict(self)
        del content["buffers"]
        return content


def start_file(reader: WeightReader, options: LoadOptions, device: jax.Device) -> Path:
    """The path of the record of a checkpoint, loaded with these options onto this device."""
    parts = {
        **environment_parts(device),
        "checkpoint": reader.digest,
        "options": repr(options),
        "device": str(device.id),
    }
    return record_file(KIND, reader.digest, key_of(KIND, [f"{name}={value}" for name, value in parts.items()]))


def read_start(path: Path, *, is_of_cache: bool = True) -> ModelStart | None:
    """The record at a path; None if there is none that can be used. See `read_record`."""
    if (found := read_record(path, is_of_cache=is_of_cache)) is None:
        return None
    content, buffers = found
    traits = content.pop("traits")
    weights = {name: StoredWeight.from_content(weight) for name, weight in content.pop("weights").items()}
    traits["repeated_inputs"] = tuple(traits["repeated_inputs"])
    if (forward := content.pop("forward")) is not None:
        forward = ForwardStart(inputs=tuple(forward["inputs"]), padding=forward["padding"])
    if (positions := content.pop("positions")) is not None:
        positions = TextPositions(axes=positions["axes"], other_ids=tuple(positions["other_ids"]))
    return ModelStart(
        **content, forward=forward, positions=positions, traits=ModelTraits(**traits), weights=weights, buffers=buffers
    )
