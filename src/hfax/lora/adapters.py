"""Manages a model's adapters: which are loaded, which one is active, and the base weights they replace.

An active adapter is stored among the model's weights (see `hfax.tracing.adapters`), so programs take it as an argument: switching
to another adapter on the same layers does not recompile. For this, adapters are zero-padded to each layer's largest rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Sharding

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.host_arrays import to_numpy
from hfax.lora import initial
from hfax.lora.combination import Combination
from hfax.lora.config import LoraConfig
from hfax.lora.conversions import read_as_lora
from hfax.lora.experts import from_peft, with_parameters
from hfax.lora.files import write_adapter
from hfax.lora.placement import sharding_of
from hfax.lora.structure import Structure
from hfax.lora.targets import RANK_AXIS, Target, target_of
from hfax.sharding.layout import Layout, to_host
from hfax.tracing.adapters import MAGNITUDE, SCALING, column_norms, split_adapters

Params = dict[str, jax.Array]
_BASE_TABLE = ".base_layer.weight"


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
        self._structure = Structure(module, tied)
        self.configs: dict[str, LoraConfig] = {}
        self._arrays: dict[str, Params] = {}
        """Each adapter's unpadded low-rank arrays and the weights that it trains in full."""
        self._rests: dict[str, Params] = {}
        """Base weights without what PiSSA or OLoRA took out of them, by adapter."""
        self.active: str | None = None
        self._replaced: Params = {}
        """Base weights replaced by the active or merged adapter."""
        self.merged: str | None = None

    @property
    def dropout(self) -> float:
        """Dropout rate of the active adapter's inputs during training."""
        return 0.0 if self.active is None else self.configs[self.active].lora_dropout

    def draw(self, name: str, config: LoraConfig, params: Params, seed: int) -> None:
        """Add a new adapter, initialised as in PEFT: unless `init_lora_weights` is False, outputs do not change yet.

        Raises:
            InvalidInputError: the name is taken, or the config matches no layers.
            UnsupportedOptionError: an option that hfax does not support, here or with this model.
        """
        self._check_new(name)
        config.require_parameters(self._module)
        config = with_parameters(config, self._module)
        initial.check(config, "The new adapter", is_new=True)
        targets = self._structure.targets(config, params)
        whole = self._structure.saved_weights(config)
        self._structure.reject_quantized(whole, params)
        self._structure.warn_of_what_is_left_out(config, targets)
        arrays: Params = {}
        rests = self._rests_of(config, params, arrays)
        base = {**params, **rests}
        for target, key in zip(targets, jax.random.split(jax.random.key(seed), len(targets)), strict=True):
            path, low = target.path, _dtype_of(params[self._structure.own_name(target.weight)])
            if f"{path}.{target.parts[0]}" not in arrays:
                drawn = initial.drawn(target, config, key)
                arrays |= {f"{path}.{part}": self._put(f"{path}.{part}", a, low) for part, a in drawn.items()}
            if config.use_dora:
                name_of = f"{path}.{MAGNITUDE}"
                arrays[name_of] = self._put(name_of, self._norms(target, base, arrays, config.scaling(path)), low)
        for weight in whole:
            arrays[weight] = jnp.copy(params[weight])
        self.configs[name], self._arrays[name], self._rests[name] = config, arrays, rests

    def describe(self, name: str, config: LoraConfig, params: Params) -> Params:
        """The weights of an abstract model, with placeholders for an adapter."""
        config = with_parameters(config, self._module)
        self.configs[name], self.active = config, name
        shapes = self._structure.expected_shapes(config)
        paths = dict.fromkeys((f"{layer}.{SCALING}" for layer in config.targets(self._module)), ())
        low: Any = {
            n: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._where(n))
            for n, shape in {**shapes, **paths}.items()
        }
        return {**params, **low}

    def combine(self, name: str, adapters: Sequence[str], combination: Combination, params: Params) -> None:
        """Add an adapter that is a weighted combination of others.

        Raises:
            InvalidInputError: the name is taken, an adapter does not exist, or ranks differ.
            UnsupportedOptionError: one of them changes more than its layers' low-rank updates.
        """
        self._check_new(name)
        for each in adapters:
            self._require(each)
            self._check_combinable(each)
        self._keep_active(params)
        paths = dict.fromkeys(path for each in adapters for path in split_adapters(self._arrays[each])[1])
        ranks = [max((self.configs[each].rank(path) for path in paths), default=1) for each in adapters]
        config = dataclasses.replace(
            self.configs[adapters[0]],
            r=(rank := combination.rank(ranks)),
            lora_alpha=rank,
            use_rslora=False,
            target_modules=tuple(paths),
            rank_pattern={},
            alpha_pattern={},
            **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        )
        arrays: Params = {}
        layers = [split_adapters(self._arrays[each])[1] for each in adapters]
        for path in paths:
            target = target_of(self._module, path)
            down, up = target.parts
            pairs = [
                None if path not in own else (_on_host(own[path][down]), _on_host(own[path][up])) for own in layers
            ]
            if combination.is_of_pairs and len({pair[0].shape for pair in pairs if pair is not None}) > 1:
                raise InvalidInputError(
                    f"The adapters have different ranks on {path}.",
                    f"combination_type={combination.combination_type!r} adds up their matrices.",
                    "Use cat or svd.",
                )
            found = combination.combined(pairs, [self.configs[each].scaling(path) for each in adapters], rank)
            low = _dtype_of(params[self._structure.own_name(target.weight)])
            names = (f"{path}.{part}" for part in target.parts)
            arrays |= {n: self._put(n, array, low) for n, array in zip(names, found, strict=True)}
        self.configs[name], self._arrays[name], self._rests[name] = config, arrays, {}

    def _check_combinable(self, name: str) -> None:
        config = self.configs[name]
        low, whole = self._split(self._arrays[name])
        has_parameters = any(target_of(self._module, path).is_parameter for path in split_adapters(low)[1])
        reasons = {
            "it stores weights in full (modules_to_save, bias)": bool(whole),
            "it scales weights (use_dora)": config.use_dora,
            f"it changes the base weights (init_lora_weights={config.init_lora_weights!r})": bool(self._rests[name]),
            "it adapts parameters of their own (target_parameters)": has_parameters,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise UnsupportedOptionError(
                f"The adapter {name!r} cannot be combined with others: {found[0]}.",
                "Only low-rank updates of layers are added up.",
                "Use it alone, or merge it into the weights first.",
            )

    def load(self, name: str, folder: Path, params: Params) -> None:
        """Add an adapter saved by PEFT or hfax.

        Raises:
            InvalidInputError: the name is taken, or the adapter is for another architecture.
            CheckpointCorruptError: files are unreadable or missing.
            UnsupportedOptionError: an option that hfax does not support, here or with this model.
        """
        self._check_new(name)
        config, found = read_as_lora(folder, self._module)
        config = with_parameters(config, self._module)
        initial.check(config, f"The adapter in {folder}", is_new=False)
        targets = self._structure.targets(config, params)
        stored = from_peft(found, self._module, targets)
        stored = self._without_tables(stored, folder, params)
        expected = self._structure.expected_shapes(config)
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
        self.configs[name], self._rests[name] = config, self._rests_of(config, params)

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
            {path.rpartition(".")[2] for path in config.target_layers(self._module)}
        )
        arrays = self._structure.in_peft(config, {n: to_host(a) for n, a in self._arrays[name].items()})
        arrays = {n: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for n, a in arrays.items()}
        write_adapter(folder, dataclasses.replace(config, **given), arrays)

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
        whole = {**self._rests[name], **whole}
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
            UnsupportedOptionError: a weight is quantized, or tied to another.
        """
        if self.active is None:
            raise InvalidInputError(
                "No adapter is active.", "There is nothing to merge.", "Call set_adapter(name) first."
            )
        name, scale = self.active, self.configs[self.active].scaling
        base = self.without(params)
        low, whole = self._split(self._arrays[name])
        changed = {**self._rests[name], **whole}
        for path, parts in split_adapters(low)[1].items():
            target = target_of(self._module, path)
            weight = self._structure.own_name(target.weight)
            if others := self._structure.tied_to(weight):
                raise UnsupportedOptionError(
                    f"{target.weight} is tied to {', '.join(others - {target.weight})}.",
                    f"A merge would change both, but the adapter only changes {path}.",
                    "Use the adapter without merging, or load a checkpoint with untied weights.",
                )
            if isinstance(base[weight], QuantizedArray):
                raise UnsupportedOptionError(
                    f"{weight} is quantized.",
                    "Rounding to integers would lose the adapter's update.",
                    "Load the model without quantization, then merge.",
                )
            changed[weight] = target.merged(changed.get(weight, base[weight]), parts, scale(path))
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
        self._rests.clear()
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
        for arrays in (*self._arrays.values(), *self._rests.values(), self._replaced):
            for name, array in arrays.items():
                arrays[name] = jax.device_put(array, self._where(name))

    def delete(self, name: str, params: Params) -> Params:
        """Delete an adapter; returns the weights without it.

        Raises:
            InvalidInputError: no such adapter, or it is merged.
        """
        self._require(name)
        params = self.activate(None, params) if self.active == name or self.merged == name else params
        del self.configs[name], self._arrays[name], self._rests[name]
        return params

    def trained(self, params: Mapping[str, Any]) -> list[str]:
        """The weights trained by default: the active adapter's, with its `modules_to_save`; else all floating-point ones."""
        if self.active is None:
            return [n for n, a in params.items() if jnp.issubdtype(a.dtype, jnp.floating)]
        trained = set(self._structure.trained(self.configs[self.active], params))
        return [n for n in params if n in trained]

    # Arrays

    def _keep_active(self, params: Params) -> None:
        """Copy the active adapter's current values back from the model's weights."""
        if self.active is None:
            return
        for n, array in self._arrays[self.active].items():
            axis = next((axis for part, axis in RANK_AXIS.items() if n.endswith(f".{part}")), None)
            now = params[n]
            if axis is not None and now.shape != array.shape:
                now = jax.lax.slice_in_dim(now, 0, array.shape[axis], axis=axis)
            self._arrays[self.active][n] = now
        self._rests[self.active] = {n: params[n] for n in self._rests[self.active]}

    def _padded(self, name: str, low: Params) -> Params:
        """Zero-pad an adapter to the largest rank of any adapter on each layer, and add each layer's scaling."""
        ranks: dict[str, int] = {}
        for other, config in self.configs.items():
            for path in split_adapters(self._arrays[other])[1]:
                ranks[path] = max(ranks.get(path, 0), config.rank(path))
        found: Params = {}
        layers = split_adapters(low)[1]
        for path, rank in ranks.items():
            own = layers.get(path, {})
            for part, shape in target_of(self._module, path).shapes(rank).items():
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

    def _rests_of(self, config: LoraConfig, params: Params, arrays: Params | None = None) -> Params:
        """Base weights that the adapter's initialisation changes; a new adapter's values that come from them go to `arrays`."""
        kind = initial.kind_of(config)
        rests: Params = {}
        if kind not in initial.FROM_BASE and (kind != "mica" or arrays is None):
            return rests
        for target in self._structure.targets(config, params):
            weight = self._structure.own_name(target.weight)
            if target.is_embedding and kind != "mica":  # PEFT initialises them as usual
                continue
            self._structure.reject_quantized([weight], params)
            if kind != "mica" and self._structure.tied_to(weight):
                raise UnsupportedOptionError(
                    f"init_lora_weights={kind!r} would change {target.weight}, which is tied to another weight.",
                    "The adapter would change both.",
                    "Remove it from target_modules, or load a checkpoint with untied weights.",
                )
            base = params[weight]
            a, b, rest = initial.factors(target, config, to_host(base).astype(np.float32))
            names = [f"{target.path}.{part}" for part in target.parts]
            if arrays is not None:
                arrays |= {n: self._put(n, array, _dtype_of(base)) for n, array in zip(names, (a, b), strict=True)}
            if kind != "mica":
                rests[weight] = jax.device_put(jnp.asarray(rest, base.dtype), base.sharding)
        return rests

    def _split(self, arrays: Params) -> tuple[Params, Params]:
        whole, layers = split_adapters(arrays)
        return {f"{path}.{part}": a for path, parts in layers.items() for part, a in parts.items()}, whole

    def _norms(self, target: Target, params: Params, arrays: Params, scaling: float) -> jax.Array:
        weight: Any = params[self._structure.own_name(target.weight)]
        weight = target.straight(weight.dequantize() if isinstance(weight, QuantizedArray) else weight)
        a, b = (arrays[f"{target.path}.{part}"] for part in target.parts)
        return column_norms(weight, a, b, jnp.float32(scaling))

    def _without_tables(self, stored: dict[str, torch.Tensor], folder: Path, params: Params) -> dict[str, torch.Tensor]:
        """Drop the base embedding tables that PEFT saves with embedding adapters.

        Raises:
            UnsupportedOptionError: a table differs from the model's.
        """
        tables = [name for name in stored if name.endswith(_BASE_TABLE)]
        for name in tables:
            own = self._structure.own_name(name.replace(_BASE_TABLE, ".weight"))
            if own not in params or not np.array_equal(to_host(params[own]), to_numpy(stored[name])):
                raise UnsupportedOptionError(
                    f"The adapter in {folder} has an embedding table that differs from the model's ({name}).",
                    "It was trained with tokens that the model does not have.",
                    "Merge it into its base model with PEFT and load the merged model.",
                )
        return {name: tensor for name, tensor in stored.items() if name not in tables}

    def _put(self, name: str, array: Any, dtype: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array.astype(dtype), self._where(name))
        return self._layout.place(np.asarray(array).astype(dtype), self._where(name))

    def _where(self, name: str) -> Sharding:
        return sharding_of(name, self._module, self._layout, self._structure.own_name)

    def _check_new(self, name: Any) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise InvalidInputError(
                f"An adapter cannot be named {name!r}.",
                "PEFT names are not empty and have no dots.",
                "Use another adapter_name.",
            )
        if name in self.configs:
            raise InvalidInputError(
                f"An adapter named {name!r} already exists.",
                "Adapter names are unique.",
                "Choose another adapter_name, or call delete_adapter() first.",
            )

    def _require(self, name: Any) -> None:
        if not isinstance(name, str):
            raise InvalidInputError(
                f"{name!r} is not an adapter's name.",
                "A model has one active adapter, and methods take the name of one.",
                "Pass a string; add_weighted_adapter() combines several into one.",
            )
        if name not in self.configs:
            raise InvalidInputError(
                f"There is no adapter {name!r}.",
                f"Loaded adapters: {', '.join(self.configs) or 'none'}.",
                "Add it with load_adapter() or add_adapter().",
            )


def _dtype_of(weight: Any) -> Any:
    """dtype of an adapter for this weight: float32 for half-precision weights, as in PEFT."""
    return (
        jnp.float32
        if weight.dtype in (jnp.bfloat16, jnp.float16) or isinstance(weight, QuantizedArray)
        else weight.dtype
    )


def _on_host(array: Any) -> np.ndarray:
    return np.asarray(to_host(array), np.float32)


def _stored_dtype(tensor: torch.Tensor) -> Any:
    return jnp.float32 if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32) else jnp.float64
