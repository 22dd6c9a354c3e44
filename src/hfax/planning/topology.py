"""Ahead-of-time compilation for absent TPUs and GPUs: the real compiler, a topology description, no weights.

Turns a config, a topology ("v5e:2x4", "h100:8") and a request shape into compiled prefill and decode programs and the compiler's
reports. Requires the compiler (`hfax[tpu]`, `hfax[plan-gpu]`) but no device.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transformers import GenerationConfig, PretrainedConfig

from hfax.generation.decoding import LoopSpec, advance, start
from hfax.generation.sampling_config import make_sampling_spec
from hfax.kernels.constraints import cache_spec
from hfax.kernels.encodings import BITS, STORED, padded_width
from hfax.kernels.quantized import QuantizedArray
from hfax.kernels.target import compiler_options, compiling_for
from hfax.kv_cache.dtypes import cache_dtype_of
from hfax.load.packed import PackedLayout
from hfax.load.quantize import Quantized, layouts, matrix_sharding, spec_of
from hfax.load.skeleton import Skeleton
from hfax.parallelism import plan_over
from hfax.planning.devices import topology_devices
from hfax.planning.hlo import Program, collective_kind, kernel_name, parse
from hfax.planning.image_prompts import image_prompt
from hfax.sharding.mesh import batch_axes, make_mesh
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.abstract import open_skeleton, without_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program for a topology.

    Args:
        name: "prefill" or "decode".
        trace_seconds: tracing time.
        compile_seconds: compile time.
        argument_bytes: argument size per device.
        temporary_bytes: temporaries per device, without arguments and results.
        kernels: number of calls of each Pallas kernel, by its name.
        large_copies: copies of arrays of 1 MiB or more in main memory.
        collectives: count of each kind of collective in the HLO.
        collective_bytes: bytes that a device receives from collectives in one pass over the HLO.
        chosen: kernels that were selected.
        text: compiled HLO.
    """

    name: str
    trace_seconds: float
    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    kernels: dict[str, int]
    large_copies: tuple[str, ...]
    collectives: dict[str, int]
    collective_bytes: int
    chosen: tuple[str, ...]
    text: str = dataclasses.field(repr=False)

    @functools.cached_property
    def hlo(self) -> Program:
        """The instructions of the text."""
        return parse(self.text)


def compile_for(
    config: PretrainedConfig,
    topology: str,
    *,
    batch_size: int = 1,
    prompt_length: int = 512,
    capacity: int = 2048,
    image_size: tuple[int, int] | None = None,
    quantization: Quantized = None,
    kv_cache_dtype: str = "auto",
) -> list[CompiledProgram]:
    """Compile both programs of greedy `generate`, tensor-parallel over all devices of a topology.

    Args:
        config: config of a decoder-only model.
        topology: such as "v5e:2x4", "v6e:2x2", "h100:8".
        batch_size: number of concurrent sequences.
        prompt_length: prompt length, in tokens, including padding.
        capacity: cache capacity, in tokens.
        image_size: height and width in pixels of an image in each prompt; None: there is none.
        quantization: weight quantization, or how each packed weight is packed, by name.
        kv_cache_dtype: of the cached keys and values, as for `generate`.

    Raises:
        BackendNotAvailableError: the compiler is not installed, or the topology is unknown.
        InvalidInputError: the number of heads is not divisible by the number of devices, or the prompt is too short for the image.
        UnsupportedOptionError: the model takes no images, or in a layout that is not planned.
    """
    devices = topology_devices(topology)
    skeleton = open_skeleton(config)
    plan = plan_over(skeleton, make_mesh({"tensor": len(devices)}, config, devices), quantization)
    sizes: dict[str, Any] = {"batch_size": batch_size, "prompt_length": prompt_length, "capacity": capacity}
    sizes |= {"image_size": image_size}
    return compile_programs(skeleton, plan, **sizes, quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def compile_programs(
    skeleton: Skeleton,
    plan: ShardingPlan,
    *,
    batch_size: int,
    prompt_length: int,
    capacity: int,
    image_size: tuple[int, int] | None = None,
    quantization: Quantized = None,
    kv_cache_dtype: str = "auto",
) -> list[CompiledProgram]:
    """Like `compile_for`, on a sharding plan's mesh, with devices such as those from `topology_devices`."""
    mesh, config = plan.mesh, skeleton.module.config
    device = mesh.devices.flat[0]
    model, weights = without_weights(skeleton)

    def on_devices(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda a: on_devices(a.shape, a.dtype, P()), tree)

    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, quantization)
    params = described_weights(weights, plan, packed)
    sampling, values = make_sampling_spec(
        GenerationConfig(do_sample=False),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        prompt_length=prompt_length,
        max_new_tokens=capacity - prompt_length,
    )
    ids = jax.ShapeDtypeStruct((batch_size, prompt_length), jnp.int32)
    prompts, static = {"input_ids": ids, "attention_mask": ids}, {}
    if image_size is not None:
        prompts, static = image_prompt(model, weights, batch=batch_size, length=prompt_length, size=image_size)
    inputs = {name: on_devices(a.shape, a.dtype, P(batch_axes(mesh, a.shape[0]))) for name, a in prompts.items()}
    request = everywhere(
        {
            "seed": jax.ShapeDtypeStruct((), jnp.uint32),
            "pad": jax.ShapeDtypeStruct((), jnp.int32),
            "eos": jax.ShapeDtypeStruct((1,), jnp.int32),
            "unused": jax.ShapeDtypeStruct((batch_size,), jnp.bool_),
            "sampling": values,
        }
    )
    spec = LoopSpec(
        capacity=capacity,
        num_return_sequences=1,
        max_steps=0,
        keep=(),
        sampling=sampling,
        cache_dtype=cache_dtype_of(kv_cache_dtype),
    )

    def state_shardings(state: Any) -> Any:
        """Cache arrays are sharded by `cache_spec`; everything else is replicated."""
        cache = state.get("cache", {})
        everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
        split = {name: NamedSharding(mesh, cache_spec(mesh, name, array.shape)) for name, array in cache.items()}
        return everywhere | {"cache": split}

    def run_prompt(params: Any, inputs: Any, request: Any) -> Any:
        state = start(model, spec, params, inputs, static, request)
        return {name: value for name, value in state.items() if name != "checks"}

    def run_loop(params: Any, state: Any, request: Any, limit: Any) -> Any:
        return advance(model, spec, params, state, {}, request, limit)

    begin = time.perf_counter()
    with compiling_for(device, mesh=mesh, chosen=(chosen := set[str]())):
        shapes = jax.eval_shape(run_prompt, params, inputs, request)
    prompt_seconds = time.perf_counter() - begin
    shardings = state_shardings(shapes)
    prefill = jax.jit(run_prompt, out_shardings=shardings)
    decode = jax.jit(run_loop, donate_argnums=1, out_shardings=shardings)
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    limit = everywhere(jax.ShapeDtypeStruct((), jnp.int32))
    lowered = [
        # reuses the trace that determined the state's shapes
        _lower("prefill", prefill, (params, inputs, request), mesh, traced_s=prompt_seconds, chosen=chosen),
        _lower("decode", decode, (params, state, request, limit), mesh),
    ]
    options = {
        name: compiler_options(device, has_few_rows=name == "decode", has_packed_weights=bool(packed))
        for name in ("prefill", "decode")
    }
    return [_compile(program, options[program.name]) for program in lowered]  # libtpu crashes when two threads compile


def described_weights(
    weights: Mapping[str, jax.ShapeDtypeStruct], plan: ShardingPlan, packed: Mapping[str, PackedLayout]
) -> dict[str, Any]:
    """Weights without numbers, with their shardings.

    Args:
        weights: shapes and dtypes of the model's weights, by name.
        plan: their sharding.
        packed: how quantized ones are packed, by name.

    Returns:
        `jax.ShapeDtypeStruct`s, in a `QuantizedArray` for a quantized weight.
    """

    def described(name: str, whole: jax.ShapeDtypeStruct) -> Any:
        where = NamedSharding(plan.mesh, plan.weights[name].spec)
        if (found := packed.get(name)) is None:
            return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=where)
        *rows, width = found.shape
        groups, dtypes = found.num_columns // found.group, {2: jnp.bfloat16, 4: jnp.float32}
        where = matrix_sharding(where, len(whole.shape), found.is_transposed)

        def part(columns: int, dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((*rows, columns), dtype, sharding=where)

        return QuantizedArray(
            values=part(found.num_columns * BITS[found.encoding] // 8, jnp.dtype(STORED[found.encoding])),
            scale=part(groups, dtypes[found.scale_bytes]),
            offset=part(groups, dtypes[found.offset_bytes]) if found.offset_bytes else None,
            encoding=found.encoding,
            dtype=whole.dtype,
            width=padded_width(width, found.encoding),
            is_transposed=found.is_transposed,
            spec=spec_of(where),
        )

    return {name: described(name, whole) for name, whole in weights.items()}


@dataclasses.dataclass(frozen=True)
class _Lowered:
    name: str
    lowered: Any
    trace_seconds: float
    chosen: tuple[str, ...]


def _lower(
    name: str,
    function: Any,
    args: tuple[Any, ...],
    mesh: jax.sharding.Mesh,
    *,
    traced_s: float = 0.0,
    chosen: set[str] | None = None,
) -> _Lowered:
    begin = time.perf_counter()
    with compiling_for(mesh.devices.flat[0], mesh=mesh, chosen=chosen) as where:
        lowered = function.lower(*args)
    return _Lowered(name, lowered, traced_s + time.perf_counter() - begin, tuple(sorted(where.chosen)))


def _compile(program: _Lowered, options: dict[str, str | bool]) -> CompiledProgram:
    begin = time.perf_counter()
    compiled = program.lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    parsed = parse(text)
    collectives = [each for each in parsed.instructions() if collective_kind(each)]
    return CompiledProgram(
        name=program.name,
        trace_seconds=program.trace_seconds,
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=dict(Counter(filter(None, map(kernel_name, parsed.instructions())))),
        large_copies=tuple(_large_copies(parsed)),
        collectives=dict(Counter(filter(None, map(collective_kind, collectives)))),
        collective_bytes=sum(max(array.num_bytes for array in each.arrays) for each in collectives),
        chosen=program.chosen,
        text=text,
    )


_LARGE = 1 << 20


def _large_copies(program: Program) -> Iterator[str]:
    """The instructions that copy 1 MiB or more within main memory."""
    for computation, each in program.walk():
        is_copy = each.opcode in ("copy", "copy-start") or (each.opcode == "fusion" and "copy" in each.name)
        if not is_copy or each.arrays[0].is_on_chip or each.arrays[0].num_bytes < _LARGE:
            continue
        copy, source = each.arrays[0], computation.by_name.get(each.operands[0])
        if each.opcode == "fusion" or source is None or not any(array.is_on_chip for array in source.arrays):
            yield f"{each.name}: {copy.dtype}[{','.join(map(str, copy.shape))}]"
