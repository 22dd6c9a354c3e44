"""Memory plans for fine-tuning on devices that are not present: memory per step, from the TPU compiler or estimated.

Turns a config, machines and a batch shape into table rows. Loads and runs nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from transformers import GenerationConfig, PretrainedConfig

from hfax.backends.jax.model import JaxModel
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError
from hfax.load.quantize import Quantization, Quantized, layouts
from hfax.load.stored_weights import StoredWeights
from hfax.lora.config import LoraConfig
from hfax.parallelism import plan_over
from hfax.planning.chips import Chip, chip_of
from hfax.planning.devices import devices_of
from hfax.planning.hlo import parse
from hfax.planning.operations import attention_per_pair, operations_per_token
from hfax.planning.plan import USABLE
from hfax.planning.program_time import ProgramTime, estimate
from hfax.planning.topology import described_weights
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import FSDP, TENSOR, attention_heads, make_mesh, num_experts
from hfax.train.arguments import TrainingArguments
from hfax.train.optimizers import Weights
from hfax.train.step import TrainStep

Kind = Literal["full", "lora"]
ASSUMPTIONS = (
    "Training recomputes each layer in the backward pass. Trained weights, gradients and the optimizer's moments are float32 (8 "
    "bits with adamw_8bit and lion_8bit, on one device), split over the mesh; frozen weights and computation are bfloat16. The "
    "time of a step that was not compiled is a lower bound: the matrix products of the forward pass, the recomputation and the "
    "backward pass at the chip's published peak. 6% of a chip's memory is reserved for the runtime."
)
_LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A plan for one machine and one kind of training.

    Args:
        model: model name.
        machine: a TPU topology, or a chip kind and a count.
        num_devices: number of devices.
        kind: "full" or "lora" (rank 16 on all linear layers).
        optim: the optimizer.
        mesh: mesh sizes by axis.
        rows: rows per step, over all devices.
        length: row length, in tokens.
        trained: number of trained parameters.
        state_bytes: trained weights and optimizer state, in bytes per device.
        frozen_bytes: frozen weights, in bytes per device.
        temporary_bytes: gradients, activations and other temporaries, in bytes per device; from the compiler, or an estimated
            lower bound.
        memory_bytes: usable memory, in bytes per device, without the runtime's reserve.
        fits: whether everything fits.
        step_s: step time in seconds: estimated from the compiled step, or a lower bound if nothing was compiled.
        peak_share: share of the devices' published operations that the model's own are in this time, without the recomputation.
        times: what the time is spent on; None if nothing was compiled.
        compile_s: TPU compile time, in seconds; None: not compiled.
        problem: why the step was not compiled (if the estimate does not fit, it is skipped, because compiling is slow), or the
            compiler's message if it does not fit; "": none.
    """

    model: str
    machine: str
    num_devices: int
    kind: Kind
    optim: str
    mesh: dict[str, int]
    rows: int
    length: int
    trained: int
    state_bytes: int
    frozen_bytes: int
    temporary_bytes: int
    memory_bytes: int
    fits: bool
    step_s: float | None
    peak_share: float | None
    times: ProgramTime | None
    compile_s: float | None
    problem: str


def make_train_plans(
    name: str,
    config: PretrainedConfig,
    machines: Sequence[str],
    *,
    kinds: Sequence[Kind] = ("full", "lora"),
    rows: int = 8,
    length: int = 2048,
    mesh: dict[str, int] | None = None,
    optim: str = "adamw_torch",
    quantization: Quantization | None = None,
    stored: StoredWeights | None = None,
    compiles: bool = True,
) -> Iterator[TrainPlan]:
    """Plan training for each machine and kind.

    Args:
        name: model name for the table.
        config: config of a decoder-only model.
        machines: TPU topologies ("v5e:2x4") or GPU kinds with a count ("h100:8").
        kinds: "full", "lora".
        rows: rows per step.
        length: row length, in tokens.
        mesh: mesh sizes by axis; None: fsdp over as many devices as divide the rows, tensor over the rest.
        optim: the optimizer's name, as in `TrainingArguments`.
        quantization: weight quantization, for "lora".
        stored: the weights of a quantized checkpoint, for `quantization=None`; None: all are bfloat16.
        compiles: compile with the machine's compiler, if it is installed; otherwise only estimate.

    Raises:
        UnsupportedOptionError: not a decoder of token ids, or an optimizer with 8-bit moments over several devices.
        InvalidInputError: an unknown machine or optimizer, or an impossible shape.
    """
    TrainingArguments("", optim=optim)
    if rows < 1 or length < 2 or not set(kinds) <= {"full", "lora"}:
        raise InvalidInputError(
            f"Training {list(kinds)} with {rows} rows of {length} tokens cannot be planned.",
            "Training needs at least one row of at least two tokens, and is either full or lora.",
            "Change --batch, --context or --train.",
        )
    if "full" in kinds and (quantization or (stored is not None and stored.method)):
        raise UnsupportedOptionError(
            "Full fine-tuning of quantized weights cannot be planned.",
            "Codes of 8 and 4 bits have no gradients; adapters are trained over them.",
            "Pass --train lora, or plan the checkpoint that is not quantized.",
        )
    for machine in machines:
        chip, (devices, problem) = chip_of(machine), devices_of(machine, compiles)
        for kind in kinds:
            how = (kind, optim, rows, length, mesh, quantization, stored, compiles)
            yield _plan(name, config, machine, chip, devices, problem, *how)


def _plan(
    name: str,
    config: PretrainedConfig,
    machine: str,
    chip: Chip,
    devices: list[Any],
    problem: str,
    kind: Kind,
    optim: str,
    rows: int,
    length: int,
    sizes: dict[str, int] | None,
    quantization: Quantized,
    stored: StoredWeights | None,
    compiles: bool,
) -> TrainPlan:
    sizes = sizes or _sizes(config, len(devices), rows)
    model = _described(config, devices, sizes, quantization, stored)
    if kind == "lora":
        model.params = model.adapters.describe("default", _LORA, model.params)
    optimizer = TrainingArguments("", optim=optim, max_grad_norm=None).optimizer(1, Weights.of(model.module))
    step = TrainStep(model, optimizer, remat=True)
    state = step.described_state()
    state_bytes, trained = _bytes(state), sum(a.size for a in state.params.values())
    frozen_bytes = _bytes({n: a for n, a in model.params.items() if n not in set(step.trainable)})
    temporary, compile_s, times = _arithmetic(model, state, rows, length), None, None
    room = int(chip.memory_bytes * USABLE)
    is_compiled = compiles and not problem
    is_hopeless = state_bytes + frozen_bytes + temporary > room
    if is_compiled and is_hopeless:
        problem = "not compiled: what the arithmetic counts alone does not fit"
    elif is_compiled:
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        begin = time.perf_counter()
        try:
            compiled = step.compile(state, {"input_ids": ids, "labels": ids})
            memory: Any = compiled.memory_analysis()
            beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
            temporary, compile_s = memory.temp_size_in_bytes + beside, time.perf_counter() - begin
            times = estimate(parse(compiled.as_text() or ""), machine, num_experts=num_experts(config) or None)
        except HfaxError as error:
            problem = error.why
        except jax.errors.JaxRuntimeError as error:  # raised when the program does not fit
            problem = str(error).splitlines()[0]
    doubts = is_compiled and compile_s is None
    layers = config.get_text_config(decoder=True).num_hidden_layers
    products = operations_per_token(model.skeleton)
    attention = attention_per_pair(config, layers) * length / 2  # causal
    # a backward pass has the products again for gradients of activations, those of trained weights, and twice the attention
    own = rows * length * (2 * products + min(2 * trained, products) + 3 * attention)
    recomputed, peak = rows * length * (products + attention), len(devices) * chip.operations
    step_s = times.seconds if times is not None else (own + recomputed) / peak if peak else None
    return TrainPlan(
        model=name,
        machine=machine,
        num_devices=len(devices),
        kind=kind,
        optim=optim,
        mesh={axis: size for axis, size in sizes.items() if size > 1} or {FSDP: 1},
        rows=rows,
        length=length,
        trained=trained,
        state_bytes=state_bytes,
        frozen_bytes=frozen_bytes,
        temporary_bytes=temporary,
        memory_bytes=room,
        fits=not doubts and state_bytes + frozen_bytes + temporary <= room,
        step_s=step_s,
        peak_share=None if step_s is None else own / step_s / peak,
        times=times,
        compile_s=compile_s,
        problem=problem,
    )


def _sizes(config: PretrainedConfig, count: int, rows: int) -> dict[str, int]:
    """Mesh sizes: "fsdp" is the largest device count that divides the rows; "tensor" is the rest and must divide the heads."""
    heads, _ = attention_heads(config)
    found = [n for n in range(1, count + 1) if count % n == 0 and rows % n == 0 and (heads or 1) % (count // n) == 0]
    if not found:
        raise InvalidInputError(
            f"{rows} rows and {heads} heads cannot be split over {count} devices.",
            "Rows are split over fsdp, heads over tensor.",
            "Use a row count divisible by the device count, or pass a mesh.",
        )
    return {FSDP: max(found), TENSOR: count // max(found)}


def _described(
    config: PretrainedConfig,
    devices: list[Any],
    sizes: dict[str, int],
    quantization: Quantized,
    stored: StoredWeights | None,
) -> JaxModel:
    """The abstract model on these devices, without weights."""
    from hfax.tracing.abstract import open_skeleton, without_weights

    skeleton = open_skeleton(config, dtype="bfloat16")
    module = skeleton.module
    traced, shapes = without_weights(skeleton)
    if not module.can_generate() or traced.traits.is_encoder_decoder or traced.traits.main_input != "input_ids":
        raise UnsupportedOptionError(
            f"{type(module).__name__} cannot be planned.",
            "Plans are only for decoders that take token ids.",
            "Compile its step on the target machine: make_train_step(…).compile.",
        )
    if stored is not None:
        quantization = stored.layouts(skeleton, devices[0].platform)
    packed = layouts(module, skeleton.shapes, skeleton.tied, quantization)
    plan = plan_over(skeleton, make_mesh(sizes, config, devices), packed)
    layout, params = Layout.of(plan).described(), described_weights(shapes, plan, packed)
    return JaxModel(
        skeleton,
        params,
        skeleton.tied,
        layout=layout,
        generation_config=GenerationConfig(),
        name_or_path=type(config).__name__,
        folder=None,
        task=None,
    )


def _bytes(tree: Any) -> int:
    """Size of the arrays in a tree, in bytes per device."""

    def own(array: Any) -> int:
        shape = array.sharding.shard_shape(array.shape) if isinstance(array.sharding, NamedSharding) else array.shape
        size = 1
        for n in shape:
            size *= n
        return size * array.dtype.itemsize

    return sum(own(leaf) for leaf in jax.tree.leaves(tree))


def _arithmetic(model: JaxModel, state: Any, rows: int, length: int) -> int:
    """Estimated bytes per device of gradients, trained weights in the model's dtype, layer inputs, and logits with gradients."""
    text: Any = model.config.get_text_config(decoder=True)
    mesh = model.mesh
    assert mesh is not None
    tokens = rows * length / (mesh.shape["data"] * mesh.shape[FSDP])
    layers, hidden = text.num_hidden_layers, text.hidden_size
    gradients = _bytes(state.params) * 1.5
    activations = tokens * (layers * hidden * 2 + text.vocab_size * (4 + 4) / mesh.shape[TENSOR])
    return int(gradients + activations)
