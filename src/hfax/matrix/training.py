"""Compares a training step of a small model with torch: the gradients of a random scalar of its outputs, and the weights after it.

The scalar weighs every number of the first floating-point output at random, so it needs no labels and works for any class. Models
are in eval mode: dropout draws other numbers in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

from hfax.backends.jax.model import JaxModel
from hfax.synthetic.inputs import CaseInputs

_SKIPPED = ("loss", "cache", "past_key_values", "mems", "state")
_FLOOR = 1e-3
"""Gradients are compared on their own scale, or on this share of the largest gradient's, if that is larger."""


def gradient_error(model: JaxModel, expected: Mapping[str, torch.Tensor], inputs: CaseInputs) -> tuple[float, str]:
    """The largest error of a gradient that a training step applied, relative to its scale, and the weight's name.

    Args:
        model: hfax's model.
        expected: `torch_gradients` of the same model.
        inputs: of a forward pass.
    """
    largest = max(float(g.abs().max()) for g in expected.values())
    return _largest_error(_step_gradients(model, inputs, largest), expected)


def gradient_noise(plain: torch.nn.Module, others: Iterable[torch.nn.Module], inputs: CaseInputs) -> float:
    """How far gradients of almost the same models are from a model's, see `gradient_error`.

    Args:
        plain: a model.
        others: with weights that differ by rounding, or in float64.
        inputs: of a forward pass.
    """
    expected, largest = torch_gradients(plain, inputs), 0.0
    for other in others:
        found = {name: gradient.numpy() for name, gradient in torch_gradients(other, inputs).items()}
        largest = max(largest, _largest_error(found, expected)[0])
    return largest


def _largest_error(found: Mapping[str, np.ndarray], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    largest = max(float(g.abs().max()) for g in expected.values())
    error, worst = 0.0, ""
    for name, gradient in expected.items():
        if name in found:  # others are aliases of tied weights, or buffers
            scale = max(float(gradient.abs().max()), _FLOOR * largest)
            own = float(np.abs(found[name] - gradient.numpy()).max()) / scale
            if not own <= error:
                error, worst = own, name
    return error, worst


def torch_gradients(plain: torch.nn.Module, inputs: CaseInputs) -> dict[str, torch.Tensor]:
    """The gradients of the random scalar in plain transformers, by the weight's name.

    Args:
        plain: a model; its gradients are overwritten.
        inputs: of a forward pass.

    Raises:
        RuntimeError: it has no gradients for these outputs.
    """
    plain.zero_grad()
    is_double = next(plain.parameters()).dtype == torch.float64
    output = first_floats(plain(**{n: _as_double(v) if is_double else v for n, v in inputs.forward.items()}))
    if not output.requires_grad:
        raise RuntimeError("plain transformers has no gradient of its first output")
    finite = torch.where(output.isfinite(), output, 0.0)  # scores of what is masked are infinite
    (finite * torch.from_numpy(_factors(tuple(output.shape), inputs.mask))).sum().backward()
    found = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None and p.numel()}
    if not any(bool(g.abs().max() > 0) for g in found.values()):
        raise RuntimeError("plain transformers' gradients are zero")
    return found


def _step_gradients(model: JaxModel, inputs: CaseInputs, largest: float) -> dict[str, np.ndarray]:
    """Of one step of plain gradient descent: what it took off the weights, over the learning rate."""
    from hfax.train.step import make_train_step

    def loss(apply: Any, batch: Mapping[str, Any]) -> Any:
        output = first_floats(apply(**batch))
        finite = jnp.where(jnp.isfinite(output), output, 0.0)
        return (finite * jnp.asarray(_factors(tuple(output.shape), inputs.mask))).sum()

    # weights are of order 1, so that rounding them hides little of the gradient
    rate = 2.0 ** max(10, math.ceil(-math.log2(largest)))
    step = make_train_step(model, optax.sgd(rate), loss, dropout=False)
    state = step.init()
    before = {name: np.asarray(array) for name, array in state.params.items()}
    state, metrics = step(state, inputs.forward)
    if not bool(metrics["is_finite"]):
        raise FloatingPointError(
            f"the loss is {float(metrics['loss'])}, the gradients' norm {float(metrics['grad_norm'])}"
        )
    return {name: (before[name] - np.asarray(array)) / rate for name, array in state.params.items()}


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def first_floats(output: Any) -> Any:
    """The first floating-point array of a model's output that is no loss and no cache.

    Raises:
        RuntimeError: there is none.
    """
    found = next(_floats(output), None)
    if found is None:
        raise RuntimeError("the model has no floating-point output")
    return found


def _floats(value: Any) -> Iterator[Any]:
    if hasattr(value, "items"):
        for name, part in value.items():
            if name not in _SKIPPED:
                yield from _floats(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _floats(part)
    elif isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
        yield value


def _factors(shape: tuple[int, ...], mask: torch.Tensor | None) -> np.ndarray:
    """Random weights of an output's numbers, 0 where it is not compared; small, so that the sum is."""
    factors = np.random.default_rng(0).standard_normal(shape).astype(np.float32) / np.sqrt(max(np.prod(shape), 1))
    if mask is not None and shape[:2] == tuple(mask.shape):
        factors[~mask.numpy()] = 0.0
    return factors.astype(np.float32)
