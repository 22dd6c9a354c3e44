"""Programs compiled by XLA's GPU compiler, for machines that are not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from published import config_of

from hfax import export
from hfax.errors import BackendNotAvailableError, UnsupportedOptionError
from hfax.kernels.gpu import flash, quantized, ranges
from hfax.kernels.rows import Rows
from hfax.kernels.target import compiler_options
from hfax.load.quantize import layouts
from hfax.planning.devices import topology_devices
from hfax.planning.plan import make_plans
from hfax.planning.topology import compile_for
from hfax.tracing.abstract import open_skeleton
from hfax.train.memory_plan import make_train_plans

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("gpu_compiler")]

LLAMA = config_of("llama-3-8b", num_hidden_layers=2)
EXPERTS = config_of("qwen3-30b-a3b", num_hidden_layers=2)
SIZES = {"prompt_length": 2048, "capacity": 8192}
MB = 1 << 20


@pytest.mark.parametrize(
    ("machine", "batch_size"),
    [
        ("h100:1", 1),
        ("h100:8", 1),
        ("h100:8", 8),
        ("h100:2x8", 1),
        ("h200:8", 1),
        ("a100-80gb:8", 1),
        ("b200:8", 1),
        ("l4:1", 8),
        ("rtx4090:1", 1),
    ],
)
def test_programs_read_weights_once_and_send_activations_alone(machine, batch_size):
    prefill, decode = compile_for(LLAMA, machine, batch_size=batch_size, **SIZES)
    assert prefill.kernels == {"flash_attention": 2}
    assert decode.kernels == {"decode_attention": 2}
    assert prefill.large_copies == decode.large_copies == ()
    assert decode.temporary_bytes < 16 * MB
    # two of each layer, one of the embeddings, one of the best logits
    messages = 2 * 2 + 2
    assert not {"all-gather", "all-to-all", "collective-permute"} & decode.collectives.keys()
    assert decode.collective_bytes <= messages * max(2, batch_size) * 4096 * 2
    assert (sum(decode.collectives.values()) > 0) == (not machine.endswith(":1"))


@pytest.mark.parametrize(
    ("machine", "quantization"),
    [("h100:1", "int8"), ("h100:1", "int4"), ("h100:8", "int4"), ("a100:1", "int4"), ("b200:1", "int8")],
)
def test_packed_weights_are_not_written_as_numbers_for_each_token(machine, quantization):
    _, decode = compile_for(LLAMA, machine, quantization=quantization, **SIZES)
    assert decode.kernels == {f"{quantization}_linear": 7 * 2 + 1, "decode_attention": 2}
    assert decode.temporary_bytes < 16 * MB
    assert not [way for way in decode.chosen if "made numbers" in way]


@pytest.mark.parametrize(("machine", "quantization"), [("h100:4", None), ("h100:1", None), ("a100:4", "int4")])
def test_experts_have_a_kernel_and_send_what_a_token_gets(machine, quantization):
    for program in compile_for(EXPERTS, machine, quantization=quantization, **SIZES):
        assert program.kernels["grouped_linear" if quantization is None else "int4_experts"] == 2 * 2
        assert program.large_copies == ()
        rows = 1 if program.name == "decode" else SIZES["prompt_length"]
        assert program.temporary_bytes < (16 if rows == 1 else 300) * MB
        assert program.collective_bytes <= (2 * 2 + 2) * max(2, rows) * 2048 * 2
        assert (program.collectives.get("all-reduce", 0) > 0) == (machine != "h100:1")


def stored(config, encoding, group, *, among):
    """How weights of a published checkpoint are packed: those with names that end so."""
    skeleton = open_skeleton(config)
    found = layouts(skeleton.module, skeleton.shapes, skeleton.tied, "int8")
    form = {"encoding": encoding, "group": group}
    return {name: dataclasses.replace(layout, **form) for name, layout in found.items() if name.endswith(among)}


def test_fp8_checkpoints_stay_packed():
    packed = stored(LLAMA, "fp8", 128, among="proj.weight")
    prefill, decode = compile_for(LLAMA, "h100:8", quantization=packed, **SIZES)
    assert decode.kernels == {"fp8_linear": 7 * 2, "decode_attention": 2}
    assert decode.temporary_bytes < 16 * MB
    assert prefill.temporary_bytes < 300 * MB


@pytest.mark.parametrize("machine", ["h100:1", "h100:8"])
def test_gpt_oss_fits_its_machine(machine):
    """Experts in MXFP4 with biases, attention with sinks that the model's own plan does not split."""
    config = config_of("gpt-oss-120b", num_hidden_layers=2)
    packed = stored(config, "fp4", 32, among="_proj")
    prefill, decode = compile_for(config, machine, quantization=packed, **SIZES)
    assert prefill.kernels == {"flash_attention": 2, "fp4_experts": 4}
    assert decode.kernels == {"decode_attention": 2, "fp4_experts": 4}
    assert decode.temporary_bytes < 16 * MB
    assert prefill.temporary_bytes < 600 * MB
    for program, rows in ((prefill, SIZES["prompt_length"]), (decode, 1)):
        assert program.collective_bytes <= (2 * 2 + 2) * max(2, rows) * 2880 * 2
        assert (program.collectives.get("all-reduce", 0) > 0) == (machine == "h100:8")


def compiled(machine, function, *arguments, has_few_rows=True):
    """The function's program for one GPU, given arguments' shapes and dtypes."""
    mesh = Mesh(np.array(topology_devices(machine)), ("one",))
    everywhere = NamedSharding(mesh, P())
    described = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in arguments]
    options = compiler_options(mesh.devices.flat[0], has_few_rows=has_few_rows)
    return jax.jit(function).lower(*described).compile(compiler_options=options)


def test_weights_are_not_merged_for_many_rows():
    """The merged matrix would be written to memory in every prefill. For few rows XLA reads the weights where they are."""

    def multiply(x, one, other):
        return [jnp.einsum("...i,oi->...o", x, weight) for weight in (one, other)]

    weight = ((1024, 2048), jnp.bfloat16)
    text = compiled("h200:1", multiply, ((512, 2048), jnp.bfloat16), weight, weight, has_few_rows=False).as_text()
    assert "bf16[2048,2048]" not in text
    text = compiled("h200:1", multiply, ((8, 2048), jnp.bfloat16), weight, weight).as_text()
    assert "bf16[2048,2048]" in text


@pytest.mark.parametrize("machine", ["a100:1", "l4:1", "h100:1", "b200:1"])
@pytest.mark.parametrize(("bits", "rows"), [(8, 1), (8, 2), (8, 128), (4, 1), (4, 2), (4, 32)])
def test_the_kernel_of_packed_weights_compiles_for_each_generation(machine, bits, rows):
    multiply = functools.partial(quantized.linear, encoding=f"int{bits}", out_dtype=jnp.float32)
    values = ((512, 128 * bits), jnp.int8 if bits == 8 else jnp.uint8)
    program = compiled(machine, multiply, ((rows, 1024), jnp.bfloat16), values, ((512, 8), jnp.bfloat16))
    assert "xla.gpu.triton" in program.as_text()


@pytest.mark.parametrize("machine", ["a100:1", "l4:1", "h100:1", "b200:1"])
@pytest.mark.parametrize(
    ("width", "options"), [(64, {"window": 100}), (80, {}), (128, {"softcap": 30.0}), (192, {}), (256, {})]
)
def test_the_kernel_of_prompts_compiles_for_each_generation(machine, width, options):
    attend = functools.partial(flash.flash_attention, scale=0.1, **options)
    query, key = (((1, heads, 500, width), jnp.bfloat16) for heads in (4, 2))
    program = compiled(machine, attend, query, key, key, ((1, 500), jnp.int32), ((4,), jnp.float32))
    assert "xla.gpu.triton" in program.as_text()


@pytest.mark.parametrize("machine", ["a100:1", "l4:1", "h100:1", "b200:1"])
@pytest.mark.parametrize(
    ("widths", "dtype", "cache_dtype", "tokens"),
    [
        ((64, 64), "bfloat16", "bfloat16", 1),
        ((80, 80), "bfloat16", "bfloat16", 1),
        ((128, 128), "bfloat16", "float8_e4m3fn", 1),
        ((192, 128), "float16", "float16", 8),
        ((256, 256), "bfloat16", "bfloat16", 16),
        ((256, 256), "float32", "float32", 4),
    ],
    ids=str,
)
def test_the_kernel_of_steps_compiles_for_each_generation(machine, widths, dtype, cache_dtype, tokens):
    attend = functools.partial(ranges.cache_attention, scale=0.1, softcap=30.0)
    caches = [((2, 2, 3000, n), jnp.dtype(cache_dtype)) for n in widths]
    seen = (2, 1, tokens, 3000), jnp.bool_
    program = compiled(
        machine, attend, ((2, 8, tokens, widths[0]), jnp.dtype(dtype)), *caches, seen, ((8,), jnp.float32)
    )
    assert "xla.gpu.triton" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 4 * MB


@pytest.mark.parametrize("machine", ["a100:1", "l4:1", "h100:1", "b200:1"])
@pytest.mark.parametrize(
    ("tokens", "dtype", "cache_dtype"),
    [
        (8, "bfloat16", "bfloat16"),
        (512, "bfloat16", "bfloat16"),
        (64, "bfloat16", "float8_e4m3fn"),
        (512, "float32", "float32"),
    ],
)
def test_the_kernel_of_pages_compiles_for_each_generation(machine, tokens, dtype, cache_dtype):
    def attend(query, keys, values, starts, lengths, tables):
        rows = Rows(starts=starts, lengths=lengths, tables=tables)
        return ranges.pages_attention(query, keys, values, rows, scale=0.1, window=1000)

    pages = (1000, 8, 32, 128), jnp.dtype(cache_dtype)
    sequences = [(shape, jnp.int32) for shape in ((33,), (32,), (32, 256))]
    program = compiled(machine, attend, ((32, tokens, 128), jnp.dtype(dtype)), pages, pages, *sequences)
    assert "xla.gpu.triton" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 20 * MB


def test_a_plan_is_compiled():
    (plan,) = make_plans("llama", LLAMA, ["h100:8"], context=65536)
    assert (plan.problem, plan.mesh) == ("", {"tensor": 8})
    assert 0 < plan.temporary_bytes < plan.weight_bytes
    assert plan.collectives["decode"]["all-reduce"] >= 2 * 2 + 1


def test_a_plan_of_training_is_compiled():
    (plan,) = make_train_plans("llama", LLAMA, ["h100:8"], kinds=("lora",), rows=8, length=512)
    assert plan.problem == ""
    assert plan.compile_s > 0


def test_programs_are_not_exported_for_a_gpu_that_is_not_there(hfax_llama, tmp_path):
    with pytest.raises(UnsupportedOptionError, match="h100:1"):
        export(hfax_llama, tmp_path / "bundle", topology="h100:1")
    assert not (tmp_path / "bundle").exists()


def test_more_gpus_than_a_topology_can_have_are_an_error():
    with pytest.raises(BackendNotAvailableError, match="h100:99999999999"):
        compile_for(LLAMA, "h100:99999999999")
