"""Manages a model's adapters: which are loaded, which one is active, and the base weights they replace.

An active adapter is stored among the model's weights (see `hfax.tracing.adapters`), so programs take it as an argument: switching
to another adapter on the same layers does not recompile. For this, adapters are zero-padded to each layer's largest rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from transformers.pytorch_utils import Conv1D

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.host_arrays import to_numpy
from hfax.lora.config import LoraConfig
from hfax.lora.files import read_adapter, write_adapter
from hfax.sharding.layout import Layout, to_host
from hfax.sharding.mesh import FSDP
from hfax.tracing.adapters import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PARTS,
    SCALING,
    column_norms,
    split_adapters,
)

Params = dict[str, jax.Array]
_BASE_TABLE = ".base_layer.weight"
_RANK_AXIS = {LORA_A: 0, LORA_B: 1, EMBEDDING_A: 0, EMBEDDING_B: 1}


class Adapters:
    """The adapters of one model.

    Args:
        module: the model, without weights.
        layout: placement of the model's weights.
        tied: alias to name, for weights that share an array.
    """

    def __init__(self, module: torch.nn.Module, layout: Layout, tied: Mapping[str, str]) -> None:
        self._module = module
        self._layout = layout
        self._tied = tied
        self.configs: dict[str, LoraConfig] = {}
        self._arrays: dict[str, Params] = {}
        """Each adapter's unpadded low-rank arrays and the full weights of `modules_to_save`."""
        self.active: str | None = None
        self._replaced: Params = {}
        """Base weights replaced by the active or merged adapter."""
        self.merged: str | None = None

    @property
    def dropout(self) -> float:
        """Dropout rate of the active adapter's inputs during training."""
        return 0.0 if self.active is None else self.configs[self.active].lora_dropout

    def draw(self, name: str, config: LoraConfig, params: Params, seed: int) -> None:
        """Add a new adapter, initialised as in PEFT (`lora_A` uniform, `lora_B` zero), so outputs do not change yet.

        Raises:
            InvalidInputError: the name is taken, or the config matches no layers.
        """
        self._check_new(name)
        parts = dict(self._module.named_modules())
        arrays: Params = {}
        for path, key in _keyed(config.targets(self._module), seed):
            rank, layer = config.rank(path), parts[path]
            out, into = _widths(layer)
            low = _dtype_of(params[self._own_name(f"{path}.weight")])
            if isinstance(layer, torch.nn.Embedding):
                drawn = {EMBEDDING_A: np.zeros((rank, out)), EMBEDDING_B: jax.random.normal(key, (into, rank))}
            else:
                bound = 1 / math.sqrt(into)
                uniform = jax.random.uniform(key, (rank, into), jnp.float32, -bound, bound)
                drawn = {LORA_A: uniform, LORA_B: np.zeros((out, rank))}
            arrays |= {f"{path}.{part}": self._put(f"{path}.{part}", a, low) for part, a in drawn.items()}
            if config.use_dora and LORA_A in drawn:
                name_of = f"{path}.{MAGNITUDE}"
                arrays[name_of] = self._put(name_of, self._norms(path, params, arrays, 0.0), low)
        for weight in self._saved_weights(config):
            arrays[weight] = jnp.copy(params[weight])
        self.configs[name], self._arrays[name] = config, arrays

    def describe(self, name: str, config: LoraConfig, params: Params) -> Params:
        """The weights of an abstract model, with placeholders for an adapter."""
        self.configs[name], self.active = config, name
        shapes = self._expected_shapes(config)
        paths = dict.fromkeys((f"{layer}.{SCALING}" for layer in config.targets(self._module)), ())
        low: Any = {
            n: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._where(n))
            for n, shape in {**shapes, **paths}.items()
        }
        return {**params, **low}

    def load(self, name: str, folder: Path, params: Params) -> None:
        """Add an adapter saved by PEFT or hfax.

        Raises:
            InvalidInputError: the name is taken, or the adapter is for another architecture.
            CheckpointCorruptError: files are unreadable or missing.
        """
        self._check_new(name)
        config = LoraConfig.read(folder)
        stored = self._without_tables(read_adapter(folder), folder, params)
        expected = self._expected_shapes(config)
        missing, unexpected = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
        wrong = [n for n in expected if n in stored and tuple(stored[n].shape) != expected[n]]
        if missing or unexpected:
            raise InvalidInputError(
                f"The adapter in {folder} does not fit {type(self._module).__name__}: "
                f"{len(missing)} arrays are missing and {len(unexpected)} are unexpected: {(missing + unexpected)[:3]}.",
                f"It was trained on {config.base_model_name_or_path or 'another model'}.",
                "Load it into its base model.",
            )
        if wrong:
            found = wrong[0]
            raise InvalidInputError(
                f"The adapter in {folder} has {found} with shape {tuple(stored[found].shape)}; "
                f"this model expects {expected[found]}.",
                f"It was trained on {config.base_model_name_or_path or 'a model of another size'}.",
                "Load it into its base model.",
            )
        self._arrays[name] = {
            n: self._put(n, to_numpy(t), _dtype_of(params[n]) if n in params else _stored_dtype(t))
            for n, t in stored.items()
        }
        self.configs[name] = config

    def save(self, name: str, folder: Path, params: Params, base_name: str) -> None:
        """Save an adapter in PEFT format.

        Raises:
            HfaxError: the folder cannot be written; its previous contents are kept.
        """
        self._require(name)
        self._keep_active(params)
        config = self.configs[name]
        given: dict[str, Any] = {"base_model_name_or_path": config.base_model_name_or_path or base_name}
        given["target_modules"] = config.target_modules or sorted(
            {path.rpartition(".")[2] for path in config.targets(self._module)}
        )
        arrays = {n: to_host(a) for n, a in self._arrays[name].items()}
        arrays = {n: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for n, a in arrays.items()}
        write_adapter(folder, LoraConfig(**{**vars(config), **given}), arrays)

    def activate(self, name: str | None, params: Params) -> Params:
        """The model's weights with the given adapter active; None: with no adapter.

        Raises:
            InvalidInputError: no such adapter, or an adapter is merged.
        """
        if self.merged is not None:
            raise InvalidInputError(
                f"The adapter {self.merged!r} is merged into the weights.",
                "A second adapter would be added on top of it.",
                "Call unmerge_adapter() first.",
            )
        if name is not None:
            self._require(name)
        base = self.without(params)
        self.active = name
        if name is None:
            self._replaced = {}
            return base
        low, whole = self._split(self._arrays[name])
        self._replaced = {n: base[n] for n in whole}
        return {**base, **whole, **self._padded(name, low)}

    def without(self, params: Params) -> Params:
        """The base weights; the active adapter's trained values are saved back to it."""
        self._keep_active(params)
        own, _ = split_adapters(params)
        return {**own, **self._replaced}

    def merge(self, params: Params) -> Params:
        """The weights with the active adapter merged into them, as in PEFT.

        Raises:
            InvalidInputError: no adapter is active.
            UnsupportedOptionError: the weights are quantized.
        """
        if self.active is None:
            raise InvalidInputError(
                "No adapter is active.", "There is nothing to merge.", "Call set_adapter(name) first."
            )
        name, scale = self.active, self.configs[self.active].scaling
        base = self.without(params)
        low, whole = self._split(self._arrays[name])
        changed = dict(whole)
        for path, parts in split_adapters(low)[1].items():
            weight = self._own_name(f"{path}.weight")
            if isinstance(base[weight], QuantizedArray):
                raise UnsupportedOptionError(
                    f"{weight} is quantized.",
                    "Rounding to integers would lose the adapter's update.",
                    "Load the model without quantization, then merge.",
                )
            layer = self._module.get_submodule(path)
            changed[weight] = _merged(changed.get(weight, base[weight]), layer, parts, scale(path))
            changed[weight] = jax.device_put(changed[weight], base[weight].sharding)
        self._replaced = {n: base[n] for n in changed}
        self.merged, self.active = name, None
        return {**base, **changed}

    def unmerge(self, params: Params) -> Params:
        """The weights before the merge, bit for bit, with the adapter active again.

        Raises:
            InvalidInputError: no adapter is merged.
        """
        if self.merged is None:
            raise InvalidInputError("No adapter is merged.", "There is nothing to undo.", "Call merge_adapter() first.")
        name, base = self.merged, {**params, **self._replaced}
        self.merged, self._replaced = None, {}
        return self.activate(name, base)

    def forget(self) -> None:
        """Drop all adapters; a merged adapter stays in the weights.

        Raises:
            InvalidInputError: an unmerged adapter is active.
        """
        if self.active is not None:
            raise InvalidInputError(
                f"The adapter {self.active!r} is active.", "The model is using it.", "Merge or disable it first."
            )
        self.configs.clear()
        self._arrays.clear()
        self.merged, self._replaced = None, {}

    def reject_cast(self) -> None:
        """Raise if there are adapters, whose arrays have dtypes of their own.

        Raises:
            UnsupportedOptionError: there are some.
        """
        if self.configs:
            raise UnsupportedOptionError(
                "A model with adapters cannot be cast.",
                "Adapter arrays have their own dtypes.",
                "Cast the model first, then add or load the adapters.",
            )

    def move_to(self, layout: Layout) -> None:
        """Move the adapters to other devices."""
        self._layout = layout
        for arrays in (*self._arrays.values(), self._replaced):
            for name, array in arrays.items():
                arrays[name] = jax.device_put(array, self._where(name))

    def delete(self, name: str, params: Params) -> Params:
        """Delete an adapter; returns the weights without it.

        Raises:
            InvalidInputError: no such adapter, or it is merged.
        """
        self._require(name)
        params = self.activate(None, params) if self.active == name or self.merged == name else params
        del self.configs[name], self._arrays[name]
        return params

    # Arrays

    def _keep_active(self, params: Params) -> None:
        """Copy the active adapter's current values back from the model's weights."""
        if self.active is None:
            return
        for n, array in self._arrays[self.active].items():
            rank_axis = next((axis for part, axis in _RANK_AXIS.items() if n.endswith(part)), None)
            now = params[n]
            if rank_axis is not None and now.shape != array.shape:
                now = jax.lax.slice_in_dim(now, 0, array.shape[rank_axis], axis=rank_axis)
            self._arrays[self.active][n] = now

    def _padded(self, name: str, low: Params) -> Params:
        """Zero-pad an adapter to the largest rank of any adapter on each layer, and add each layer's scaling."""
        ranks: dict[str, int] = {}
        for other, config in self.configs.items():
            for path in split_adapters(self._arrays[other])[1]:
                ranks[path] = max(ranks.get(path, 0), config.rank(path))
        parts = dict(self._module.named_modules())
        found: Params = {}
        layers = split_adapters(low)[1]
        for path, rank in ranks.items():
            own = layers.get(path, {})
            out, into = _widths(parts[path])
            is_table = isinstance(parts[path], torch.nn.Embedding)
            shapes = (
                {EMBEDDING_A: (rank, out), EMBEDDING_B: (into, rank)}
                if is_table
                else {LORA_A: (rank, into), LORA_B: (out, rank)}
            )
            for part, shape in shapes.items():
                if part not in own:
                    found[f"{path}.{part}"] = self._put(f"{path}.{part}", np.zeros(shape), jnp.float32)
                elif own[part].shape == shape:
                    found[f"{path}.{part}"] = own[part]
                else:
                    widths = [(0, wanted - given) for wanted, given in zip(shape, own[part].shape, strict=True)]
                    found[f"{path}.{part}"] = jnp.pad(own[part], widths)
            if MAGNITUDE in own:
                found[f"{path}.{MAGNITUDE}"] = own[MAGNITUDE]
            scaling = self.configs[name].scaling(path) if own else 0.0
            found[f"{path}.{SCALING}"] = self._put(f"{path}.{SCALING}", np.float32(scaling), jnp.float32)
        return found

    def _split(self, arrays: Params) -> tuple[Params, Params]:
        whole, layers = split_adapters(arrays)
        return {f"{path}.{part}": a for path, parts in layers.items() for part, a in parts.items()}, whole

    def _norms(self, path: str, params: Params, arrays: Params, scaling: float) -> jax.Array:
        layer = self._module.get_submodule(path)
        weight: Any = params[self._own_name(f"{path}.weight")]
        weight = weight.dequantize() if isinstance(weight, QuantizedArray) else weight
        weight = weight.T if isinstance(layer, Conv1D) else weight
        return column_norms(weight, arrays[f"{path}.{LORA_A}"], arrays[f"{path}.{LORA_B}"], jnp.float32(scaling))

    def _without_tables(self, stored: dict[str, torch.Tensor], folder: Path, params: Params) -> dict[str, torch.Tensor]:
        """Drop the base embedding tables that PEFT saves with embedding adapters.

        Raises:
            UnsupportedOptionError: a table differs from the model's.
        """
        tables = [name for name in stored if name.endswith(_BASE_TABLE)]
        for name in tables:
            own = self._own_name(name.replace(_BASE_TABLE, ".weight"))
            if own not in params or not np.array_equal(to_host(params[own]), to_numpy(stored[name])):
                raise UnsupportedOptionError(
                    f"The adapter in {folder} has an embedding table that differs from the model's ({name}).",
                    "It was trained with tokens that the model does not have.",
                    "Merge it into its base model with PEFT and load the merged model.",
                )
        return {name: tensor for name, tensor in stored.items() if name not in tables}

    def _expected_shapes(self, config: LoraConfig) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for path in config.targets(self._module):
            layer, rank = self._module.get_submodule(path), config.rank(path)
            out, into = _widths(layer)
            if isinstance(layer, torch.nn.Embedding):
                shapes |= {f"{path}.{EMBEDDING_A}": (rank, out), f"{path}.{EMBEDDING_B}": (into, rank)}
            else:
                shapes |= {f"{path}.{LORA_A}": (rank, into), f"{path}.{LORA_B}": (out, rank)}
                if config.use_dora:
                    shapes[f"{path}.{MAGNITUDE}"] = (out,)
        weights = dict(self._module.named_parameters(remove_duplicate=False))
        return shapes | {n: tuple(weights[n].shape) for n in self._saved_weights(config)}

    def _saved_weights(self, config: LoraConfig) -> list[str]:
        """Weights that an adapter stores in full (`modules_to_save`).

        Raises:
            UnsupportedOptionError: a weight is tied.
        """
        names = []
        for path in config.saved_modules(self._module):
            own = [n for n, _ in self._module.get_submodule(path).named_parameters(prefix=path)]
            for name in own:
                if name in self._tied or name in self._tied.values():
                    raise UnsupportedOptionError(
                        f"modules_to_save names {path}, but {name} is tied to another weight.",
                        "An adapter would change both.",
                        "Remove it from modules_to_save, or load a checkpoint with untied weights.",
                    )
            names += own
        return names

    def _own_name(self, name: str) -> str:
        return self._tied.get(name, name)

    def _put(self, name: str, array: Any, dtype: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array.astype(dtype), self._where(name))
        return self._layout.place(np.asarray(array).astype(dtype), self._where(name))

    def _where(self, name: str) -> Sharding:
        """Sharding of an adapter's array: split along the layer's inputs or outputs like the layer's weight."""
        path, part = next(((name[: -len(p) - 1], p) for p in PARTS if name.endswith(f".{p}")), (name, None))
        weight = self._own_name(f"{path}.weight")
        plan = self._layout.plan
        if part is None or plan is None or weight not in plan.weights or part == SCALING:
            return self._layout.weight(name)
        layer = self._module.get_submodule(path)
        rows, columns = plan.weights[weight].spec
        if isinstance(layer, Conv1D):
            rows, columns = columns, rows
        parts = plan.mesh.shape[FSDP]
        rows, columns = (  # the other half of the adapter takes the axis without fsdp
            FSDP if axes is None and parts > 1 and size % parts == 0 else axes
            for axes, size in zip((rows, columns), _widths(layer), strict=True)
        )
        spec = {
            LORA_A: P(None, columns),
            LORA_B: P(rows, None),
            MAGNITUDE: P(rows),
            EMBEDDING_A: P(None, rows),
            EMBEDDING_B: P(columns, None),
        }[part]
        return NamedSharding(plan.mesh, spec)

    def _check_new(self, name: str) -> None:
        if name in self.configs:
            raise InvalidInputError(
                f"An adapter named {name!r} already exists.",
                "Adapter names are unique.",
                "Choose another adapter_name, or call delete_adapter() first.",
            )
        if not name or "." in name:
            raise InvalidInputError(
                f"An adapter cannot be named {name!r}.",
                "PEFT names are not empty and have no dots.",
                "Use another adapter_name.",
            )

    def _require(self, name: str) -> None:
        if name not in self.configs:
            raise InvalidInputError(
                f"There is no adapter {name!r}.",
                f"Loaded adapters: {', '.join(self.configs) or 'none'}.",
                "Add it with load_adapter() or add_adapter().",
            )


def trained_names(params: Mapping[str, Any]) -> list[str]:
    """The weights trained by default: the active adapter's, else all floating-point weights."""
    names = [name for name in params if not name.endswith(SCALING)]
    low = [name for name in names if ".lora_" in name]
    return low or [name for name in names if jnp.issubdtype(params[name].dtype, jnp.floating)]


def _merged(weight: jax.Array, layer: torch.nn.Module, parts: Mapping[str, jax.Array], scaling: float) -> jax.Array:
    """`weight + scaling · B @ A`, computed in float32, cast to the weight's dtype; for DoRA scaled to its magnitudes."""
    is_table = isinstance(layer, torch.nn.Embedding)
    a, b = (parts[n].astype(jnp.float32) for n in ((EMBEDDING_A, EMBEDDING_B) if is_table else (LORA_A, LORA_B)))
    added = scaling * jnp.matmul(b, a, precision="highest")
    is_turned = is_table or isinstance(layer, Conv1D)
    added = added.T if is_turned else added
    merged = weight.astype(jnp.float32) + added
    if MAGNITUDE in parts:
        norms = jnp.linalg.norm(merged, axis=0 if is_turned else 1)
        scale = parts[MAGNITUDE].astype(jnp.float32) / norms
        merged = merged * (scale[None, :] if is_turned else scale[:, None])
    return merged.astype(weight.dtype)


def _widths(layer: Any) -> tuple[int, int]:
    """Output and input widths of a layer; rows and width of an embedding table."""
    if isinstance(layer, torch.nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    return layer.out_features, layer.in_features


def _keyed(paths: list[str], seed: int) -> list[tuple[str, jax.Array]]:
    return list(zip(paths, jax.random.split(jax.random.key(seed), len(paths)), strict=True))


def _dtype_of(weight: Any) -> Any:
    """dtype of an adapter for this weight: float32 for half-precision weights, as in PEFT."""
    return (
        jnp.float32
        if weight.dtype in (jnp.bfloat16, jnp.float16) or isinstance(weight, QuantizedArray)
        else weight.dtype
    )


def _stored_dtype(tensor: torch.Tensor) -> Any:
    return jnp.float32 if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32) else jnp.float64
