"""Inference plans for absent hardware: memory needs and estimated speed.

Turns a config, a machine ("v5e:2x4", "h100:8") and a request shape into a `Plan`: the best mesh, bytes per device, the largest
batch and context that fit, and estimated times. Weights and cache are counted from the model's structure and the sharding plan; for
TPUs and GPUs both programs are compiled with the real compiler, which reports temporaries, and whose instructions are timed
(`hfax.planning.program_time`). Without compiling, times are limits from published chip figures. The devices are not needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PretrainedConfig

from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError
from hfax.kernels.constraints import cache_spec
from hfax.kv_cache.dtypes import cache_dtype_of
from hfax.load.quantize import Quantization, Quantized
from hfax.load.skeleton import Skeleton
from hfax.load.stored_weights import StoredWeights
from hfax.parallelism import plan_over
from hfax.planning.chips import Chip, chip_of
from hfax.planning.devices import devices_of
from hfax.planning.image_prompts import image_prompt
from hfax.planning.operations import attention_per_pair, operations_per_token, used_numbers
from hfax.planning.program_time import ProgramTime, estimate
from hfax.sharding.mesh import DATA, EXPERT, HEAD_AXES, TENSOR, fitting_sizes, make_mesh, num_experts, size_of
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.abstract import open_skeleton, without_weights

ASSUMPTIONS = (
    "Times of what was not compiled are limits: memory is read at the chip's published bandwidth, matrices multiply at its "
    "published bfloat16 peak, messages take 1 microsecond each plus transfer at the published interconnect bandwidth, and nothing "
    "overlaps. A decoding step reads every weight it uses once and every sequence's whole cache at full context; for experts, the "
    "average number that its tokens select. 6% of a chip's memory is reserved for the runtime."
)
USABLE = 0.94
"""Usable share of a chip's memory; the rest is reserved for the runtime."""
_MESSAGE_S = 1e-6
_MAX_CONTEXT, _MAX_BATCH = 1 << 24, 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan for one machine and one request shape.

    Args:
        model: model name.
        machine: a TPU topology, or a chip kind and a count.
        num_devices: number of devices.
        mesh: recommended mesh sizes by axis; pass them to `from_pretrained(parallelism=…)`.
        dtype, quantization: of the weights.
        stored: how the checkpoint's weights are quantized; None: they are not, or `quantization` says how they are rounded.
        kv_cache_dtype: of the cached keys and values, as for `generate`.
        batch: number of concurrent sequences.
        context: tokens per sequence, including the prompt.
        prompt: tokens per prompt.
        image_size: height and width in pixels of the image in each prompt; None: there is none.
        weight_bytes, cache_bytes: bytes per device.
        temporary_bytes: bytes per device, the larger of both programs as reported by the compiler; None if not compiled.
        memory_bytes: usable memory per device, without the runtime's reserve.
        fits: whether everything fits.
        longest_context: longest context that fits with this batch; 0 if none does.
        largest_batch: largest batch that fits with this context.
        prefill_s: time to first token of all sequences, in seconds: estimated from the compiled program, or the best case if
            nothing was compiled; None if the chip's speed is not published.
        tokens_per_s: throughput over all sequences, likewise.
        limited_by: bottleneck of a decoding step: "weights", "cache", "operations", "communication" or "launches"; "" if the chip's
            speed is not published.
        times: per program, what its time is spent on; empty if nothing was compiled.
        collectives: per program, count of each kind of collective in the compiled HLO.
        collective_bytes: per program, bytes that a device receives from others in one step.
        collectives_per_layer: collectives per layer in the decode program.
        compile_s: compile time of both programs, in seconds; None if not compiled.
        problem: why nothing was compiled; empty if it was.
    """

    model: str
    machine: str
    num_devices: int
    mesh: dict[str, int]
    dtype: str
    quantization: str | None
    stored: str | None
    kv_cache_dtype: str
    batch: int
    context: int
    prompt: int
    image_size: tuple[int, int] | None
    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int | None
    memory_bytes: int
    fits: bool
    longest_context: int
    largest_batch: int
    prefill_s: float | None
    tokens_per_s: float | None
    limited_by: str
    times: dict[str, ProgramTime]
    collectives: dict[str, dict[str, int]]
    collective_bytes: dict[str, int]
    collectives_per_layer: float | None
    compile_s: float | None
    problem: str


@dataclasses.dataclass(frozen=True)
class _Model:
    """Figures computed once for all machines."""

    name: str
    config: PretrainedConfig
    skeleton: Skeleton
    quantization: Quantization | None
    stored: StoredWeights | None
    kv_cache_dtype: str
    caches: dict[int, dict[str, jax.ShapeDtypeStruct]]  # for one sequence, by capacity
    operations_per_token: float  # in products with the weights that a token uses
    attention_per_token: float  # operations for each earlier token


def make_plans(
    name: str,
    config: PretrainedConfig,
    machines: Sequence[str],
    *,
    batches: Sequence[int] = (1,),
    context: int = 8192,
    prompt: int | None = None,
    image_size: tuple[int, int] | None = None,
    quantization: Quantization | None = None,
    stored: StoredWeights | None = None,
    kv_cache_dtype: str = "auto",
    mesh: dict[str, int] | None = None,
    compiles: bool = True,
) -> Iterator[Plan]:
    """A plan for each machine and batch.

    Args:
        name: model name for the table.
        config: config of a decoder-only model.
        machines: TPU topologies ("v5e:2x4"), or GPU kinds with a count ("h100:8") or hosts and a count ("h100:2x8").
        batches: batch sizes to plan for.
        context: final tokens per sequence.
        prompt: prompt tokens per sequence, those of an image included; None: 512, or half of a shorter context.
        image_size: height and width in pixels of an image in each prompt; None: there is none.
        quantization: weight quantization.
        stored: the weights of a quantized checkpoint, for `quantization=None`; None: all are in the config's dtype.
        kv_cache_dtype: of the cached keys and values, as for `generate`.
        mesh: mesh sizes by axis; None: the fastest by estimate.
        compiles: compile with the machine's compiler, if it is installed; otherwise only estimate.

    Raises:
        UnsupportedOptionError: the model does not generate from token ids; it takes no images, or in a layout that is not planned;
            images are to be planned without compiling.
        InvalidInputError: an unknown machine, or an impossible shape; the prompt is too short for the image.
    """
    prompt = min(512, context // 2) if prompt is None else prompt
    if not 0 < prompt < context or min(batches, default=0) < 1:
        raise InvalidInputError(
            f"Batches {list(batches)} with a context of {context} and a prompt of {prompt} tokens cannot be planned.",
            "A plan needs at least one sequence, and a prompt shorter than the context.",
            "Change --batch, --context or --prompt.",
        )
    if image_size is not None and not compiles:
        raise UnsupportedOptionError(
            "Prompts with images cannot be planned without compiling.",
            "By arithmetic alone a plan knows the language model, not what reads the images.",
            "Leave out --no-compile, or --image-size.",
        )
    found = [(machine, chip_of(machine), *devices_of(machine, compiles)) for machine in machines]
    model = _read(name, config, quantization, None if quantization else stored, kv_cache_dtype, context)
    if image_size is not None:  # an error now rather than in each plan
        image_prompt(*without_weights(model.skeleton), batch=1, length=prompt, size=image_size)
    for machine, chip, devices, problem in found:
        for batch in batches:
            yield _plan(model, machine, chip, devices, problem, batch, context, prompt, image_size, mesh, compiles)


def _read(
    name: str,
    config: PretrainedConfig,
    quantization: Quantization | None,
    stored: StoredWeights | None,
    kv_cache_dtype: str,
    context: int,
) -> _Model:
    held = cache_dtype_of(kv_cache_dtype)
    of_cache = None if held is None else jnp.dtype(held)
    skeleton = open_skeleton(config, stored_dtype=None if stored is None else stored.float_dtype)
    module = skeleton.module
    traced, params = without_weights(skeleton)
    if not module.can_generate() or traced.traits.is_encoder_decoder or traced.traits.main_input != "input_ids":
        raise UnsupportedOptionError(
            f"{type(module).__name__} cannot be planned.",
            "Plans are only for decoders that take token ids.",
            "Use hfax doctor to count other models' weights and operations.",
        )
    ids = jax.ShapeDtypeStruct((1, min(8, context)), jnp.int32)
    caches: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}
    for capacity in sorted({256, context}):
        _, caches[capacity] = jax.eval_shape(
            lambda p, x, c=capacity: traced.prefill(p, x, {}, c, cache_dtype=of_cache),
            params,
            {"input_ids": ids, "attention_mask": ids},
        )
    return _Model(
        name=name,
        config=config,
        skeleton=skeleton,
        quantization=quantization,
        stored=stored,
        kv_cache_dtype=kv_cache_dtype,
        caches=caches,
        operations_per_token=operations_per_token(skeleton),
        attention_per_token=attention_per_pair(config, sum(1 for n in caches[context] if n.endswith(".keys"))),
    )


def _plan(
    model: _Model,
    machine: str,
    chip: Chip,
    devices: list[Any],
    problem: str,
    batch: int,
    context: int,
    prompt: int,
    image_size: tuple[int, int] | None,
    mesh: dict[str, int] | None,
    compiles: bool,
) -> Plan:
    candidates = [mesh] if mesh else list(fitting_sizes(model.config, len(devices)))
    quantized: Quantized = model.quantization
    if model.stored is not None:
        quantized = model.stored.layouts(model.skeleton, devices[0].platform)
    plans = [
        (sizes, plan_over(model.skeleton, make_mesh(sizes, model.config, devices), quantized)) for sizes in candidates
    ]
    ranked = [(sizes, plan, _limits(model, chip, plan, batch, context, prompt)) for sizes, plan in plans]
    room = int(chip.memory_bytes * USABLE)

    def merit(each: Any) -> tuple[bool, float, float]:
        _, plan, limits = each
        needed = plan.bytes_per_device + _cache_bytes(model, plan, batch, context)
        return needed <= room, limits.tokens_per_s or 0.0, -needed

    sizes, plan, limits = max(ranked, key=merit)
    programs: list[Any] = []
    if compiles and not problem:
        from hfax.planning.topology import compile_programs

        try:
            programs = compile_programs(
                model.skeleton,
                plan,
                batch_size=batch,
                prompt_length=prompt,
                capacity=context,
                image_size=image_size,
                quantization=quantized,
                kv_cache_dtype=model.kv_cache_dtype,
            )
        except HfaxError as error:
            problem = str(error)
        except jax.errors.JaxRuntimeError as error:  # raised when the program does not fit
            problem = str(error).splitlines()[0]
    temporaries = max((p.temporary_bytes for p in programs), default=None)
    weights, cache = plan.bytes_per_device, _cache_bytes(model, plan, batch, context)
    left = room - weights - (temporaries or 0)
    communication = {p.name: p.collective_bytes for p in programs}
    experts = num_experts(model.config) or None
    times = {p.name: estimate(p.hlo, machine, is_loop=p.name == "decode", num_experts=experts) for p in programs}
    if image_size is not None:  # arithmetic does not know what reads the images
        limits = dataclasses.replace(limits, prefill_s=None)
    if programs:
        limits = _Limits(
            prefill_s=times["prefill"].seconds,
            tokens_per_s=batch / times["decode"].seconds,
            limited_by=_bottleneck(times["decode"], weights=_read_bytes(model, plan, _rows(plan, batch)), cache=cache),
        )
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    return Plan(
        model=model.name,
        machine=machine,
        num_devices=len(devices),
        mesh={name: size for name, size in sizes.items() if size > 1} or {TENSOR: 1},
        dtype=str(model.skeleton.module.dtype).removeprefix("torch."),
        quantization=model.quantization,
        stored=None if model.stored is None else model.stored.method,
        kv_cache_dtype=model.kv_cache_dtype,
        batch=batch,
        context=context,
        prompt=prompt,
        image_size=image_size,
        weight_bytes=weights,
        cache_bytes=cache,
        temporary_bytes=temporaries,
        memory_bytes=room,
        fits=left >= cache,
        longest_context=_largest(lambda n: _cache_bytes(model, plan, batch, n) <= left, _MAX_CONTEXT),
        largest_batch=_largest(lambda n: _cache_bytes(model, plan, n, context) <= left, _MAX_BATCH),
        prefill_s=limits.prefill_s,
        tokens_per_s=limits.tokens_per_s,
        limited_by=limits.limited_by,
        times=times,
        collectives={p.name: p.collectives for p in programs},
        collective_bytes=communication,
        collectives_per_layer=sum(programs[1].collectives.values()) / layers if programs and layers else None,
        compile_s=sum(p.compile_seconds for p in programs) if programs else None,
        problem=problem,
    )


@dataclasses.dataclass(frozen=True)
class _Limits:
    prefill_s: float | None = None
    tokens_per_s: float | None = None
    limited_by: str = ""


def _bottleneck(step: ProgramTime, *, weights: float, cache: float) -> str:
    """What a compiled step spends most of its time on."""
    if step.limited_by == "memory":
        return "weights" if weights >= cache else "cache"
    return step.limited_by


def _rows(plan: ShardingPlan, batch: int) -> int:
    """Sequences of a device."""
    return -(-batch // plan.mesh.shape[DATA])


def _limits(model: _Model, chip: Chip, plan: ShardingPlan, batch: int, context: int, prompt: int) -> _Limits:
    """The best case by arithmetic alone."""
    if not chip.bandwidth:
        return _Limits()
    mesh = plan.mesh
    rows = _rows(plan, batch)
    parts = size_of(mesh, HEAD_AXES) * mesh.shape[EXPERT]
    weights = _read_bytes(model, plan, rows) / chip.bandwidth
    cache = _cache_bytes(model, plan, batch, context) / chip.bandwidth
    per_token = model.operations_per_token + model.attention_per_token * context
    operations = rows * per_token / parts / chip.operations
    work = prompt * (model.operations_per_token + model.attention_per_token * prompt / 2)
    prefill = rows * work / parts / chip.operations
    hidden = model.config.get_text_config(decoder=True).hidden_size
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 1)
    messages = 2 * layers if parts > 1 else 0
    step, first = rows * hidden * 2 * messages, rows * prompt * hidden * 2 * messages
    share = 2 * (parts - 1) / parts  # of a ring all-reduce
    communication = share * step / chip.interconnect + messages * _MESSAGE_S
    prefill += share * first / chip.interconnect + messages * _MESSAGE_S
    terms = {"weights": weights, "cache": cache, "operations": operations, "communication": communication}
    seconds = max(weights + cache, operations) + communication
    return _Limits(prefill_s=prefill, tokens_per_s=batch / seconds, limited_by=max(terms, key=lambda t: terms[t]))


def _read_bytes(model: _Model, plan: ShardingPlan, rows: int) -> float:
    """Weight bytes that a device reads per step: all but the embedding table; for experts, the expected routed share."""
    used = used_numbers(model.skeleton)
    total = 0.0
    for name, weight in plan.weights.items():
        size = float(weight.bytes_per_device(plan.mesh))
        if name in used and len(weight.shape) == 3:
            share = used[name] / math.prod(weight.shape)  # of one token
            size *= 1 - (1 - share) ** rows
        elif name not in used and len(weight.shape) == 2:
            continue  # an embedding table: only some rows are read
        total += size
    return total


def _cache_bytes(model: _Model, plan: ShardingPlan, batch: int, context: int) -> int:
    """Cache bytes per device, for `batch` sequences of `context` tokens."""
    low, high = sorted(model.caches) if len(model.caches) == 2 else (0, max(model.caches))
    total = 0.0
    for name, array in model.caches[high].items():
        spec = cache_spec(plan.mesh, name, (batch, *array.shape[1:]))
        parts = math.prod(size_of(plan.mesh, axes) for axes in spec)
        size = float(np.prod(array.shape)) * array.dtype.itemsize
        if low:
            small = float(np.prod(model.caches[low][name].shape)) * array.dtype.itemsize
            per_token = (size - small) / (high - low)
            size = small + per_token * (context - low) if context > low else small * context / low
        total += size * batch / parts
    return int(total)


def _largest(fits: Any, most: int) -> int:
    """The largest n up to `most` for which the monotonic predicate `fits` is true."""
    if not fits(1):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
