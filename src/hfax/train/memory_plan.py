"""What fine-tuning needs on devices that are not here: memory of a step, by the real TPU compiler or by arithmetic.

Turns a config, machines and the shape of a batch into rows of a table. Nothing is loaded and nothing runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from transformers import GenerationConfig, PretrainedConfig

from hfax.backends.jax.model import JaxModel
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError
from hfax.lora.config import LoraConfig
from hfax.parallelism import plan_over
from hfax.planning.chips import TPUS, Chip, chip_of
from hfax.planning.operations import operations_per_token
from hfax.planning.plan import USABLE, devices_of
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import FSDP, TENSOR, attention_heads, make_mesh
from hfax.train.step import TrainStep

Kind = Literal["full", "lora"]
ASSUMPTIONS = (
    "AdamW; trained weights, both of its moments and the gradients in float32, split over the mesh; frozen weights and computation "
    "in bfloat16; each layer computed again for its gradient. The step's limit is its matrix products at the chip's published "
    "peak: forward, again forward, and backward. 6% of a chip's memory is left to the runtime."
)
_LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """One machine and one way of training.

    Args:
        model: the model's name.
        machine: a topology or a kind and a count.
        num_devices: of it.
        kind: "full" or "lora" (rank 16 on all linear layers).
        mesh: sizes by axis.
        rows: of a step, all devices together.
        length: tokens of a row.
        trained: numbers that are trained.
        state_bytes: of trained weights and the optimizer, on each device.
        frozen_bytes: of weights that are not trained, likewise.
        temporary_bytes: gradients, activations and whatever else, likewise: the compiler's word, else what arithmetic counts, which
            is less than is needed.
        memory_bytes: of a device, without what is left to the runtime.
        fits: whether it all does.
        step_s: the limit.
        compile_s: of the TPU compiler; None: nothing was compiled.
        problem: why nothing was compiled (a step that arithmetic says cannot fit is not, for compilers take long over such), or the
            compiler's word where it does not fit.
    """

    model: str
    machine: str
    num_devices: int
    kind: Kind
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
    compiles: bool = True,
) -> Iterator[TrainPlan]:
    """A plan for each machine and kind.

    Args:
        name: of the model, for the table.
        config: of a decoder-only model.
        machines: TPU topologies ("v5e:2x4") or kinds of GPU with a count ("h100:8").
        kinds: "full", "lora".
        rows: of a step.
        length: tokens of each.
        mesh: sizes by axis; None: fsdp over as many devices as divide the rows, tensor over the rest.
        compiles: let the TPU compiler say what it knows; arithmetic alone otherwise.

    Raises:
        UnsupportedOptionError: no decoder of token ids.
        InvalidInputError: an unknown machine, or a shape that cannot be.
    """
    if rows < 1 or length < 2 or not set(kinds) <= {"full", "lora"}:
        raise InvalidInputError(
            f"Training {list(kinds)} with {rows} rows of {length} tokens cannot be planned.",
            "There is a row at least, of two tokens at least; and training is full or by lora.",
            "Change --batch, --context or --train.",
        )
    for machine in machines:
        chip, (devices, problem) = chip_of(machine), devices_of(machine)
        for kind in kinds:
            yield _plan(name, config, machine, chip, devices, problem, kind, rows, length, mesh, compiles)


def _plan(
    name: str,
    config: PretrainedConfig,
    machine: str,
    chip: Chip,
    devices: list[Any],
    problem: str,
    kind: Kind,
    rows: int,
    length: int,
    sizes: dict[str, int] | None,
    compiles: bool,
) -> TrainPlan:
    sizes = sizes or _sizes(config, len(devices), rows)
    model = _described(config, devices, sizes)
    if kind == "lora":
        model.params = model.adapters.describe("default", _LORA, model.params)
    step = TrainStep(model, optax.adamw(1e-4), remat=True)
    state = step.described_state()
    state_bytes, trained = _bytes(state), sum(a.size for a in state.params.values())
    frozen_bytes = _bytes({n: a for n, a in model.params.items() if n not in set(step.trainable)})
    temporary, compile_s = _arithmetic(model, state, rows, length), None
    room = int(chip.memory_bytes * USABLE)
    is_hopeless = state_bytes + frozen_bytes + temporary > room
    if compiles and not problem and chip.name in TPUS and is_hopeless:
        problem = "not compiled: what the arithmetic counts alone does not fit"
    elif compiles and not problem and chip.name in TPUS:
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        begin = time.perf_counter()
        try:
            compiled = step.compile(state, {"input_ids": ids, "labels": ids})
            memory: Any = compiled.memory_analysis()
            beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
            temporary, compile_s = memory.temp_size_in_bytes + beside, time.perf_counter() - begin
        except HfaxError as error:
            problem = error.why
        except jax.errors.JaxRuntimeError as error:  # the compiler's way to say that it does not fit
            problem = str(error).splitlines()[0]
    doubts = compile_s is None and compiles and bool(problem) and chip.name in TPUS
    operations = rows * length * (3 * operations_per_token(model.skeleton) + 2 * trained)
    return TrainPlan(
        model=name,
        machine=machine,
        num_devices=len(devices),
        kind=kind,
        mesh={axis: size for axis, size in sizes.items() if size > 1} or {FSDP: 1},
        rows=rows,
        length=length,
        trained=trained,
        state_bytes=state_bytes,
        frozen_bytes=frozen_bytes,
        temporary_bytes=temporary,
        memory_bytes=room,
        fits=not doubts and state_bytes + frozen_bytes + temporary <= room,
        step_s=operations / len(devices) / chip.operations if chip.operations else None,
        compile_s=compile_s,
        problem=problem,
    )


def _sizes(config: PretrainedConfig, count: int, rows: int) -> dict[str, int]:
    """As many devices as divide the rows on "fsdp"; of the rest as many as divide the heads on "tensor"."""
    heads, _ = attention_heads(config)
    found = [n for n in range(1, count + 1) if count % n == 0 and rows % n == 0 and (heads or 1) % (count // n) == 0]
    if not found:
        raise InvalidInputError(
            f"{rows} rows and {heads} heads cannot be spread over {count} devices.",
            "Rows are split over fsdp, heads over tensor.",
            "Use a number of rows that the devices divide, or name a mesh.",
        )
    return {FSDP: max(found), TENSOR: count // max(found)}


def _described(config: PretrainedConfig, devices: list[Any], sizes: dict[str, int]) -> JaxModel:
    """The model over these devices, without weights."""
    from hfax.tracing.abstract import open_skeleton, without_weights

    skeleton = open_skeleton(config, dtype="bfloat16")
    module = skeleton.module
    traced, shapes = without_weights(skeleton)
    if not module.can_generate() or traced.traits.is_encoder_decoder or traced.traits.main_input != "input_ids":
        raise UnsupportedOptionError(
            f"{type(module).__name__} cannot be planned.",
            "Plans are of decoders, whose batches are rows of token ids.",
            "Compile its step on the machine at hand: make_train_step(…).compile.",
        )
    layout = Layout.of(plan_over(skeleton, make_mesh(sizes, config, devices))).described()
    params: Any = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.weight(name))
        for name, shape in shapes.items()
    }
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
    """On each device."""

    def own(array: Any) -> int:
        shape = array.sharding.shard_shape(array.shape) if isinstance(array.sharding, NamedSharding) else array.shape
        size = 1
        for n in shape:
            size *= n
        return size * array.dtype.itemsize

    return sum(own(leaf) for leaf in jax.tree.leaves(tree))


def _arithmetic(model: JaxModel, state: Any, rows: int, length: int) -> int:
    """Gradients and the trained weights in the model's dtype; each layer's input; the logits and their gradient."""
    text: Any = model.config.get_text_config(decoder=True)
    mesh = model.mesh
    assert mesh is not None
    tokens = rows * length / (mesh.shape["data"] * mesh.shape[FSDP])
    layers, hidden = text.num_hidden_layers, text.hidden_size
    gradients = _bytes(state.params) * 1.5
    activations = tokens * (layers * hidden * 2 + text.vocab_size * (4 + 4) / mesh.shape[TENSOR])
    return int(gradients + activations)
