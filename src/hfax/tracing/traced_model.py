"""A transformers module as pure functions of its weights.

Turns a skeleton into `apply` (one forward call), the two functions that generation compiles, `prefill` and `decode_step`, and the
engine's `run_rows`. All of them take a flat dict of arrays and return arrays; inside, the module's own PyTorch code is traced.
`caches` makes the cache objects, `whole_text` generates without one. This module does not know programs, devices or sampling.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from hfax.errors import UnsupportedModelError
from hfax.kernels.constraints import constrain_cache
from hfax.kernels.rows import Rows
from hfax.kv_cache.axes import rows_axis
from hfax.kv_cache.cache import only_read
from hfax.kv_cache.pooled import make_pooled_cache, pooled_arrays
from hfax.load.host_arrays import narrow, to_numpy
from hfax.load.skeleton import Skeleton
from hfax.patches import registry
from hfax.patches.masks import decoder_padding
from hfax.tracing import geometry, packed_images, whole_text
from hfax.tracing import torchax as tracing
from hfax.tracing.attention_weights import attention_weights
from hfax.tracing.caches import arrays_in, cache_arguments, open_cache, take_texts
from hfax.tracing.custom_code import custom_code_digest
from hfax.tracing.encoders import EncoderOutputs, run_encoder
from hfax.tracing.pytrees import register_output_class
from hfax.tracing.structure import Leaf, Node, Static, class_of, flatten, is_array, unflatten
from hfax.tracing.training import Training
from hfax.tracing.traits import read_traits, unlike_general_loop, why_not_pages
from hfax.tracing.whole_text import last_logits, text_positions

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
        self._packs_images: dict[frozenset[str], bool] = {}
        self._constants = {n: b for n, b in skeleton.buffers.items() if not b.ndim and not b.is_floating_point()}
        """Integer buffers: sizes that modelling code stores."""

    @functools.cached_property
    def key(self) -> str:
        """Everything about the module that a trace depends on; part of its programs' keys."""
        return repr(tuple(self.key_parts.values()))

    @functools.cached_property
    def key_parts(self) -> dict[str, str]:
        """The parts of `key` by name."""
        module = self.module
        cls = type(module)
        plain = {name: value for name, value in module.config.to_dict().items() if name != "_name_or_path"}
        config = json.dumps(plain, sort_keys=True, default=str)
        implementations = (module.config._attn_implementation, getattr(module.config, "_experts_implementation", None))
        source = custom_code_digest(module)
        patches = registry.fingerprint()
        return {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "config": config,
            "implementation of attention or experts": repr(implementations),
            "tied weights": repr(sorted(self._tied.items())),
            "source of the model's own code": source,
            "patches": patches,
        }

    def use_buffers(self, buffers: Mapping[str, jax.Array]) -> None:
        """Replace the buffers, for example by copies on other devices."""
        self._buffers = dict(buffers)

    def prepare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs after input patches, with geometry as `HostArray`s and the positions derived from it."""
        prepared = dict(inputs)
        if not any(isinstance(v, Tracer) for v in prepared.values()):
            prepared = registry.prepare_inputs(self.module, prepared, self.patches_used)
        prepared = geometry.keep_on_host(prepared, self.traits.traced_geometry)
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
        prepared = self.prepare(kwargs)
        arrays, structure = flatten((args, prepared), is_array)
        packs = self.packs_images(params, prepared)

        def call(module: torch.nn.Module) -> Any:
            call_args, call_kwargs = unflatten(structure, tracing.wrap([_as_traced(a) for a in arrays]))
            call_kwargs = tracing.wrap_constants(call_kwargs)
            images = packed_images.packed(module, call_kwargs, leaves_features=True)
            with (
                attention_weights(module, call_kwargs),
                images if packs else contextlib.nullcontext(call_kwargs) as given,
            ):
                outputs, out_structure = flatten(module(*call_args, **given), tracing.is_tensor)
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

    def packs_images(self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> bool:
        """Whether images of a forward call are packed, with grids that are arguments of the program.

        Args:
            params: the weights, or their shapes.
            inputs: inputs by name. Grids that are constants of the program are `HostArray`s.
        """
        grids = {patches: grid for patches, grid in geometry.GRIDS.items() if is_array(inputs.get(grid))}
        names = ("input_ids", *grids, *grids.values())
        if not grids or any(inputs.get(name) is None for name in names):
            return False
        if inputs.get("position_ids") is None and geometry.reads_grids_for_positions(self.module):
            return False
        return self.takes_packed_images(params, {name: inputs[name] for name in names})

    def takes_packed_images(self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> bool:
        """Whether programs can take the grids of images as arguments, so that one program reads images of many sizes.

        Args:
            params: the weights, or their shapes.
            inputs: `input_ids`, packed patches and their grids by name; only names and shapes matter. A mask and positions of
                the ids are added.
        """
        ids = inputs["input_ids"]
        inputs = {"attention_mask": ids, "position_ids": ids, **inputs}
        if (key := frozenset(inputs)) not in self._packs_images:
            found: list[bool] = []

            def look(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
                found.append(packed_images.takes_packed(module, arguments))

            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (dict(params), dict(inputs)))
            jax.eval_shape(lambda params, inputs: self.inspect(params, look, inputs, {}), *shapes)
            self._packs_images[key] = found[0]
        return self._packs_images[key]

    def prefill(
        self,
        params: Mapping[str, jax.Array],
        inputs: Mapping[str, jax.Array],
        static: Mapping[str, Any],
        capacity: int,
        checks: dict[str, jax.Array] | None = None,
        *,
        keeps_windows: bool = True,
        cache_dtype: jnp.dtype | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """Run the prompts, with their images and audio, and fill a new cache.

        Args:
            params: the weights.
            inputs: model inputs; for decoders `input_ids` and `attention_mask`, both [batch, length], left-padded.
            static: further keyword arguments that are not traced: options, and `HostArray`s of the prompts' geometry.
            capacity: cache capacity, in tokens.
            checks: collects the conditions that must hold, see `apply_checked`.
            keeps_windows: sliding-window layers keep only their window; False: all tokens, so that tokens can be rolled back.
            cache_dtype: of the cached keys and values; None: the model's.

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
            run = functools.partial(self._call, params)
            if cache_dtype is not None:
                raise _nothing_to_round(self.module)
            return whole_text.prefill(self.module, traits, run, inputs, static, capacity)
        inputs = dict(inputs)
        ids = inputs["decoder_input_ids" if traits.is_encoder_decoder else "input_ids"]
        if traits.takes_position_ids and not traits.is_encoder_decoder and "position_ids" not in inputs:
            inputs["position_ids"] = text_positions(inputs["attention_mask"])
        inputs_mask = inputs.get("attention_mask")
        if not traits.takes_attention_mask:
            inputs.pop("attention_mask", None)
        if "inputs_embeds" in inputs:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = inputs["inputs_embeds"].astype(str(self.module.dtype).removeprefix("torch."))

        def call(module: torch.nn.Module) -> tuple[jax.Array, Arrays]:
            mask = None if traits.is_encoder_decoder else inputs_mask
            cache = open_cache(
                module,
                traits,
                capacity,
                prompt_length=ids.shape[1],
                keeps_windows=keeps_windows,
                attention_mask=mask,
                dtype=cache_dtype,
            )
            arguments, encoded = tracing.wrap(inputs), {}
            if traits.is_encoder_decoder:
                outputs, arguments = run_encoder(module, arguments)
                encoded = {f"encoder.{n}": tracing.unwrap(t) for n, t in outputs.items() if isinstance(t, torch.Tensor)}
                arguments["encoder_outputs"] = outputs
            with packed_images.packed(module, arguments) as arguments:
                out = module(
                    **arguments,
                    **tracing.wrap_constants(static),
                    **cache_arguments(traits, cache),
                    **self._keep_last(ids.shape[1]),
                )
            return last_logits(tracing.unwrap(out.logits)), arrays_in(cache, out) | encoded

        kept: Arrays = {}
        logits, arrays = self._call(params, call, kept=kept, checks=checks)
        if cache_dtype is not None and all(array.dtype != cache_dtype for array in arrays.values()):
            raise _nothing_to_round(self.module)
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
            run = functools.partial(self._call, params)
            return whole_text.decode_step(self.module, traits, run, cache, tokens, length, attention_mask, static)
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
            cache_object = open_cache(
                module,
                traits,
                capacity,
                length=length,
                arrays=state,
                keeps_windows=keeps_windows,
                attention_mask=None if traits.is_encoder_decoder else attention_mask,
            )
            arguments = {**tracing.wrap(inputs), **static, **cache_arguments(traits, cache_object)}
            if traits.is_encoder_decoder:
                encoded = {
                    n.removeprefix("encoder."): tracing.wrap(a) for n, a in cache.items() if n.startswith("encoder.")
                }
                arguments["encoder_outputs"] = EncoderOutputs(encoded)
            with decoder_padding(None if traits.is_encoder_decoder else tracing.wrap(attention_mask)):
                out = module(**arguments)
            logits = tracing.unwrap(out.logits)[:, -new:].astype(jnp.float32)
            return logits, cache | arrays_in(cache_object, out)

        logits, arrays = self._call(params, call, kept=kept)
        arrays |= {_ON_MODULES + name: array for name, array in kept.items()}
        return logits, constrain_cache(arrays)

    def reorder(self, cache: Arrays, order: jax.Array) -> Arrays:
        """The cache with the texts of each prompt in another order.

        What belongs to a prompt, not to a text, stays as it is: the encoder output, and keys and values of it or of images.

        Args:
            cache: the cache arrays, whose rows are the texts, prompt by prompt.
            order: [batch, texts] int32, the text of the prompt that each place takes; a text may be in several places.
        """
        config: Any = self.module.config
        fixed = only_read(config, cache) | {name for name in cache if name.startswith("encoder.")}
        moved = {n: a if n in fixed else take_texts(a, order, rows_axis(n)) for n, a in cache.items()}
        return constrain_cache(moved)

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
        if (why := why_not_pages(self.module, traits)) is not None:
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
            out = module(**tracing.wrap(inputs), **cache_arguments(traits, cache), **keep)
            logits = tracing.unwrap(out.logits)[0]
            if not keep:
                logits = logits[wanted]
            return logits.astype(jnp.float32), {n: tracing.unwrap(a) for n, a in pooled_arrays(cache).items()}

        return self._call(params, call)

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


def _nothing_to_round(module: torch.nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} has no KV cache to hold in another dtype.",
        "kv_cache_dtype rounds the keys and values of attention layers; recurrent states keep the model's dtype.",
        "Leave kv_cache_dtype out.",
    )


def _as_traced(array: Any) -> jax.Array:
    """An input's array; raises for integers that do not fit into 32 bits, which JAX would silently truncate."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy() if array.dtype == torch.int64 else to_numpy(array)
    return jnp.asarray(narrow(np.asarray(array)) if isinstance(array, (np.ndarray, np.generic)) else array)


def _register(structure: Leaf | Static | Node) -> None:
    """Register every class in a result as a pytree, so that `jax.jit` can return it."""
    if isinstance(structure, Node):
        register_output_class(class_of(structure))
        for child in structure.children:
            _register(child)
