"""Products of float32 arrays are float32 products, as in torch, where XLA would take bfloat16 (TPU) or TF32 (GPU)."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.extend.core import jaxprs_in_params

from hfax.backends.jax.model import JaxModel
from hfax.kernels import precision
from hfax.kernels.target import compiling_for
from hfax.tracing import torchax as tracing


class _Products(torch.nn.Module):
    """One of each kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = torch.nn.Linear(8, 8), torch.nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.linear(x).mT).mT
        scores = torch.einsum("btd,bsd->bts", x, x) + torch.bmm(x, x.mT) + x @ x.mT
        return scores @ x + torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def _trace(platform: str, *, gradient: bool = False) -> list[Any]:
    """The precisions of all products that the module's trace has, or its gradient's."""
    module = _Products()
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}

    def run(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return tracing.call_module(module, weights, lambda m: tracing.unwrap(m(tracing.wrap(x)))).sum()

    x = jnp.ones((2, 4, 8))
    with compiling_for(platform, is_differentiated=gradient):
        closed = jax.make_jaxpr(jax.grad(run) if gradient else run)(weights, x)
    products = [
        eqn for eqn in _equations(closed.jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert len(products) >= 7
    return [eqn.params["precision"] for eqn in products]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


_HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_accelerators_multiply_float32(platform: str, gradient: bool) -> None:
    assert set(_trace(platform, gradient=gradient)) == {_HIGHEST}


def test_a_cpu_is_told_nothing() -> None:
    """It multiplies float32 anyhow."""
    assert set(_trace("cpu")) == {None}


def _told_torch(value: str) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def told() -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(value)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    return told


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (_told_torch("high"), jax.lax.Precision.HIGH),
        (_told_torch("medium"), jax.lax.Precision.DEFAULT),
        (lambda: jax.default_matmul_precision("high"), jax.lax.Precision.HIGH),
        (lambda: jax.default_matmul_precision("bfloat16"), jax.lax.Precision.DEFAULT),
    ],
    ids=["torch high", "torch medium", "jax high", "jax bfloat16"],
)
def test_less_where_torch_or_jax_is_told_so(told: Callable[[], AbstractContextManager[Any]], expected: Any) -> None:
    with told():
        assert set(_trace("tpu")) == {(expected, expected)}


@pytest.mark.parametrize(("told", "expected"), [("tf32", "high"), ("ieee", "highest")])
def test_torchs_newer_settings_are_read(told: str, expected: str) -> None:
    """After them torch raises when it is asked for the older one."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # else "ieee" changes nothing
    torch.backends.cuda.matmul.fp32_precision = told
    try:
        assert precision.setting() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


def test_kernels_of_half_precision_are_told_nothing() -> None:
    """Mosaic has no other precision for them, and refuses."""
    for dtype, expected in ((jnp.bfloat16, jax.lax.Precision.DEFAULT), (jnp.float32, jax.lax.Precision.HIGHEST)):
        x = jnp.ones((8, 8), dtype)
        with jax.default_matmul_precision("highest"), precision.of_kernel(x):
            (eqn,) = jax.make_jaxpr(lambda x: jax.lax.dot(x, x))(x).eqns
        assert eqn.params["precision"] == (expected, expected)


def test_a_models_positions_are_float32_too(hfax_llama: JaxModel) -> None:
    """Rotary angles are a product of float32 arrays in transformers' code: in bfloat16, position 257 would be 256."""
    ids = jnp.ones((1, 8), jnp.int32)
    with compiling_for("tpu"):
        closed = jax.make_jaxpr(lambda p: hfax_llama.apply(p, input_ids=ids, use_cache=False).logits)(hfax_llama.params)
    products = [eqn for eqn in _equations(closed.jaxpr) if eqn.primitive.name == "dot_general"]
    assert {eqn.params["precision"] for eqn in products} == {_HIGHEST}
