"""Where modelling code turns gradients off, none flows, and its own `backward` functions are used, as in torch."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from tiny_models import random_model, save
from transformers import BloomConfig

from hfax import AutoModelForTPU, make_train_step
from hfax.kernels.target import compiling_for
from hfax.tracing import torchax as tracing

_X = np.arange(1, 9, dtype=np.float32).reshape(2, 4) / 7


def _block(x: Any) -> Any:
    with torch.no_grad():
        scale = (x * 2).exp()
        scale = torch.nn.functional.softmax(scale, -1) + scale.view(-1)[3]
    return (scale * x).sum()


def _threshold(x: Any) -> Any:
    """As Hierarchical Reasoning Models run all but the last of their cycles."""
    z = x
    for cycle in range(3):
        with torch.set_grad_enabled(cycle == 2):
            z = (z * x).tanh()
    return z.sum()


@torch.no_grad()
def _decorated(x: Any) -> Any:
    return x.cos() * x


def _write(x: Any) -> Any:
    y = x * 1
    with torch.no_grad():
        mean = x.mean(0)
        top = torch.stack((mean, mean)).topk(2, dim=1).values
    return (y[:, :2] * top).sum() + (_decorated(x) * x.sin()).sum()


def _inner(x: Any) -> Any:
    with torch.no_grad(), torch.enable_grad():
        y = x**3
    return y.sum()


class _StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale, None


class _Bounded(torch.autograd.Function):
    """Two outputs, a saved tensor, a kept mask, and a gradient that is not the derivative."""

    @staticmethod
    def forward(x: Any, index: Any) -> Any:
        return x.sqrt(), x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, index = inputs
        ctx.save_for_backward(x, index)
        ctx.is_small = x < 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, index = ctx.saved_tensors
        own = torch.where(ctx.is_small, gradients[0] * 3, gradients[0] / x)
        return (own.index_add(0, index, gradients[1]) if ctx.needs_input_grad[0] else None), None


def _write_without_gradient(x: Any) -> Any:
    """As torch's cosine similarity bounds norms."""
    norm = x.norm(dim=-1, keepdim=True).clone()
    with torch.no_grad():
        norm.clamp_min_(0.7)
        norm[0] = 2.0
    return (x / norm * x.sin()).sum()


def _repeated_places(x: Any) -> Any:
    """Equal values are written to the same row twice."""
    y = x * 1
    y[torch.tensor([1, 1])] = (x[0] * x[1]).expand(2, 4)
    return (y.sin() * x).sum()


def _function(x: Any) -> Any:
    return (_StraightThrough.apply(x.sin(), 4.0) * x).sum()


def _functions_in_each_other(x: Any) -> Any:
    root, picked = _Bounded.apply(x * 1.5, torch.tensor([1, 1, 0]))
    return (_StraightThrough.apply(root, 8.0) * 2 + picked.sum()).sum()


def _function_without_gradient(x: Any) -> Any:
    with torch.no_grad():
        y = _StraightThrough.apply(x, 2.0)
    return (y * x).sum()


@pytest.mark.parametrize("is_a_step", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        _block,
        _threshold,
        _write,
        _inner,
        _write_without_gradient,
        _repeated_places,
        _function,
        _functions_in_each_other,
        _function_without_gradient,
    ],
)
def test_gradients_are_those_of_modelling_code(function: Callable[[Any], Any], is_a_step: bool) -> None:
    def traced(values: jax.Array) -> jax.Array:
        return tracing.call_module(torch.nn.Identity(), {}, lambda _: tracing.unwrap(function(tracing.wrap(values))))

    plain = torch.from_numpy(_X.copy()).requires_grad_()
    function(plain).backward()
    assert plain.grad is not None
    derive = jax.jit(jax.grad(traced))
    if is_a_step:
        with compiling_for(jax.devices()[0], is_differentiated=True):
            found = derive(_X)
    else:
        found = derive(_X)
    np.testing.assert_allclose(found, plain.grad.numpy(), rtol=1e-5)


_KINKS = np.array([-1e4, -100, -6, -3, -1, -0.5, -0.0, 0, 0.5, 1, 3, 6, 25, 89, 100, 1e4], np.float32)
_rows = lambda x: x.reshape(-1, 2)  # noqa: E731
_WITH_KINKS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(F, name)
        for name in (
            *(
                "elu",
                "selu",
                "celu",
                "softplus",
                "logsigmoid",
                "silu",
                "mish",
                "gelu",
                "relu",
                "relu6",
                "hardtanh",
                "hardswish",
            ),
            *("hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "softsign", "leaky_relu"),
        )
    },
    **{name: getattr(torch, name) for name in ("abs", "sqrt", "sinc", "sign", "square", "frac", "erf", "tanh", "exp2")},
    "elu with alpha": lambda x: F.elu(x, 0.5),
    "softplus with beta": lambda x: F.softplus(x, beta=2.0, threshold=10.0),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp from below": lambda x: x.clamp(min=0) + torch.clamp_min(x, 3) + x.clamp(max=6),
    "clamp to tensors": lambda x: x.clamp(torch.full_like(x, -3), x.flip(0)),
    "clamp in place": lambda x: (x * 1).clamp_(0, 6),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "norm": lambda x: _rows(x).norm(dim=-1),
    "norm of order 1": lambda x: _rows(x).norm(p=1, dim=-1),
    "norm of order 3": lambda x: torch.linalg.vector_norm(_rows(x).clamp(-6, 6), 3, dim=-1),
    "normalize": lambda x: F.normalize(_rows(x), dim=-1, eps=1e-3),
    "cosine similarity": lambda x: F.cosine_similarity(_rows(x), _rows(x.flip(0)), eps=1e-3),
    "softmax": lambda x: _rows(x).softmax(-1) * torch.tensor([1.0, 2.0]),
    "logsumexp": lambda x: _rows(x).logsumexp(-1),
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.flip(0), reduction="none"),
    "huber": lambda x: F.huber_loss(x, x.flip(0), reduction="none"),
    "cross-entropy of two": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), reduction="none"),
}


@pytest.mark.parametrize("name", _WITH_KINKS)
def test_derivatives_at_kinks_and_far_from_zero_are_those_of_torch(name: str) -> None:
    """Where JAX's are NaN, since a branch that is not taken overflows, or other slopes."""
    function = _WITH_KINKS[name]

    def traced(values: jax.Array) -> jax.Array:
        return tracing.call_module(
            torch.nn.Identity(), {}, lambda _: tracing.unwrap(function(tracing.wrap(values)).sum())
        )

    plain = torch.from_numpy(_KINKS.copy()).requires_grad_()
    value = function(plain).sum()
    value.backward()
    assert plain.grad is not None
    derive = jax.jit(jax.value_and_grad(traced))
    with compiling_for(jax.devices()[0], is_differentiated=True):
        found, gradient = derive(_KINKS)
    np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradient, plain.grad.numpy(), rtol=1e-3, atol=1e-5)


def test_programs_without_gradients_have_no_trace_of_it() -> None:
    def traced(values: jax.Array) -> jax.Array:
        return tracing.call_module(torch.nn.Identity(), {}, lambda _: tracing.unwrap(_threshold(tracing.wrap(values))))

    assert "stop_gradient" in str(jax.make_jaxpr(traced)(_X))
    with compiling_for(jax.devices()[0]):
        assert "stop_gradient" not in str(jax.make_jaxpr(lambda x: traced(x))(_X))


@pytest.mark.parametrize("remat", [False, True])
def test_a_model_with_a_function_of_its_own_takes_the_step_of_torch(remat: bool, tmp_path: Any) -> None:
    """Bloom's GELU, also where its layers are computed again for the gradient."""
    plain = random_model(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), seed=0)
    ids = torch.tensor([[3, 5, 7, 11, 2, 90]])
    plain(input_ids=ids, labels=ids).loss.backward()
    model = AutoModelForTPU.from_pretrained(save(tmp_path, plain))
    before = {name: np.asarray(array) for name, array in model.params.items()}
    step = make_train_step(model, optax.sgd(1.0), remat=remat, dropout=False)
    state, _ = step(step.init(), {"input_ids": ids, "labels": ids})
    for name, weight in plain.named_parameters():
        if name in before and weight.grad is not None:
            np.testing.assert_allclose(before[name] - np.asarray(state.params[name]), weight.grad, atol=1e-5)
