"""How a quantized checkpoint's weights will be packed on a machine, from the headers of its files: no weights are read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import torch
from transformers import PretrainedConfig

from hfax.errors import CheckpointNotFoundError, InvalidInputError
from hfax.load.formats import find_weights, method_of
from hfax.load.orbax_checkpoint import OrbaxStore
from hfax.load.packed import PackedLayout
from hfax.load.saved_parts import saved_layouts
from hfax.load.skeleton import Skeleton
from hfax.load.source import DEMO_NAME, CheckpointSource, names_gguf, resolve_checkpoint
from hfax.load.store import TensorStore, open_store
from hfax.load.weights import stored_layouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The weights of a quantized checkpoint or a GGUF file.

    Args:
        method: "fp8", "mxfp4", "gguf", …: the name of the quantization; None: all weights are numbers, or will be dequantized while
            they are loaded.
        store: the checkpoint's tensors; those that hfax saved are arrays, by name.
    """

    method: str | None
    store: TensorStore | Mapping[str, jax.ShapeDtypeStruct]

    @property
    def float_dtype(self) -> torch.dtype | None:
        """The dtype that numbers are stored in, where it is the model's unless its config has one."""
        return self.store.float_dtype if isinstance(self.store, TensorStore) else None

    def layouts(self, skeleton: Skeleton, platform: str) -> dict[str, PackedLayout]:
        """How the weights that stay packed on devices of a platform are packed, by name.

        Args:
            skeleton: the model structure.
            platform: "cpu", "tpu" or "gpu".
        """
        if not isinstance(self.store, TensorStore):
            return saved_layouts(skeleton.shapes, self.store)
        return stored_layouts(skeleton, self.store, platform)


def stored_weights(model: str, config: PretrainedConfig) -> StoredWeights | None:
    """The weights of a checkpoint that is quantized, or of a GGUF file; None for others.

    Args:
        model: a Hub id, a URL, a folder, a config.json, a GGUF file, or "demo".
        config: of the model.

    Raises:
        InvalidInputError: only a config.json was given.
        UnsupportedModelError: the checkpoint is quantized in a format that hfax does not read.
        CheckpointCorruptError: a file is damaged, or tensors do not fit the format.
    """
    method = "gguf" if names_gguf(model) else method_of(config)
    if model == DEMO_NAME or method is None:
        return None
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        raise InvalidInputError(
            f"{model} is the config of a checkpoint that is quantized with {method!r}.",
            "How many bytes its weights take is known from the headers of the checkpoint's files, which are not there.",
            "Pass the folder or the Hub id; or --quantization int8 or int4; or remove quantization_config from a copy of the file.",
        )
    source = resolve_checkpoint(model) if path.exists() or "://" in model or method == "gguf" else _on_the_hub(model)
    if source.format == "orbax":
        return StoredWeights(method=method, store=OrbaxStore(source.weight_files[0]).arrays)
    store = open_store(source)
    if method == "hfax":
        return StoredWeights(method=method, store=store.described())
    store = find_weights(copy.deepcopy(config), store)
    return StoredWeights(method=method if store.packed else None, store=store)


def _on_the_hub(name: str) -> CheckpointSource:
    """The files of a Hub repository, of which only headers are read; those in the cache, if they are there."""
    try:
        return resolve_checkpoint(name, local_files_only=True)
    except CheckpointNotFoundError:  # not in the cache, or only in part
        return resolve_checkpoint(f"hf://{name}")
