"""Runs a torch module on JAX arrays inside a trace.

Turns `(module, weights, arguments)` into a pure call on `jax.Array`s or tracers. The environment that maps torch calls to JAX is
hfax's own and entered for one call at a time, so its modes are invisible outside `call_module`. The attention, mask and experts
functions that hfax registers with transformers are connected here; their implementations are in `hfax.patches`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import masking_utils, modeling_utils
from transformers.integrations import moe

from hfax.errors import UnsupportedModelError, line_of_error
from hfax.kernels import attention as attention_math
from hfax.kernels import paged, precision, target
from hfax.kernels import pool as pools
from hfax.kernels.cache_numbers import FP8, to_cache
from hfax.kernels.cache_write import cache_write
from hfax.kernels.latents import Latents, queries_of_latents, values_of_latents
from hfax.patches import masks, registry
from hfax.patches.control_flow import applying_functions, collecting_checks
from hfax.patches.packed_images import PackedSegments
from hfax.patches.patch import forwards_replaced
from hfax.tracing.adapters import adapted, onto_parameters, split_adapters
from hfax.tracing.geometry import HostArray
from hfax.tracing.training import Training, in_train_mode, rematerialised

_CLIENT_OPTIONS = "jax_pjrt_client_create_options"


def _import_environment() -> Any:
    """hfax's environment, without what torchax's import changes for the whole process.

    torchax turns off torch's encoder fast path, sets an environment variable and an option of JAX's clients, and names a device
    "jax": torch then takes it for an accelerator, asks for its streams, and neither `torch.compile` nor dynamo works on the CPU
    ("PyTorch is not linked with support for jax devices"). hfax's tensors are on torch's meta device and need no name. A name
    cannot be taken back, so it must not be given.
    """
    names = (torch.utils, "rename_privateuse1_backend"), (torch, "_register_device_module")
    before = [(owner, name, getattr(owner, name)) for owner, name in names]
    fast_path, variables = torch.backends.mha.get_fastpath_enabled(), dict(os.environ)
    options = getattr(jax.config, _CLIENT_OPTIONS, None)
    try:
        for owner, name, _ in before:
            setattr(owner, name, lambda *args, **kwargs: None)
        from hfax.tracing import environment
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
    torch.backends.mha.set_fastpath_enabled(fast_path)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    if getattr(jax.config, _CLIENT_OPTIONS, None) != options:
        jax.config.update(_CLIENT_OPTIONS, options)
    _describe_device()
    return environment


def _describe_device() -> None:
    """Give torch what it asks about the device of tensors of a trace.

    Its constructors import the module, and `torch.autocast`, also with `enabled=False`, and `torch.manual_seed` call its functions.
    """
    name = torch.device("privateuseone").type
    if hasattr(torch, name):  # another backend has taken the device
        return
    module: Any = types.ModuleType(f"torch.{name}")
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    setattr(torch, name, module)
    sys.modules[module.__name__] = module


_tracing = _import_environment()
from hfax.tracing import custom_gradients  # noqa: E402 (it needs the environment)
from hfax.tracing.experts_interface import experts_forward  # noqa: E402
from hfax.tracing.operands import as_array, is_tensor  # noqa: E402
from hfax.tracing.trace_tensor import TraceTensor  # noqa: E402


def _environment() -> Any:
    """The environment, with the lowerings of the patches registered so far."""
    return _make_environment(registry.version())


@functools.lru_cache(maxsize=1)
def _make_environment(version: int) -> Any:
    environment = _tracing.TraceEnvironment()
    for patch in registry.op_patches():
        for op in patch.resolve():
            given = {"next_key": environment.get_and_rotate_prng_key} if patch.draws else {}
            lower = _recorded(patch.name, functools.partial(patch.lower, **given), environment.used)
            lower.takes_quantized = patch.takes_quantized  # pyright: ignore[reportFunctionMemberAccess]
            environment.lower(op, lower)
    _register_interfaces()
    return environment


def _recorded(name: str, function: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        used.add(name)
        return function(*args, **kwargs)

    return lower


def wrap(tree: Any) -> Any:
    """Wrap every `jax.Array` or tracer in a pytree as a tensor for torch code. Makes no copy."""
    environment = _environment()
    return jax.tree.map(lambda leaf: environment.wrap(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def wrap_constants(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every `HostArray` as a tensor with values that torch code can read."""
    return {n: constant(a.to_torch) if isinstance(a, HostArray) else a for n, a in arguments.items()}


def constant(make: Callable[[], torch.Tensor]) -> TraceTensor:
    """A tensor of the trace with a value that torch code can read.

    Args:
        make: returns the value as a torch tensor.
    """
    return _environment().constant(make)


def unwrap(value: Any) -> Any:
    """The `jax.Array` in a tensor of a trace; a constant torch tensor becomes an array; anything else is returned unchanged."""
    return as_array(value)


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a JAX function from torch code of a trace: tensors in, tensors out."""
    out = function(*(unwrap(a) for a in args), **{name: unwrap(a) for name, a in kwargs.items()})
    environment = _environment()
    if isinstance(out, tuple):
        return tuple(environment.wrap(o) for o in out)
    return environment.wrap(out)


def _call_torch(function: Callable[..., Any], *arrays: jax.Array) -> jax.Array:
    """Call torch code of a trace from within a JAX function: arrays in, an array out."""
    return unwrap(function(*(wrap(a) for a in arrays)))


def call_module(
    module: torch.nn.Module,
    weights: Mapping[str, jax.Array],
    call: Callable[[torch.nn.Module], Any],
    *,
    lock: contextlib.AbstractContextManager[Any] | None = None,
    training: Training | None = None,
    used: set[str] | None = None,
    kept: dict[str, jax.Array] | None = None,
    checks: dict[str, jax.Array] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Run `call(module)` with the module's parameters and buffers replaced by `weights`.

    Args:
        module: a skeleton's module.
        weights: every parameter and buffer by name, including tied aliases, and arrays of low-rank adapters.
        call: gets the module; builds its arguments with `wrap` and reads its results with `unwrap`.
        lock: lock of the module, which supports one trace at a time; None: the module is not shared.
        training: how the pass is differentiated; None: it is not.
        used: collects the names of the patches used.
        kept: arrays that modules hold as attributes besides weights ("layers.0.rnn.state"), which some keep between calls;
            updated in place with those left by `call`. None: start without any, and drop those left.
        constants: buffers with values that modelling code may read, used instead of those in `weights`.
        checks: collects the conditions on traced values that modelling code checks: description mapped to a scalar bool.

    Returns:
        The result of `call`.
    """
    environment = _environment()
    own, adapters = onto_parameters(module, *split_adapters(weights))
    tensors = {name: environment.wrap(array) for name, array in own.items()}
    tensors |= {name: environment.constant(tensor.clone) for name, tensor in (constants or {}).items()}
    training = training or Training()
    with (
        lock or contextlib.nullcontext(),
        environment.override_property(prng=jax.random.key(0) if training.key is None else training.key),
        registry.patched(module) as patches_used,
        torch.set_grad_enabled(target.may_be_differentiated()),  # modelling code turns gradients off in places
        torch.nn.utils.stateless._reparametrize_module(module, tensors, tie_weights=False),
        _kept_on_modules(module, kept if kept is not None else {}),
        in_train_mode(module) if training.key is not None else contextlib.nullcontext(),
        adapted(module, adapters, environment, training.lora_dropout),
        rematerialised(module, environment) if training.remat else contextlib.nullcontext(),
        _named_scopes(module),
        _entered(environment),
        precision.as_torch(),
        warnings.catch_warnings(),
    ):
        # torch's integers have 64 bits, JAX's 32 unless told otherwise; every index would warn.
        warnings.filterwarnings("ignore", message="Explicitly requested dtype", category=UserWarning)
        environment.used.clear()
        conditions: dict[str, Any] = {}
        try:
            with collecting_checks(conditions), applying_functions(_apply_function):
                out = call(module)
            if checks is not None:
                checks |= {what: unwrap(condition) for what, condition in conditions.items()}
            return out
        except Exception as error:
            explained = _explain(error, module)
            if explained is None:
                raise
            raise explained from error
        finally:
            if used is not None:
                used |= patches_used | environment.used


def _apply_function(kind: Any, args: tuple[Any, ...]) -> Any:
    """`kind.apply(*args)` of a `torch.autograd.Function`, whose `backward` is traced when the gradient is taken."""
    return custom_gradients.apply_function(
        kind, args, wrap, retrace=lambda backward: call_module(torch.nn.Identity(), {}, lambda _: backward())
    )


@contextlib.contextmanager
def _named_scopes(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, operations carry the names of their submodules in profiles: "model/layers.3/self_attn/q_proj"."""
    is_for_tpu = target.is_for("tpu")

    def scoped(name: str, is_layer: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_for_tpu and is_layer and args and is_tensor(args[0]):
                args = (_computed_before(args[0]), *args[1:])
            with jax.named_scope(name):
                return forward(*args, **kwargs)

        return run

    parts = {path: part for path, part in module.named_modules() if path}
    named = []
    for path, part in parts.items():
        is_layer = isinstance(parts.get(path.rpartition(".")[0]), torch.nn.ModuleList)
        named.append((part, scoped(_name_in_its_caller(path, parts), is_layer, part.forward)))
    with forwards_replaced(named):
        yield


def _computed_before(hidden: torch.Tensor) -> torch.Tensor:
    """The input of a layer, with a barrier against fusion with earlier layers.

    Otherwise XLA:TPU sums the outputs of all layers again for the last one, and keeps them all alive until then.
    """
    return wrap(jax.lax.optimization_barrier(unwrap(hidden)))


def _name_in_its_caller(path: str, parts: Mapping[str, torch.nn.Module]) -> str:
    """The path relative to the nearest parent module that is called; module lists are not."""
    above = path.rpartition(".")[0]
    while isinstance(parts.get(above), (torch.nn.ModuleList, torch.nn.ModuleDict)):
        above = above.rpartition(".")[0]
    return path[len(above) :].lstrip(".")


@contextlib.contextmanager
def _kept_on_modules(module: torch.nn.Module, kept: dict[str, jax.Array]) -> Iterator[None]:
    """Set the attributes in `kept` on modules for the block, then collect the attributes that hold tensors and remove them.

    A traced tensor left on a module would leak into the next trace. So would a plain value: RWKV records that it has rescaled its
    weights, but every trace gets the original weights.
    """
    parts = dict(module.named_modules())
    before = {path: dict(part.__dict__) for path, part in parts.items()}
    for name, array in kept.items():
        path, _, attribute = name.rpartition(".")
        parts[path].__dict__[attribute] = wrap(array)
    try:
        yield
    finally:
        kept.clear()
        for path, part in parts.items():
            for attribute, value in list(part.__dict__.items()):
                if isinstance(value, TraceTensor):
                    kept[f"{path}.{attribute}"] = value.jax()
                    if attribute in before[path]:
                        part.__dict__[attribute] = before[path][attribute]
                    else:
                        del part.__dict__[attribute]
                elif isinstance(value, _PLAIN) and value is not before[path].get(attribute, value):
                    part.__dict__[attribute] = before[path][attribute]
                elif isinstance(value, dict) and attribute not in _OF_TORCH:
                    # caches of earlier results, by size or device
                    for key in [key for key, item in value.items() if isinstance(item, TraceTensor)]:
                        del value[key]


_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that hold its weights and parts."""


def _explain(error: Exception, module: torch.nn.Module) -> UnsupportedModelError | None:
    """The user-facing error for a failed trace; None if the error is clear already."""
    where = getattr(error, "where", None) or line_of_error(error)
    first = str(error).partition("\n")[0]
    if isinstance(error, _tracing.VALUE_ERRORS):
        return UnsupportedModelError(
            f"{type(module).__name__} reads the value of a tensor while it is traced ({where}): {first}",
            "A program is compiled before the values are known.",
            "Register a patch for that function (hfax.register_patch), or report the architecture to the project.",
        )
    if isinstance(error, _tracing.OperatorNotFound) or "has no lowering" in first:
        return UnsupportedModelError(
            f"{type(module).__name__} uses a torch operation that hfax cannot lower yet ({where}): {first}",
            "Neither hfax nor torchax has a JAX lowering for it.",
            "Register an OpPatch for it (hfax.register_patch), or report the architecture to the project.",
        )
    return None


@contextlib.contextmanager
def _entered(environment: Any) -> Iterator[None]:
    environment.enable_torch_modes()
    try:
        yield
    finally:
        environment.disable_torch_modes()


class JaxCacheOps:
    """`hfax.kv_cache.CacheOps` on the tensors of a trace.

    Args:
        dtype: of the keys and values that a new cache holds; None: their own.
    """

    def __init__(self, dtype: jnp.dtype | None = None) -> None:
        self._dtype = dtype

    def stored(self, new: Any, scale: float = 1.0) -> Any:
        """See `CacheOps.stored`."""
        return new if self._dtype is None else wrap(to_cache(unwrap(new), self._dtype, scale))

    def readable(self, held: tuple[Any, Any], like: Any, scales: tuple[float, float]) -> tuple[Any, Any]:
        """See `CacheOps.readable`; kernels read the held numbers themselves."""
        if all(each.dtype == like.dtype for each in held):
            return held
        arrays = [unwrap(each) for each in held]
        keys, values = _scaled([array.astype(unwrap(like).dtype) for array in arrays], scales)
        keys.held, values.held = arrays
        return keys, values

    def write(self, buffer: Any, new: Any, start: Any, scale: float = 1.0) -> Any:
        """See `CacheOps.write`; in place where the buffer is donated."""
        return call_jax(functools.partial(cache_write, scale=scale), buffer, new, start)

    def pad_to(self, new: Any, capacity: int) -> Any:
        """See `CacheOps.pad_to`."""

        def pad(new: jax.Array) -> jax.Array:
            widths = [(0, 0)] * new.ndim
            widths[-2] = (0, capacity - new.shape[-2])
            return jnp.pad(new, widths)

        return call_jax(pad, new)

    def ring_positions(self, length: Any, window: int) -> Any:
        """See `CacheOps.ring_positions`."""

        def positions(length: jax.Array) -> jax.Array:
            slots = jnp.arange(window, dtype=jnp.int32)
            last = length.astype(jnp.int32) - 1
            return last - jnp.mod(last - slots, window) - slots

        return call_jax(positions, length)

    def ring_slot(self, length: Any, window: int) -> Any:
        """See `CacheOps.ring_slot`."""
        return call_jax(lambda length: jnp.mod(length.astype(jnp.int32), window), length)

    def watch(self, keys: Any, values: Any) -> None:
        """See `PagedCacheOps.watch`."""
        keys.pages = values.pages = paged.PromptKeys()

    def can_be_read(self, keys: Any) -> bool:
        """See `PagedCacheOps.can_be_read`."""
        return keys.pages is not None and keys.pages.can_be_read

    def fill_pages(self, key: Any, value: Any, padding: Any, capacity: int, window: int | None) -> Any:
        """See `PagedCacheOps.fill_pages`."""
        return wrap(paged.after_prompt(unwrap(key), unwrap(value), unwrap(padding), capacity, window))

    def write_pages(
        self,
        pages: Any,
        key: Any,
        value: Any,
        padding: Any,
        position: Any,
        capacity: int,
        scales: tuple[float, float],
    ) -> tuple[Any, Any, Any]:
        """See `PagedCacheOps.write_pages`."""
        newest = unwrap(position) + key.shape[2] - 1 - unwrap(padding)
        widths = key.shape[3], value.shape[3]
        before = paged.Pages(pages=unwrap(pages), slots=newest, capacity=capacity, widths=widths)
        written = before.with_tokens(*_divided((key, value), before.pages.dtype, scales))
        dense = [a.astype(unwrap(key).dtype) for a in written.read(unwrap(padding))]
        keys, values = _scaled(dense, scales if before.pages.dtype == FP8 else (1.0, 1.0))
        keys.pages = values.pages = written
        return wrap(written.pages), keys, values


class JaxPoolOps:
    """`hfax.kv_cache.pooled.PoolOps` on the tensors of a trace.

    Args:
        rows: maps the tokens of the step to sequences.
    """

    def __init__(self, rows: pools.Rows) -> None:
        self._rows = rows

    def write_rows(
        self, arrays: dict[str, Any], key: Any, value: Any, scales: tuple[float, float]
    ) -> tuple[dict[str, Any], Any, Any]:
        """See `PoolOps.write_rows`."""
        dtype = unwrap(next(iter(arrays.values()))).dtype
        before = pools.pool_of({n: unwrap(a) for n, a in arrays.items()}, self._rows)
        written = before.with_rows(*_divided((key, value), dtype, scales))
        keys, values = wrap(unwrap(key)), wrap(unwrap(value))
        keys.pool = values.pool = written
        keys.scales = scales if dtype == FP8 and scales != (1.0, 1.0) else None
        return {name: wrap(array) for name, array in pools.arrays_of(written).items()}, keys, values

    def is_read(self, key: Any) -> bool:
        """See `PoolOps.is_read`."""
        return key.pool is not None and key.pool.is_read


def _divided(states: tuple[Any, Any], dtype: jnp.dtype, scales: tuple[float, float]) -> list[jax.Array]:
    """New keys and values, divided by their scales where they will be held as float8."""
    arrays = [unwrap(each) for each in states]
    if dtype != FP8 or scales == (1.0, 1.0):
        return arrays
    return [to_cache(array, dtype, scale) for array, scale in zip(arrays, scales, strict=True)]


def _scaled(numbers: list[jax.Array], scales: tuple[float, float]) -> tuple[Any, Any]:
    """Keys and values of a cache, times their scales, which attention does without making these numbers."""
    if scales == (1.0, 1.0):
        keys, values = (wrap(array) for array in numbers)
        return keys, values
    keys, values = (
        wrap((array.astype(jnp.float32) * scale).astype(array.dtype))
        for array, scale in zip(numbers, scales, strict=True)
    )
    keys.scales, (keys.unscaled, values.unscaled) = scales, numbers
    return keys, values


def _attend_pool(
    pool: pools.Pool, query: Any, mask: Any, *, scale: float, softcap: float | None, sinks: Any, bias: Any
) -> tuple[Any, None]:
    """Attention over a pool, which supports only causal masks and sliding windows."""
    window = None
    if mask is not None:
        structure = masks.structure_of(mask)
        if not structure.is_causal or structure.padding is not None:
            raise _not_pooled("a custom mask")
        window = structure.window
    if bias is not None:
        raise _not_pooled("a position bias")

    def compute(query: jax.Array, sinks: Any) -> jax.Array:
        return pools.attend(query, pool, scale=scale, softcap=softcap, window=window, sinks=sinks)

    return call_jax(compute, query, sinks), None


def _not_pooled(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Attention has {what}.",
        "Paged attention supports only causal masks and sliding windows.",
        "Use one cache slot per sequence.",
    )


def _attention_forward(
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """transformers' attention interface: [batch, heads, length, dim] in, [batch, length, heads, dim] and probabilities out."""
    if (latents := key.latents) is not None:
        if not latents.is_expanded(query.shape[2]):
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            options = {"dropout": dropout, "is_causal": is_causal, "position_bias": position_bias, "softcap": softcap}
            kwargs |= {**options, "scaling": scaling, "s_aux": s_aux}
            return _attention_over_latents(module, query, latents, attention_mask, **kwargs)
        key, value = latents.expand()
        if isinstance(told := _pages_of(latents), paged.PromptKeys):
            key.pages = value.pages = told
    if s_aux is None:  # some modules pass sinks as an argument, under either name, others as an attribute
        s_aux = kwargs.get("sinks", getattr(module, "sinks", None))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and (all_real := masks.structure_of(attention_mask).all_real) is not None:
        attention_mask = attention_mask | all_real
    structure, causal_mask, segments = masks.structure_of(attention_mask), None, None
    block = structure.block
    if (within := structure.segments) is not None:
        segments = attention_math.Segments(ids=unwrap(within.ids), longest=within.longest)
    if structure.is_causal:
        causal_mask = attention_math.Causal(window=structure.window, is_real=unwrap(structure.padding))
    if (pool := key.pool) is not None:
        if not causal:
            raise _not_pooled("no causal mask")
        if value.pool is not pool:
            raise _not_pooled("values other than the cache's")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        of_keys, of_values = key.scales or (1.0, 1.0)
        out, probabilities = _attend_pool(
            pool, query, attention_mask, scale=scale * of_keys, softcap=softcap, sinks=s_aux, bias=position_bias
        )
        return (out if of_values == 1 else call_jax(_times, out, of_values)), probabilities
    of_layer, of_keys, of_values = key.pages, 1.0, 1.0
    pages = of_layer if of_layer is value.pages else None
    held = None if key.held is None or value.held is None else (key.held, value.held)
    if key.scales is not None and value.unscaled is not None:
        of_keys, of_values = key.scales
        # the pages, and the held numbers, are theirs
        key, value = wrap(key.unscaled), wrap(value.unscaled)
    elif key.scales is not None:
        pages = held = None
    drops = None
    if dropout:
        drops = attention_math.Dropout(rate=dropout, key=_environment().get_and_rotate_prng_key())
    num_queries, num_keys = query.shape[2], key.shape[2]
    scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) * of_keys
    if isinstance(of_layer, paged.PromptKeys):
        is_plain = (
            position_bias is None and drops is None and (structure.is_causal or (attention_mask is None and causal))
        )
        fits = paged.can_attend(query.shape[1], key.shape[1], scale=scale)
        of_layer.reads.append(is_plain and fits and pages is of_layer)

    def compute(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, bias: Any, sinks: Any) -> Any:
        if mask is None and causal and num_queries > 1:
            mask = attention_math.causal_mask(num_queries, num_keys)
        elif mask is not None:
            mask = attention_math.Mask(
                array=mask,
                block=None if block is None else functools.partial(_call_torch, block),
                causal=causal_mask,
                segments=segments,
                seen=unwrap(structure.seen),
            )
        out, probabilities = attention_math.attention(
            query,
            key,
            value,
            mask,
            scale=scale,
            softcap=softcap,
            position_bias=bias,
            sinks=sinks,
            pages=pages if isinstance(pages, paged.Pages) else None,
            held=held,
            dropout=drops,
        )
        return _times(out, of_values), probabilities

    return call_jax(compute, query, key, value, attention_mask, position_bias, s_aux)


def _attention_over_latents(
    module: torch.nn.Module, query: Any, latents: Latents, attention_mask: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """`_attention_forward` without expanding keys and values."""
    target.choose("attention: over latents, not expanded")
    sizes = {"nope": latents.nope, "width": latents.width}
    query = call_jax(functools.partial(queries_of_latents, **sizes), query, latents.weight)
    keys: Any = torch.cat((latents.compressed, latents.rotated), dim=-1)
    values = latents.compressed.view(latents.compressed.shape)
    keys.pages = values.pages = _pages_of(latents)
    out, probabilities = _attention_forward(module, query, keys, values, attention_mask, **kwargs)
    return call_jax(functools.partial(values_of_latents, **sizes), out, latents.weight), probabilities


def _pages_of(latents: Latents) -> paged.Pages | paged.PromptKeys | None:
    """The pages that latents stand for, or what attention to a prompt's tells of them; None if the cache scales them."""
    pages = latents.compressed.pages
    if pages is not latents.rotated.pages or latents.compressed.scales is not None:
        return None
    return dataclasses.replace(pages, are_latents=True) if isinstance(pages, paged.Pages) else pages


def _attention_within_segments(
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    cu_seq_lens_q: PackedSegments,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """`_attention_forward` for the patches of packed images."""
    if attention_mask is not None or not isinstance(cu_seq_lens_q, PackedSegments):
        raise TypeError(f"{type(module).__name__} does not attend within the segments of packed images alone.")
    return _attention_forward(module, query, key, value, cu_seq_lens_q.mask(), **kwargs)


def _times(numbers: jax.Array, scale: float) -> jax.Array:
    return numbers if scale == 1 else (numbers.astype(jnp.float32) * scale).astype(numbers.dtype)


@functools.cache
def _register_interfaces() -> None:
    """Register hfax's functions under their own name; transformers' names are unchanged."""
    for name, mask in ((masks.ATTENTION_NAME, masks.attention_mask), (masks.ADDITIVE_NAME, masks.additive_mask)):
        modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, _attention_forward)
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(masks.PACKED_NAME, _attention_within_segments)
    moe.ALL_EXPERTS_FUNCTIONS.register(masks.ATTENTION_NAME, experts_forward)


def register_interfaces() -> None:
    """Register the names before a model is built: transformers checks them in the model's constructor."""
    _register_interfaces()
