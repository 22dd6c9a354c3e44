"""Applies an optimizer update in place, reusing the old state's memory, and chooses the weights that decay.

XLA's CPU compiler recomputes a moment at each use, so the weight update reads the old moment, which then cannot be overwritten:
every optimizer state array was copied in each step (docs/log/training.md). Here each new state array is materialised before
anything else uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from hfax.kernels import target

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)", re.IGNORECASE)
"""Names of weights without weight decay, as in transformers' `Trainer.get_decay_parameter_names`."""


def choose_decay(module: torch.nn.Module) -> Callable[[str], bool]:
    """Whether weight decay applies to a weight of this name, as in transformers' Trainer: not to biases, nor to norms.

    Norms are known by their names, and those of torch's class (GPT-2's `ln_f`) by it.

    Args:
        module: the module that the weights are of.
    """
    norms = {path for path, part in module.named_modules() if path and isinstance(part, torch.nn.LayerNorm)}

    def decays(name: str) -> bool:
        parts = name.split(".")
        is_of_norm = any(".".join(parts[:n]) in norms for n in range(1, len(parts)))
        return not is_of_norm and _WITHOUT_DECAY.search(name) is None

    return decays


class ByWeight:
    """An optimizer that finishes one weight before it begins the next, so that what an update needs is in memory for one weight.

    It is used like an optax optimizer; `apply_optimizer` then keeps this order.

    Args:
        clip: what all gradients together go through before; `optax.identity()` if there is nothing.
        each: the rest, in which a weight's update depends on no other weight. Arrays of its state are in dicts by weight name.
    """

    def __init__(self, clip: optax.GradientTransformation, each: optax.GradientTransformation) -> None:
        self._clip, self._each = clip, each
        whole = optax.chain(clip, each)
        self.init, self.update = whole.init, whole.update

    def apply(self, grads: Any, state: Any, params: Any, keep: Any) -> tuple[Any, Any]:
        """Weights and state after a step, see `apply_optimizer`."""
        clip, whole = state
        grads, clip = self._clip.update(grads, clip, params)
        names = set(params)

        def is_by_weight(node: Any) -> bool:
            return isinstance(node, dict) and set(node) <= names

        def of(name: str) -> Any:
            return jax.tree.map(lambda n: {name: n[name]} if is_by_weight(n) else n, whole, is_leaf=is_by_weight)

        def joined(*nodes: Any) -> Any:
            return {n: a for node in nodes for n, a in node.items()} if is_by_weight(nodes[0]) else nodes[-1]

        done: list[tuple[Any, Any]] = []
        for name in params:
            old, gradient = ({name: params[name]}, of(name)), {name: grads[name]}
            if done:
                old, gradient, done[-1] = jax.lax.optimization_barrier((old, gradient, done[-1]))
            weight, own = old
            update, new = self._each.update(gradient, own, weight)
            done.append(jax.tree.map(keep, (optax.apply_updates(weight, update), new), old))
        weights = {n: a for weight, _ in done for n, a in weight.items()}
        parts = [part for _, part in done]
        return weights, (jax.tree.map(keep, clip, state[0]), jax.tree.map(joined, *parts, is_leaf=is_by_weight))


def apply_optimizer(
    optimizer: optax.GradientTransformation | ByWeight, grads: Any, state: Any, params: Any, is_finite: jax.Array
) -> tuple[Any, Any]:
    """Weights and optimizer state after a step; unchanged if `is_finite` is False.

    Args:
        optimizer: an optax optimizer.
        grads: gradients by weight name.
        state: optimizer state.
        params: weights by name.
        is_finite: scalar bool.
    """

    def keep(new: Any, old: Any) -> Any:
        return jnp.where(is_finite, new, old)

    if isinstance(optimizer, ByWeight):
        return optimizer.apply(grads, state, params, keep)
    if target.is_for("cpu"):
        updates, state = _update_in_order(optimizer, grads, state, params, keep)
    else:
        updates, new = optimizer.update(grads, state, params)
        state = jax.tree.map(keep, new, state)
    return jax.tree.map(keep, optax.apply_updates(params, updates), params), state


def _update_in_order(optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, keep: Any) -> Any:
    """`optimizer.update`, equation by equation: each new state array passes through `keep` and is materialised."""
    closed, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(grads, state, params)
    jaxpr, structure, old = closed.jaxpr, jax.tree.structure(shapes), jax.tree.leaves(state)
    num_updates = structure.num_leaves - len(old)
    updates, new = jaxpr.outvars[:num_updates], jaxpr.outvars[num_updates:]
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, jax.tree.leaves((grads, state, params)), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    computed = {var for equation in jaxpr.eqns for var in equation.outvars}
    kept = {var: array for var, array in zip(new, old, strict=True) if var in computed and new.count(var) == 1}
    for equation in jaxpr.eqns:
        inputs = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        alone = ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]), ())
        for var, value in zip(equation.outvars, jaxpr_as_fun(alone)(*map(read, inputs)), strict=True):
            values[var] = jax.lax.optimization_barrier(keep(value, kept[var])) if var in kept else value
    state_leaves = [read(var) if var in kept else keep(read(var), array) for var, array in zip(new, old, strict=True)]
    return jax.tree.unflatten(structure, [*map(read, updates), *state_leaves])
