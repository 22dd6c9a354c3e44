"""Which weights of a traced computation can be split so that the activations between them stay split.

If the outputs of one matrix reach the inputs of another only through elementwise or per-head operations (activations, gates,
attention), the two form a pair: the first can be split by its outputs, the second by its inputs, without communication before the
second one's sums. This module finds such pairs in a jaxpr. It tracks, for every array, which axes are still the output axis of a
matrix, until an operation mixes that axis or needs all of it. Unknown operations end the tracking, so the result may miss a pair
but never reports a false one; and since XLA keeps any split correct, a missed pair only costs speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, Var

from hfax.sharding.partition import Role

_SAME = "same along the axis"
_MANY = "an axis of its own"
Axis = Any
"""The state of an array axis: `_SAME` if values are constant along it, `_MANY` if they differ, or the set of names of the weights
that produce it, heads or channels first."""

_ELEMENTWISE_CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
    "core_call",
)
_FREE = frozenset(("stop_gradient", "optimization_barrier", "copy", "reduce_precision", "sharding_constraint"))
_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
)
_ALONG_AN_AXIS = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))


def find_roles(jaxpr: Any, weights: Sequence[str | None]) -> dict[str, Role]:
    """Roles of the weights that form pairs.

    Args:
        jaxpr: jaxpr of a forward pass, without weights as constants.
        weights: weight name of each input; None for other inputs.
    """
    trace = _Trace()
    known: dict[Var, list[Axis]] = {}
    for var, name in zip(jaxpr.invars, weights, strict=True):
        if name is not None:
            trace.views[var] = (name, list(range(len(var.aval.shape))))
        known[var] = [_MANY] * len(var.aval.shape)
    for var in jaxpr.constvars:
        known[var] = [_SAME] * len(var.aval.shape)
    trace.run(jaxpr, known)
    return trace.roles()


class _Trace:
    def __init__(self) -> None:
        self.views: dict[
            Var, tuple[str, list[int | None]]
        ] = {}  # for views of a weight: its name, and the weight axis of each axis
        self.sources: dict[str, tuple[int, int]] = {}  # a weight's output axis, and its number of units
        self.sizes: dict[str, int] = {}  # length of that axis, before it is known to be heads
        self.parents: dict[str, str] = {}  # weights with outputs that are combined (union-find)
        self.broken: set[str] = set()
        self.readers: dict[
            str, list[tuple[frozenset[str] | None, int]]
        ] = {}  # the sources read by a weight at each use, and on which axis
        self.beside: dict[str, list[tuple[frozenset[str], int]]] = {}  # biases and scales of split outputs

    def roles(self) -> dict[str, Role]:
        roles: dict[str, Role] = {}
        good: dict[str, list[str]] = {}
        for reader, uses in self.readers.items():
            inputs = {self._root(name) for names, _ in uses for name in names or ()}
            if any(names is None for names, _ in uses) or len({axis for _, axis in uses}) != 1:
                self._break(frozenset(name for names, _ in uses for name in names or ()))
                continue
            for root in inputs:
                good.setdefault(root, []).append(reader)
        for reader, uses in self.readers.items():  # in order of computation: a reader is not a source afterwards
            names = frozenset(name for each, _ in uses for name in each or ())
            roots = {self._root(name) for name in names}
            members = {name for name in self.sources if self._root(name) in roots}
            all_readers = {other for root in roots for other in good.get(root, ())}
            is_whole = reader in all_readers and not members & self.broken
            if not names or not is_whole or any(name in roles and not roles[name].is_output for name in members):
                continue
            if any(other in members for other in all_readers):
                continue
            units = max(self.sources[name][1] for name in members)  # the number of query heads
            for name in members:
                own = self.sources[name]
                roles.setdefault(name, Role(axis=own[0], units=own[1], is_output=True))
            roles.setdefault(reader, Role(axis=uses[0][1], units=units, is_output=False))
        for name, uses in self.beside.items():
            if all(all(n in roles and roles[n].is_output for n in names) for names, _ in uses) and name not in roles:
                units = math.gcd(*(roles[n].units for names, _ in uses for n in names))
                roles[name] = Role(axis=uses[0][1], units=units, is_output=True)
        return roles

    # ------------------------------------------------------------------------------------------------ sets of weights

    def _root(self, name: str) -> str:
        while self.parents.get(name, name) != name:
            name = self.parents[name]
        return name

    def _join(self, names: frozenset[str]) -> None:
        first, *rest = sorted(names)
        for other in rest:
            self.parents[self._root(other)] = self._root(first)

    def _break(self, axis: Axis) -> None:
        if isinstance(axis, frozenset):
            self.broken |= {name for name in self.sources if self._root(name) in {self._root(n) for n in axis}} | axis

    def _break_all(self, axes: Sequence[Axis]) -> list[Axis]:
        for axis in axes:
            self._break(axis)
        return [_MANY] * len(axes)

    def _unified(self, axes: Sequence[Axis]) -> Axis:
        """The result axis of an elementwise operation on these axes."""
        trails = [a for a in axes if isinstance(a, frozenset)]
        if not trails:
            return _SAME if all(a == _SAME for a in axes) else _MANY
        # replicated values are sliced locally by each device
        joined = frozenset().union(*trails)
        self._join(joined)
        return joined

    # ------------------------------------------------------------------------------------------------------ equations

    def run(self, jaxpr: Any, known: dict[Var, list[Axis]]) -> None:
        for eqn in jaxpr.eqns:
            inputs = [[_SAME] * _ndim(v) if isinstance(v, Literal) else known[v] for v in eqn.invars]
            for var, axes in zip(eqn.outvars, self._results(eqn, inputs), strict=True):
                known[var] = axes

    def _results(self, eqn: Any, inputs: list[list[Axis]]) -> list[list[Axis]]:
        name = eqn.primitive.name
        if name in _ELEMENTWISE_CALLS and (inner := _inner(eqn)) is not None:
            return self._call(eqn, inner, inputs)
        if (view := self._view(eqn)) is not None:
            self.views[eqn.outvars[0]] = view
            return [[_MANY] * eqn.outvars[0].aval.ndim]
        method = getattr(self, f"_{name}", None)
        if method is not None:
            return [method(eqn, inputs)]
        if name in _REDUCTIONS:
            return [self._reduced(eqn, inputs[0])] * len(eqn.outvars)
        if name in _ALONG_AN_AXIS:
            return [self._along(inputs[0], eqn.params["axis"])]
        if name == "split":
            return [self._along(inputs[0], eqn.params["axis"])] * len(eqn.outvars)
        if name in _FREE:
            return inputs
        if len(eqn.outvars) == 1 and not eqn.params.get("jaxpr") and name not in _MIXING and _is_elementwise(eqn):
            return [self._elementwise(eqn, inputs)]
        for axes in inputs:
            self._break_all(axes)
        return [[_MANY] * v.aval.ndim for v in eqn.outvars]

    def _call(self, eqn: Any, inner: Any, inputs: list[list[Axis]]) -> list[list[Axis]]:
        jaxpr = inner.jaxpr if hasattr(inner, "jaxpr") else inner
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            known[var] = [_SAME] * var.aval.ndim
        for outer, var in zip(eqn.invars, jaxpr.invars, strict=True):
            if isinstance(outer, Var) and outer in self.views:
                self.views[var] = self.views[outer]
            else:
                self.views.pop(var, None)  # jaxprs are shared between calls
        for inside in jaxpr.eqns:
            for var in inside.outvars:
                self.views.pop(var, None)
        self.run(jaxpr, known)
        for outer, var in zip(eqn.outvars, jaxpr.outvars, strict=True):
            if isinstance(var, Var) and var in self.views:
                self.views[outer] = self.views[var]
        return [[_SAME] * _ndim(v) if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]

    def _view(self, eqn: Any) -> tuple[str, list[int | None]] | None:
        """A view of a weight by rearranging or elementwise operations."""
        kind = eqn.primitive.name
        other = eqn.invars[1] if kind in ("mul", "add", "sub", "max", "min") else None
        if isinstance(other, Var) and other in self.views and not _ndim(eqn.invars[0]):
            return self.views[other]
        if not eqn.invars or not isinstance(eqn.invars[0], Var) or eqn.invars[0] not in self.views:
            return None
        name, axes = self.views[eqn.invars[0]]
        is_alone = len(eqn.outvars) == 1 and all(not _ndim(v) for v in eqn.invars[1:])
        if (
            is_alone
            and kind not in _MIXING
            and _shape(eqn.invars[0]) == _shape(eqn.outvars[0])
            and _is_elementwise(eqn)
        ):
            return name, axes  # scaled, or an elementwise function
        if kind in ("convert_element_type", "copy", "stop_gradient", "reduce_precision", "optimization_barrier"):
            return name, axes
        if kind == "transpose":
            return name, [axes[i] for i in eqn.params["permutation"]]
        if kind in ("reshape", "squeeze", "expand_dims"):
            before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            if [n for n in before if n != 1] == [n for n in after if n != 1]:
                real = iter([a for a, n in zip(axes, before, strict=True) if n != 1])
                return name, [None if n == 1 else next(real) for n in after]
        if kind == "broadcast_in_dim":
            out: list[int | None] = [None] * eqn.outvars[0].aval.ndim
            for i, place in enumerate(eqn.params["broadcast_dimensions"]):
                if eqn.invars[0].aval.shape[i] == eqn.outvars[0].aval.shape[place]:
                    out[place] = axes[i]
            return name, out
        return None

    def _elementwise(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        ndim = eqn.outvars[0].aval.ndim
        result = []
        for axis in range(ndim):
            own, beside = [], []
            for var, axes in zip(eqn.invars, inputs, strict=True):
                if not axes:
                    continue  # a scalar
                if isinstance(var, Var) and var in self.views:
                    beside.append(self.views[var])
                else:
                    is_spread = _shape(var)[axis] == 1 != eqn.outvars[0].aval.shape[axis]
                    own.append(_SAME if is_spread else axes[axis])
            unified = self._unified(own) if own else _MANY
            for name, axes in beside:
                if axes[axis] is None:
                    continue
                if isinstance(unified, frozenset):
                    self.beside.setdefault(name, []).append((unified, axes[axis]))
                elif unified == _SAME:
                    unified = _MANY
            result.append(unified)
        return result

    def _reduced(self, eqn: Any, axes: list[Axis]) -> list[Axis]:
        gone = eqn.params["axes"]
        for axis in gone:
            self._break(axes[axis])
        return [a for i, a in enumerate(axes) if i not in gone]

    def _along(self, axes: list[Axis], axis: int) -> list[Axis]:
        """An operation along one axis; the others are unchanged."""
        self._break(axes[axis])
        return [_MANY if i == axis else a for i, a in enumerate(axes)]

    def _transpose(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        return [inputs[0][i] for i in eqn.params["permutation"]]

    def _broadcast_in_dim(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        out: list[Axis] = [_SAME] * eqn.outvars[0].aval.ndim
        for i, place in enumerate(eqn.params["broadcast_dimensions"]):
            if eqn.invars[0].aval.shape[i] == eqn.outvars[0].aval.shape[place] > 1:
                out[place] = inputs[0][i]
        return out

    def _squeeze(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        return [a for i, a in enumerate(inputs[0]) if i not in eqn.params["dimensions"]]

    def _expand_dims(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        rest = iter(inputs[0])
        return [_SAME if i in eqn.params["dimensions"] else next(rest) for i in range(eqn.outvars[0].aval.ndim)]

    def _reshape(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        out: list[Axis] = [_SAME if n == 1 else _MANY for n in after]
        for old, new in _groups(before, after):
            real_old, real_new = [i for i in old if before[i] > 1], [i for i in new if after[i] > 1]
            if not real_old:
                continue
            if len(real_old) == len(real_new) == 1:
                out[real_new[0]] = inputs[0][real_old[0]]
                continue
            first, *rest = real_old
            for i in rest:
                self._break(inputs[0][i])
            trail = inputs[0][first]
            if isinstance(trail, frozenset):
                if len(real_old) == 1:
                    for name in trail & self.sources.keys():
                        axis, units = self.sources[name]
                        is_first = units == self.sizes[name]
                        self.sources[name] = (axis, after[real_new[0]] if is_first else units)
                out[real_new[0]] = trail
            elif all(inputs[0][i] == _SAME for i in real_old):
                for i in real_new:
                    out[i] = _SAME
        return out

    def _concatenate(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        along = eqn.params["dimension"]
        out = []
        for axis in range(eqn.outvars[0].aval.ndim):
            if axis == along:
                for axes in inputs:
                    self._break(axes[axis])
                out.append(_MANY)
            else:
                out.append(self._unified([axes[axis] for axes in inputs]))
        return out

    def _slice(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        for axis, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self._break(inputs[0][axis])
        return [a if n == m or a == _SAME else _MANY for a, n, m in zip(inputs[0], before, after, strict=True)]

    _dynamic_slice = _slice

    def _pad(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        return self._slice(eqn, inputs)

    def _rev(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        axes = inputs[0]
        for axis in eqn.params["dimensions"]:
            axes = self._along(axes, axis)
        return axes

    def _scatter(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        numbers, ndim = eqn.params["dimension_numbers"], _ndim(eqn.outvars[0])
        if tuple(numbers.update_window_dims) != tuple(range(ndim)) or numbers.inserted_window_dims:
            for axes in inputs:
                self._break_all(axes)
            return [_MANY] * ndim
        return self._written(inputs[0], inputs[2], set(numbers.scatter_dims_to_operand_dims))

    def _dynamic_update_slice(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        whole, part = _shape(eqn.invars[0]), _shape(eqn.invars[1])
        return self._written(inputs[0], inputs[1], {i for i, n in enumerate(whole) if n != part[i]})

    def _written(self, whole: list[Axis], part: list[Axis], moved: set[int]) -> list[Axis]:
        """An array with a part written into it along the axes `moved`."""
        out = []
        for axis, (old, new) in enumerate(zip(whole, part, strict=True)):
            if axis in moved:
                self._break(old)
                self._break(new)
            out.append(_MANY if axis in moved else self._unified([old, new]))
        return out

    def _select_n(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        return self._elementwise(eqn, inputs)

    def _conv_general_dilated(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        """A depthwise convolution leaves channels unchanged."""
        numbers = eqn.params["dimension_numbers"]
        batch, feature = numbers.lhs_spec[:2]
        channels = eqn.invars[0].aval.shape[feature]
        trail = inputs[0][feature]
        is_depthwise = eqn.params["feature_group_count"] == channels == eqn.outvars[0].aval.shape[numbers.out_spec[1]]
        out: list[Axis] = [_MANY] * eqn.outvars[0].aval.ndim
        for i, axis in enumerate(inputs[0]):
            if i not in (batch, feature) or (i == feature and not is_depthwise):
                self._break(axis)
        out[numbers.out_spec[0]] = inputs[0][batch]
        weight = eqn.invars[1]
        if is_depthwise and isinstance(trail, frozenset):
            out[numbers.out_spec[1]] = trail
            if isinstance(weight, Var) and weight in self.views:
                name, axes = self.views[weight]
                if (own := axes[numbers.rhs_spec[0]]) is not None:
                    self.beside.setdefault(name, []).append((trail, own))
        return out

    def _dot_general(self, eqn: Any, inputs: list[list[Axis]]) -> list[Axis]:
        ((left_in, right_in), (left_batch, right_batch)) = eqn.params["dimension_numbers"]
        sides = [(eqn.invars[0], inputs[0], left_in, left_batch), (eqn.invars[1], inputs[1], right_in, right_batch)]
        is_weight = [isinstance(var, Var) and var in self.views for var, *_ in sides]
        out = [self._unified([inputs[0][a], inputs[1][b]]) for a, b in zip(left_batch, right_batch, strict=True)]
        if is_weight == [False, False]:
            for _, axes, contracted, _ in sides:
                for axis in contracted:
                    self._break(axes[axis])
            for _, axes, contracted, batch in sides:
                out += [a for i, a in enumerate(axes) if i not in (*contracted, *batch)]
            return out
        for side in (0, 1):
            var, axes, contracted, batch = sides[side]
            if not is_weight[side]:
                out += [a for i, a in enumerate(axes) if i not in (*contracted, *batch)]
                continue
            name, places = self.views[var]
            others = sides[1 - side]
            free = [i for i in range(len(axes)) if i not in (*contracted, *batch)]
            is_plain = not batch and len(contracted) == len(free) == 1 and not is_weight[1 - side]
            read, made = (places[contracted[0]], places[free[0]]) if is_plain else (None, None)
            if read is None:
                for axis in others[2]:
                    self._break(others[1][axis])
            if read is None or made is None:
                out += [_MANY] * len(free)
                continue
            trail = others[1][others[2][0]]
            use = trail if isinstance(trail, frozenset) else None
            self.readers.setdefault(name, []).append((use, read))
            size = var.aval.shape[free[0]]
            if name in self.sources and self.sources[name][0] != made:
                self.broken.add(name)
            if name not in self.sources:
                self.sources[name] = (made, size)
                self.sizes[name] = size
            out.append(frozenset({name}))
        return out


_MIXING = frozenset(("sort", "gather", "scatter", "scatter-add", "fft", "reduce_window", "top_k", "iota"))


def _is_elementwise(eqn: Any) -> bool:
    """Whether an operation is elementwise; axes of length 1 broadcast."""
    out = eqn.outvars[0].aval.shape
    shapes = [v.aval.shape for v in eqn.invars if v.aval.ndim]
    return bool(shapes) and all(
        len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out, strict=True)) for shape in shapes
    )


def _ndim(var: Any) -> int:
    return var.aval.ndim


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _inner(eqn: Any) -> Any:
    return eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive axes that map to each other in a reshape."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        while True:
            if old and new and left == right:
                break
            if (left <= right or j == len(after)) and i < len(before):
                left *= before[i]
                old.append(i)
                i += 1
            elif j < len(after):
                right *= after[j]
                new.append(j)
                j += 1
            else:
                break
        groups.append((old, new))
    return groups
