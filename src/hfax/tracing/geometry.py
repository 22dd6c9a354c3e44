"""Inputs with values that determine shapes: the grids, sizes and lengths of images, videos and audio.

A compiled program has fixed shapes, so these are constants of the program, on the host, where modelling code may turn them into
Python numbers; pixels, audio samples and token ids are traced. The 3-D positions that some models compute from grids and token ids
are computed here too, by the model's own function, before tracing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.tracing.structure import is_array, is_traced

if TYPE_CHECKING:
    import torch

_GEOMETRY = re.compile(
    r"(^|_)(grid|grids|thw|sizes?|shapes|lengths?|lens|num|crops|grid_ts|width|height|target_sizes)(_|$)"
    r"|^(image|video)_position_ids$|^(pixel_attention|feature_attention|input_features|pixel|tile_fine|input_values|audio_input_ids"
    r"|video_compression|padding)_mask$|^image_token_pooling$|^(image|video)_token_pooling$"
)
GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Names of packed patches, [patches, …], mapped to those of their grids, [images, 3]: frames, rows and columns."""
ORDER = "image_sizes"
"""Name of the sizes of images in tiles, [images, 2] int. Programs of prompts may take an order of features, [tokens], instead."""
_TRACED = re.compile(r"^(high_res_)?pixel_values|^labels$")


@dataclasses.dataclass(frozen=True)
class HostArray:
    """A host array that is part of a program. Its repr is unique to its values.

    Args:
        array: int, bool or float; must not be modified afterwards.
    """

    array: np.ndarray

    def __repr__(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.array).tobytes()).hexdigest()
        return f"HostArray({self.array.shape}, {self.array.dtype}, {digest})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostArray) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def to_torch(self) -> torch.Tensor:
        """A copy as a torch tensor; integers are int64, as from transformers' processors."""
        import torch

        tensor = torch.from_numpy(np.array(self.array))
        return tensor.long() if tensor.dtype == torch.int32 else tensor


def is_geometry(name: str) -> bool:
    """Whether the values of an input of this name determine shapes."""
    return bool(_GEOMETRY.search(name)) and not _TRACED.search(name)


def keep_on_host(inputs: Mapping[str, Any], traced: Collection[str] = ()) -> dict[str, Any]:
    """The inputs with geometry arrays as `HostArray`s. Traced values are unchanged.

    Args:
        inputs: by name.
        traced: names of geometry that the model's code does not read, `ModelTraits.traced_geometry`.
    """
    is_kept = {name: is_geometry(name) and name not in traced and _is_concrete(value) for name, value in inputs.items()}
    return {name: HostArray(np.asarray(value)) if is_kept[name] else value for name, value in inputs.items()}


def _is_concrete(value: Any) -> bool:
    return is_array(value) and not is_traced(value)


def reads_grids_for_positions(module: torch.nn.Module) -> bool:
    """Whether the model computes positions from image or video grids, unless it is given them."""
    return any(hasattr(part, "compute_3d_position_ids") for part in module.modules())


def forward_positions(module: torch.nn.Module, inputs: Mapping[str, Any]) -> np.ndarray | None:
    """Positions for a forward call with image or video grids, [3, batch, length] int32.

    Args:
        module: the model, or a model that contains it.
        inputs: forward inputs by name: host arrays and `HostArray`s.

    Returns:
        None for models with 1-D positions, and for calls without images or with explicit positions.
    """
    if inputs.get("position_ids") is not None or not any(isinstance(v, HostArray) for v in inputs.values()):
        return None
    holder: Any = next((m for m in module.modules() if hasattr(m, "compute_3d_position_ids")), None)
    if holder is None or inputs.get("input_ids") is None or is_traced(inputs["input_ids"]):
        return None
    given = {"inputs_embeds": None, "cache": None, **_as_torch(inputs)}
    if given.get("feature_attention_mask") is not None:  # as the forward of these classes computes them
        given["audio_feature_lengths"] = given["feature_attention_mask"].sum(dim=1)
    names = inspect.signature(holder.compute_3d_position_ids).parameters
    given |= {
        n: None for n, p in names.items() if p.default is p.empty and n not in given and p.kind is not p.VAR_KEYWORD
    }
    with _deltas_put_back(module):
        positions = holder.compute_3d_position_ids(**{n: v for n, v in given.items() if n in names})
    return None if positions is None else positions.numpy().astype(np.int32)


def prompt_positions(module: Any, inputs: Mapping[str, Any]) -> np.ndarray | None:
    """Prompt positions as in the model's generate, [batch, length] or [n, batch, length] int32.

    Args:
        module: the model.
        inputs: prompt inputs: `input_ids` and `attention_mask`, [batch, length], left-padded, and all further inputs.

    Returns:
        None if the class uses standard text positions, or none.
    """
    from transformers import GenerationMixin

    own = getattr(type(module), "_prepare_position_ids_for_generation", None)
    if own is None or own is GenerationMixin._prepare_position_ids_for_generation:
        return None
    given = _as_torch(inputs)
    with _deltas_put_back(module):
        positions = module._prepare_position_ids_for_generation(given["input_ids"], given)
    return None if positions is None else positions.numpy().astype(np.int32)


@contextlib.contextmanager
def _deltas_put_back(module: torch.nn.Module) -> Iterator[None]:
    """Restore the position state that modelling code stores for later steps."""
    parts: list[Any] = [m for m in module.modules() if hasattr(m, "rope_deltas")]
    before = [m.rope_deltas for m in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.rope_deltas = value


def _as_torch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, HostArray):
            found[name] = value.to_torch()
        elif name.startswith("pixel_values"):
            continue
        elif isinstance(value, torch.Tensor):
            found[name] = value
        elif is_array(value):
            found[name] = HostArray(np.asarray(value)).to_torch()
    return found
