"""A transformers module as pure functions of its weights.

Turns a skeleton into `apply` (one forward call) and the two functions that generation compiles, `prefill` and `decode_step`. All
of them take a flat dict of arrays and return arrays; inside, the module's own PyTorch code is traced. This module does not know
programs, devices or sampling.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from transformers.cache_utils import Cache

from hfax.errors import UnsupportedModelError
from hfax.kernels import paged, target
from hfax.kernels.constraints import constrain_cache
from hfax.kernels.rows import Rows
from hfax.kv_cache.cache import cache_arrays, make_cache
from hfax.kv_cache.pooled import make_pooled_cache, pooled_arrays
from hfax.load.host_arrays import narrow, to_numpy
from hfax.load.skeleton import Skeleton
from hfax.patches import registry
from hfax.patches.masks import decoder_padding
from hfax.tracing import geometry
from hfax.tracing import torchax as tracing
from hfax.tracing.encoders import EncoderOutputs, run_encoder
from hfax.tracing.pytrees import register_output_class
from hfax.tracing.structure import Leaf, Node, Static, flatten, is_array, unflatten
from hfax.tracing.training import Training
from hfax.tracing.traits import APPENDS_MASK, read_traits, unlike_general_loop

Arrays = dict[str, jax.Array]
_ON_MODULES = "on_modules."
"""Prefix for the names of module attributes kept between calls."""


class TracedModel:
    """The pure functions of one module.

    Args:
        skeleton: the module; only used inside traces.
        tied: alias mapped to name, for weights that share an array.
        buffers: arrays that are not in the checkpoint.
    """

    def __init__(self, skeleton: Skeleton, tied: Mapping[str, str], buffers: Mapping[str, jax.Array]) -> None:
        self.module = skeleton.module
        self.traits = read_traits(skeleton.module)
        self.patches_used: set[str] = set()
        """Names of the patches used in any trace so far."""
        self._lock = skeleton.lock
        self._tied = dict(tied)
        self._buffers = dict(buffers)
        self._constants = {n: b for n, b in skeleton.buffers.items() if not b.ndim and not b.is_floating_point()}
        """Integer buffers: sizes that modelling code stores."""

    @functools.cached_property
    def key(self) -> str:
        """Everything about the module that a trace depends on; part of its programs' keys."""
        module = self.module
        cls = type(module)
        plain = {name: value for name, value in module.config.to_dict().items() if name != "_name_or_path"}
        config = json.dumps(plain, sort_keys=True, default=str)
        implementations = (module.config._attn_implementation, getattr(module.config, "_experts_implementation", None))
        source = ""
        if not cls.__module__.startswith("transformers."):
            source = hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()
        patches = registry.fingerprint()
        return repr(
            (cls.__module__, cls.__qualname__, config, implementations, sorted(self._tied.items()), source, patches)
        )

    def use_buffers(self, buffers: Mapping[str, jax.Array]) -> None:
        """Replace the buffers, for example by copies on other devices."""
        self._buffers = dict(buffers)

    def prepare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs after input patches, with geometry as `HostArray`s and the positions derived from it."""
        prepared = dict(inputs)
        if not any(isinstance(v, Tracer) for v in prepared.values()):
            prepared = registry.prepare_inputs(self.module, prepared, self.patches_used)
        prepared = geometry.keep_on_host(prepared)
        if self.traits.takes_position_ids and (found := geometry.forward_positions(self.module, prepared)) is not None:
            prepared["position_ids"] = found
        return prepared

    def apply(
        self,
        params: Mapping[str, jax.Array],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: Training | None = None,
    ) -> Any:
        """One forward call; results hold `jax.Array`s instead of tensors, with their classes registered as pytrees."""
        return self.apply_checked(params, args, kwargs, training)[0]

    def apply_checked(
        self,
        params: Mapping[str, jax.Array],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: Training | None = None,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """`apply`, and the data-dependent checks of modelling code: description mapped to a scalar bool."""
        arrays, structure = flatten((args, self.prepare(kwargs)), is_array)

        def call(module: torch.nn.Module) -> Any:
            call_args, call_kwargs = unflatten(structure, tracing.wrap([_as_traced(a) for a in arrays]))
            call_kwargs = tracing.wrap_constants(call_kwargs)
            outputs, out_structure = flatten(module(*call_args, **call_kwargs), tracing.is_tensor)
            return [tracing.unwrap(o) for o in outputs], out_structure

        checks: dict[str, jax.Array] = {}
        outputs, out_structure = self._call(params, call, training=training, checks=checks)
        _register(out_structure)
        return unflatten(out_structure, outputs), checks

    def inspect(
        self,
        params: Mapping[str, jax.Array],
        look: Callable[[torch.nn.Module, dict[str, Any]], Any],
        arrays: Mapping[str, jax.Array],
        static: Mapping[str, Any],
    ) -> None:
        """Within a trace, call `look(module, inputs)` with the weights loaded and the inputs as modelling code sees them."""

        def call(module: torch.nn.Module) -> None:
            look(module, {**tracing.wrap(dict(arrays)), **tracing.wrap_constants(static)})

        self._call(params, call)

    def prefill(
        self,
        params: Mapping[str, jax.Array],
        inputs: Mapping[str, jax.Array],
        static: Mapping[str, Any],
        capacity: int,
        checks: dict[str, jax.Array] | None = None,
        *,
        keeps_windows: bool = True,
    ) -> tuple[jax.Array, Arrays]:
        """Run the prompts, with their images and audio, and fill a new cache.

        Args:
            params: the weights.
            inputs: model inputs; for decoders `input_ids` and `attention_mask`, both [batch, length], left-padded.
            static: further keyword arguments that are not traced: options, and `HostArray`s of the prompts' geometry.
            capacity: cache capacity, in tokens.
            checks: collects the conditions that must hold, see `apply_checked`.
            keeps_windows: sliding-window layers keep only their window; False: all tokens, so that tokens can be rolled back.

        Returns:
            Logits of the last position, [batch, vocab] float32, and the cache arrays (with the encoder output, if any).
        """
        traits = self.traits
        if (why := unlike_general_loop(self.module)) is not None:
            raise UnsupportedModelError(
                f"generate() does not support {type(self.module).__name__}.",
                why,
                "Call the model directly, or generate with plain transformers.",
            )
        if not traits.has_usable_cache:
            extra = set(inputs) - {"input_ids", "attention_mask", "position_ids"}
            extra |= {n for n, v in static.items() if isinstance(v, geometry.HostArray)}
            if extra:
                raise UnsupportedModelError(
                    f"generate() of {type(self.module).__name__} does not take {', '.join(sorted(extra))}.",
                    "The model has no KV cache that hfax can use, so every step would read them again.",
                    "Call the model directly, or generate with plain transformers.",
                )
            return self._whole_text(params, inputs["input_ids"], inputs["attention_mask"], static, capacity)
        inputs = dict(inputs)
        ids = inputs["decoder_input_ids" if traits.is_encoder_decoder else "input_ids"]
        if traits.takes_position_ids and not traits.is_encoder_decoder and "position_ids" not in inputs:
            inputs["position_ids"] = text_positions(inputs["attention_mask"])
        inputs_mask = inputs.get("attention_mask")
        if not traits.takes_attention_mask:
            inputs.pop("attention_mask", None)

        def call(module: torch.nn.Module) -> tuple[jax.Array, Arrays]:
            mask = None if traits.is_encoder_decoder else inputs_mask
            cache = self._make_cache(
                capacity, prompt_length=ids.shape[1], keeps_windows=keeps_windows, attention_mask=mask
            )
            arguments, encoded = tracing.wrap(inputs), {}
            if traits.is_encoder_decoder:
                outputs, arguments = run_encoder(module, arguments)
                encoded = {f"encoder.{n}": tracing.unwrap(t) for n, t in outputs.items() if isinstance(t, torch.Tensor)}
                arguments["encoder_outputs"] = outputs
            out = module(
                **arguments,
                **tracing.wrap_constants(static),
                **self._cache_arguments(cache),
                **self._keep_last(ids.shape[1]),
            )
            return _last(tracing.unwrap(out.logits)), _cache_arrays(cache, out) | encoded

        kept: Arrays = {}
        logits, arrays = self._call(params, call, kept=kept, checks=checks)
        arrays |= {_ON_MODULES + name: array for name, array in kept.items()}
        return logits, constrain_cache(arrays)

    def decode_step(
        self,
        params: Mapping[str, jax.Array],
        cache: Arrays,
        tokens: jax.Array,
        *,
        length: jax.Array,
        positions: jax.Array,
        attention_mask: jax.Array,
        capacity: int,
        static: Mapping[str, Any],
        repeated: Mapping[str, jax.Array] | None = None,
        keeps_windows: bool = True,
    ) -> tuple[jax.Array, Arrays]:
        """Run the next token, or the next few, of every sequence.

        Args:
            params: the weights.
            cache: the cache arrays from `prefill` or the previous step.
            tokens: [batch, new] int32.
            length: scalar int32, tokens in the cache.
            positions: [batch] int32, the position of the first new token among its sequence's real tokens; [batch, n] if a token
                has several (text, time, height and width).
            attention_mask: for decoders [batch, capacity], 0 at prompt padding; for encoder-decoders the encoder mask, of length
                0 if there is none.
            capacity: cache capacity, in tokens.
            static: options passed to `prefill`, without prompt-specific ones.
            repeated: further per-token inputs, [batch, …], copied from the last prompt token.
            keeps_windows: as passed to `prefill`.

        Returns:
            Logits [batch, new, vocab] float32, and the cache arrays.
        """
        traits, new = self.traits, tokens.shape[1]
        if not traits.has_usable_cache:
            ids = jax.lax.dynamic_update_slice_in_dim(cache["text.ids"], tokens, length, axis=1)
            mask = jnp.where(jnp.arange(capacity) <= length, attention_mask, 0)
            logits, _ = self._whole_text(params, ids, mask, static, capacity, last=length)
            return logits[:, None], {"text.ids": ids}
        kept = {n.removeprefix(_ON_MODULES): a for n, a in cache.items() if n.startswith(_ON_MODULES)}
        state = {name: a for name, a in cache.items() if not name.startswith(("encoder.", _ON_MODULES))}
        # the cache is longer than the text, and some models apply no mask for a single token
        is_written = (jnp.arange(capacity) < length + new).astype(jnp.int32)
        inputs: dict[str, Any] = {}
        if traits.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens
            if attention_mask.shape[1]:
                inputs["attention_mask"] = attention_mask
            if traits.takes_decoder_mask:
                inputs["decoder_attention_mask"] = jnp.broadcast_to(is_written, (len(tokens), capacity))
        else:
            inputs["input_ids"] = tokens
            if traits.takes_position_ids:
                inputs["position_ids"] = jnp.moveaxis(positions, 0, -1)[..., None] + jnp.arange(
                    new, dtype=positions.dtype
                )
            inputs |= {name: jnp.repeat(array[:, None], new, axis=1) for name, array in (repeated or {}).items()}
            if traits.takes_attention_mask and not traits.has_recurrent_layers:
                inputs["attention_mask"] = attention_mask * is_written

        def call(module: torch.nn.Module) -> tuple[jax.Array, Arrays]:
            cache_object = self._make_cache(
                capacity,
                length=length,
                arrays=state,
                keeps_windows=keeps_windows,
                attention_mask=None if traits.is_encoder_decoder else attention_mask,
            )
            arguments = {**tracing.wrap(inputs), **static, **self._cache_arguments(cache_object)}
            if traits.is_encoder_decoder:
                encoded = {
                    n.removeprefix("encoder."): tracing.wrap(a) for n, a in cache.items() if n.startswith("encoder.")
                }
                arguments["encoder_outputs"] = EncoderOutputs(encoded)
            with decoder_padding(None if traits.is_encoder_decoder else tracing.wrap(attention_mask)):
                out = module(**arguments)
            logits = tracing.unwrap(out.logits)[:, -new:].astype(jnp.float32)
            return logits, cache | _cache_arrays(cache_object, out)

        logits, arrays = self._call(params, call, kept=kept)
        arrays |= {_ON_MODULES + name: array for name, array in kept.items()}
        return logits, constrain_cache(arrays)

    def run_rows(
        self,
        params: Mapping[str, jax.Array],
        pools: Arrays,
        tokens: jax.Array,
        rows: Rows,
        wanted: jax.Array,
    ) -> tuple[jax.Array, Arrays]:
        """One step of continuous batching: tokens of several sequences, including prompt chunks, packed in one row.

        Args:
            params: the weights.
            pools: pages of each layer, with the names of this model's `pool_shapes`.
            tokens: [tokens] int32.
            rows: maps tokens to sequences.
            wanted: [n] int32, indices of the tokens for which to return logits.

        Returns:
            Logits [n, vocab] float32, and the pools.

        Raises:
            UnsupportedModelError: the model's state or attention does not support pages.
        """
        traits, count = self.traits, tokens.shape[0]
        if (why := self.why_not_pages()) is not None:
            raise UnsupportedModelError(
                why, "A step packs the tokens of several sequences into one row.", "Use one cache slot per sequence."
            )

        def call(module: torch.nn.Module) -> tuple[jax.Array, Arrays]:
            config: Any = module.config
            cache = make_pooled_cache(config, tracing.JaxPoolOps(rows), 2 * count + 2, tracing.wrap(pools))
            inputs = {
                "input_ids": tokens[None],
                "position_ids": jnp.maximum(rows.positions(count), 0)[None],
            }
            keep = {"logits_to_keep": tracing.wrap(wanted)} if traits.takes_logits_to_keep else {}
            out = module(**tracing.wrap(inputs), **self._cache_arguments(cache), **keep)
            logits = tracing.unwrap(out.logits)[0]
            if not keep:
                logits = logits[wanted]
            return logits.astype(jnp.float32), {n: tracing.unwrap(a) for n, a in pooled_arrays(cache).items()}

        return self._call(params, call)

    def why_not_pages(self) -> str | None:
        """Why `run_rows` does not support the model, as far as that shows without a trace; None if nothing speaks against it."""
        traits, config = self.traits, self.module.config
        scaling = {str((p or {}).get("rope_type")) for p in _rope_parameters(config)}
        reasons = {
            "it is an encoder-decoder": traits.is_encoder_decoder,
            "it has recurrent state": traits.has_recurrent_layers or traits.cache_argument != "past_key_values",
            "it has no KV cache": not traits.has_usable_cache,
            "it computes positions itself": not traits.takes_position_ids or traits.counts_padding,
            "it reads more than tokens": bool(set(traits.repeated_inputs) & {"cross_attention_mask"}),
            "it does not generate token by token": unlike_general_loop(self.module) is not None,
            "its rotary embedding depends on the longest sequence in the batch": bool(
                scaling & {"dynamic", "longrope"}
            ),
        }
        reason = next((reason for reason, is_so in reasons.items() if is_so), None)
        return reason and f"{type(self.module).__name__} does not support paged attention: {reason}."

    def _whole_text(
        self,
        params: Mapping[str, jax.Array],
        ids: jax.Array,
        mask: jax.Array,
        static: Mapping[str, Any],
        capacity: int,
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """Run a sequence without a cache: logits after token `last` (None: after the end), and the sequence as the "cache".

        Tokens after `last` are masked, and causal attention ignores them.
        """
        if self.traits.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} takes no cache in its forward.",
                "Compiled decoding of encoder-decoders keeps the keys and values of past tokens between steps.",
                "Call the model directly instead of generate().",
            )
        if (config := self.module.config).model_type in APPENDS_MASK:
            if last is None:
                buffer = jnp.pad(ids, ((0, 0), (0, 1)))
                place: Any = ids.shape[1]
            else:
                buffer, place = ids, last + 1
            buffer = jax.lax.dynamic_update_slice_in_dim(
                buffer, jnp.full((len(ids), 1), config.mask_token_id, ids.dtype), place, axis=1
            )
            all_seen = jnp.broadcast_to(jnp.arange(buffer.shape[1]) <= place, buffer.shape).astype(jnp.int32)
            logits = self._text_logits(
                params, {"input_ids": buffer, "attention_mask": all_seen, **self._language(buffer)}, static
            )
            logits = jax.lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False).astype(jnp.float32)
            return logits, {"text.ids": jnp.pad(ids, ((0, 0), (0, capacity - ids.shape[1])))} if last is None else {}
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.traits.takes_attention_mask:
            inputs["attention_mask"] = mask
        if self.traits.takes_position_ids:
            inputs["position_ids"] = text_positions(mask)
        if "use_cache" in inspect.signature(self.module.forward).parameters:
            inputs["use_cache"] = False
        logits = self._text_logits(params, inputs, static)
        if last is None:
            return _last(logits), {"text.ids": jnp.pad(ids, ((0, 0), (0, capacity - ids.shape[1])))}
        return jax.lax.dynamic_index_in_dim(logits, last, axis=1, keepdims=False).astype(jnp.float32), {}

    def _language(self, ids: jax.Array) -> dict[str, jax.Array]:
        """The language input of each token, if the config sets a language."""
        language = getattr(self.module.config, "lang_id", None)
        return {} if language is None else {"langs": jnp.full_like(ids, language)}

    def _text_logits(
        self, params: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array], static: Mapping[str, Any]
    ) -> jax.Array:
        def call(module: torch.nn.Module) -> jax.Array:
            return tracing.unwrap(module(**tracing.wrap(inputs), **static, return_dict=True).logits)

        return self._call(params, call)

    def _make_cache(
        self,
        capacity: int,
        length: jax.Array | None = None,
        arrays: Arrays | None = None,
        prompt_length: int | None = None,
        keeps_windows: bool = True,
        attention_mask: jax.Array | None = None,
    ) -> Any:
        """The value that forward takes as `cache_argument`."""
        if self.traits.cache_argument == "state":
            return [tracing.wrap(arrays[f"state.{i}"]) for i in range(len(arrays))] if arrays else None
        if self.module.config.model_type == "xlstm":
            return _RnnStates(tracing.wrap(arrays)) if arrays else None
        traced_length = None
        if length is not None:
            traced_length = tracing.wrap(length)
            traced_length.at_least = (
                1  # a prompt has at least one token, so code that checks for an empty cache gets False
            )
        config: Any = self.module.config
        where, padding = target.current(), None
        is_wanted = where is not None and where.pages and keeps_windows and attention_mask is not None
        if is_wanted and paged.fits(_head_dim(config)):
            padding = tracing.wrap((attention_mask == 0).sum(axis=1, dtype=jnp.int32))
        return make_cache(
            config,
            tracing.JaxCacheOps(),
            capacity,
            length=traced_length,
            arrays=tracing.wrap(arrays) if arrays is not None else None,
            has_encoder=self.traits.is_encoder_decoder,
            prompt_length=prompt_length,
            keeps_windows=keeps_windows,
            padding=padding,
        )

    def _cache_arguments(self, cache: Any) -> dict[str, Any]:
        assert self.traits.cache_argument is not None
        return {self.traits.cache_argument: cache, "use_cache": True, "return_dict": True}

    def _keep_last(self, length: int) -> dict[str, int]:
        return {"logits_to_keep": 1} if self.traits.takes_logits_to_keep and length > 1 else {}

    def _call(self, params: Mapping[str, jax.Array], call: Callable[[torch.nn.Module], Any], **options: Any) -> Any:
        """Run `call(module)` in a trace with these weights; see `call_module` for the options."""
        return tracing.call_module(
            self.module,
            self._all(params),
            call,
            lock=self._lock,
            used=self.patches_used,
            constants=self._constants,
            **options,
        )

    def _all(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        weights = {**self._buffers, **params}
        for alias, name in self._tied.items():
            weights.setdefault(alias, weights[name])
        return weights


def _as_traced(array: Any) -> jax.Array:
    """An input's array; raises for integers that do not fit into 32 bits, which JAX would silently truncate."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy() if array.dtype == torch.int64 else to_numpy(array)
    return jnp.asarray(narrow(np.asarray(array)) if isinstance(array, (np.ndarray, np.generic)) else array)


def _head_dim(config: Any) -> int | None:
    """Head dimension of the text model; None if it varies."""
    text: Any = config.get_text_config(decoder=True)
    try:
        heads = getattr(text, "num_attention_heads", None)
        return getattr(text, "head_dim", None) or (text.hidden_size // heads if isinstance(heads, int) else None)
    except RuntimeError:  # transformers' error for values that differ between layers
        return None


def _rope_parameters(config: Any) -> list[dict[str, Any] | None]:
    """The rotary embedding parameters, one entry per kind of layer if they differ."""
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return list(found.values()) if found and all(isinstance(v, dict) for v in found.values()) else [found]


def text_positions(mask: jax.Array) -> jax.Array:
    """Positions among the tokens where `mask`, [batch, length], is 1; 0 before the first."""
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


def _cache_arrays(cache: Any, out: Any) -> Arrays:
    """The arrays of a cache, or of the list of states in an output."""
    if isinstance(cache, Cache):
        return {name: tracing.unwrap(a) for name, a in cache_arrays(cache).items()}
    if (own := getattr(out, "cache_params", None)) is not None:
        layers = own.rnn_state.items()
        return {f"state.{layer}.{i}": tracing.unwrap(a) for layer, states in layers for i, a in enumerate(states)}
    return {f"state.{i}": tracing.unwrap(a) for i, a in enumerate(out.state)}


class _RnnStates:
    """xLSTM's cache: three states per layer, which its code writes in place."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.seqlen_offset = 0
        self.rnn_state: dict[int, list[Any]] = {}
        for name in sorted(arrays, key=lambda name: [int(n) for n in name.split(".")[1:]]):
            self.rnn_state.setdefault(int(name.split(".")[1]), []).append(arrays[name])


def _last(logits: jax.Array) -> jax.Array:
    return logits[:, -1].astype(jnp.float32)


def _register(structure: Leaf | Static | Node) -> None:
    """Register every class in a result as a pytree, so that `jax.jit` can return it."""
    if isinstance(structure, Node):
        register_output_class(structure.cls)
        for child in structure.children:
            _register(child)
