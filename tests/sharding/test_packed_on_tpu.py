"""Packed weights split over chips, as programs for TPU have them: the kernels interpreted, on virtual CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import random_model, save, tiny_llama_config

from hfax import AutoModelForTPU
from hfax.kernels import quantized
from hfax.kernels.experts import grouped_linear
from hfax.kernels.target import compiling_for
from hfax.kernels.tpu import quantized as kernels
from hfax.load.quantize import quantize
from hfax.sharding.mesh import EXPERT_AXES, HEAD_AXES, make_mesh

CONFIG = tiny_llama_config(num_attention_heads=8, num_key_value_heads=8)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear", "experts_linear"):
        monkeypatch.setattr(kernels, name, functools.partial(getattr(kernels, name), interpret=True))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def packed(shape: tuple[int, ...], spec: P, mesh: jax.sharding.Mesh, bits: int) -> quantized.QuantizedArray:
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    weight = quantize(values, "int8" if bits == 8 else "int4", NamedSharding(mesh, spec))
    assert weight is not None
    assert weight.spec == spec
    return weight


def on_tpu(function, mesh, *args):
    with compiling_for("tpu", mesh=mesh) as where:
        return np.asarray(jax.jit(function)(*args), np.float64), where.chosen


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (P(HEAD_AXES, None), {"tensor": 4}),
        (P(None, HEAD_AXES), {"tensor": 4}),
        (P("fsdp", HEAD_AXES), {"fsdp": 2, "tensor": 2}),
        (P(None, None), {"data": 4}),
    ],
)
def test_every_chip_multiplies_with_its_part(spec: P, sizes: dict[str, int], bits: int) -> None:
    mesh = make_mesh(sizes, CONFIG)
    weight = packed((512, 1024), spec, mesh, bits)
    x, bias = normal(4, 3, 1024), normal(512, seed=2)
    got, chosen = on_tpu(quantized.linear, mesh, x, weight, bias)
    assert chosen == {f"linear: Pallas kernel (int{bits} weights)"}
    numbers = np.asarray(weight.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ numbers.T + np.asarray(bias, np.float64)
    np.testing.assert_allclose(got, expected, atol=2.0**-8 * np.abs(expected).max())


def test_a_weight_whose_split_nobody_said_is_left_to_xla() -> None:
    mesh = make_mesh({"tensor": 4}, CONFIG)
    weight = quantized.QuantizedArray(
        values=jnp.ones((512, 1024), jnp.int8),
        scale=jnp.ones((512, 8), jnp.bfloat16),
        encoding="int8",
        dtype=jnp.dtype("bfloat16"),
    )
    got, chosen = on_tpu(quantized.linear, mesh, normal(2, 1024), weight)
    assert chosen == {"linear: int8 weights made numbers, then XLA's matrix product"}
    assert got.shape == (2, 512)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("experts", "spec"),
    [
        (8, P(EXPERT_AXES, None, None)),
        (6, P(None, None, HEAD_AXES)),  # as many do not divide: their inputs are split
        (5, P(None, None, None)),
    ],
)
def test_every_chip_multiplies_with_its_experts(experts: int, spec: P, bits: int) -> None:
    mesh = make_mesh({"tensor": 4} if experts != 5 else {"data": 4}, CONFIG)
    weight = packed((experts, 256, 1024), spec, mesh, bits)
    x, chosen = normal(12, 1024), jnp.asarray(np.random.default_rng(3).integers(0, experts, 12), jnp.int32)
    got, ways = on_tpu(grouped_linear, mesh, x, weight, chosen)
    assert ways == {f"experts: Pallas kernel (int{bits} weights)"}
    of_row = np.asarray(weight.dequantize(), np.float64)[np.asarray(chosen)]
    expected = np.einsum("ri,roi->ro", np.asarray(x, np.float64), of_row)
    np.testing.assert_allclose(got, expected, atol=2.0**-8 * np.abs(expected).max())


def test_padded_rows_and_transposed_experts() -> None:
    """Rows of 1,120 columns are stored as 1,280; gpt-oss's matrices are [experts, in, out], which devices split by experts."""
    mesh = make_mesh({"tensor": 4}, CONFIG)
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 1120, 256)).astype(np.float32))
    weight = quantize(values, "int4", NamedSharding(mesh, P(EXPERT_AXES, None, None)), is_transposed=True)
    assert weight is not None
    assert (weight.shape, weight.num_columns) == ((8, 1120, 256), 1280)
    x, chosen = normal(12, 1120), jnp.asarray(np.random.default_rng(3).integers(0, 8, 12), jnp.int32)
    got, ways = on_tpu(functools.partial(grouped_linear, is_transposed=True), mesh, x, weight, chosen)
    assert ways == {"experts: Pallas kernel (int4 weights)"}
    of_row = np.asarray(weight.dequantize(), np.float64)[np.asarray(chosen)]
    expected = np.einsum("ri,rio->ro", np.asarray(x, np.float64), of_row)
    np.testing.assert_allclose(got, expected, atol=2.0**-8 * np.abs(expected).max())
    one = quantize(torch.cat([values[0].T, values[1].T]), "int4", NamedSharding(mesh, P(HEAD_AXES, None)))
    assert one is not None
    got, ways = on_tpu(quantized.linear, mesh, x, one)
    assert ways == {"linear: Pallas kernel (int4 weights)"}
    expected = np.asarray(x, np.float64) @ np.asarray(one.dequantize(), np.float64).T
    np.testing.assert_allclose(got, expected, atol=2.0**-8 * np.abs(expected).max())


def test_a_loaded_model_knows_how_its_packed_weights_are_split(tmp_path) -> None:
    config = tiny_llama_config(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_key_value_heads=4
    )
    made = AutoModelForTPU.from_config(config, quantization="int8", parallelism={"tensor": 4})
    made.save_pretrained(tmp_path / "packed")
    loaded = AutoModelForTPU.from_pretrained(tmp_path / "packed", parallelism={"tensor": 4})
    quantized_here = AutoModelForTPU.from_pretrained(
        save(tmp_path / "full", random_model(config)), quantization="int8", parallelism={"tensor": 4}, dtype="bfloat16"
    )
    for model in (made, loaded, quantized_here):
        for name, axes in (("q_proj", (HEAD_AXES, None)), ("o_proj", (None, HEAD_AXES))):
            weight = model.params[f"model.layers.0.self_attn.{name}.weight"]
            assert weight.spec == weight.values.sharding.spec == P(*axes)
    alone = AutoModelForTPU.from_pretrained(tmp_path / "packed")
    assert alone.params["model.layers.0.self_attn.q_proj.weight"].spec is None
