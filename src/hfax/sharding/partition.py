"""How each weight is sharded over a mesh, and why.

Turns a skeleton's module and a mesh into a `PartitionSpec` for every weight. The spec comes from, in this order: the user's spec
for its name; the model's tensor-parallel plan (`base_model_tp_plan` of its config); the roles inferred from the traced computation
(`hfax.sharding.structure`). Experts are split by expert if they divide, embedding tables and heads by vocabulary. On the axis
`fsdp` every matrix is split once more. Weights that do not divide are replicated, and the plan says so.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfax.errors import InvalidInputError
from hfax.sharding.mesh import FSDP, HEAD_AXES, TENSOR, Mesh, NamedSharding, P, expert_axes, size_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """How a weight can be split.

    Args:
        axis: axis of the weight.
        units: maximum number of parts, for example heads; the split size must divide it.
        is_output: the axis is an output axis of the weight rather than an input axis.
    """

    axis: int
    units: int
    is_output: bool


Roles = Callable[[], Mapping[str, Role]]
"""Returns the roles of weights inferred from the traced computation, by name; called only if a model has no plan of its own."""

_KEYS_AND_VALUES = re.compile(r"(^|[._])(k|v|key|value)(_?proj|_lin)?$")
_MAX_UNPLANNED = 0.01
"""Share of the weights outside of experts that a model's own plan may omit before roles are inferred from the computation."""
_MIN_FSDP = 1 << 10
"""Weights with fewer elements are not split over the axis "fsdp"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The plan of one weight.

    Args:
        name: checkpoint name.
        shape: full shape.
        num_bytes: full size in bytes.
        spec: its partition spec.
        why: the reason, as text.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    spec: P
    why: str

    def bytes_per_device(self, mesh: Mesh) -> int:
        """Size of the weight per device, in bytes."""
        return self.num_bytes // math.prod(size_of(mesh, axes) for axes in self.spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The sharding plan of all weights; printed as a table.

    Args:
        mesh: a mesh with the axes of `hfax.sharding.mesh.AXES`.
        weights: plans by weight name.
    """

    mesh: Mesh
    weights: dict[str, WeightPlan]

    def sharding(self, name: str) -> NamedSharding:
        """The sharding of the weight of this name."""
        return NamedSharding(self.mesh, self.weights[name].spec)

    @property
    def bytes_per_device(self) -> int:
        """Size of all weights per device, in bytes."""
        return sum(w.bytes_per_device(self.mesh) for w in self.weights.values())

    def __str__(self) -> str:
        """The plan as a table; equal layers share a line."""
        groups: dict[tuple[Any, ...], list[WeightPlan]] = {}
        for weight in self.weights.values():
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", weight.name), weight.shape, weight.spec, weight.why)
            groups.setdefault(key, []).append(weight)
        rows = [("weight", "shape", "split", "bytes a device", "why")]
        for (name, shape, spec, why), members in groups.items():
            bytes_each = members[0].bytes_per_device(self.mesh)
            count = f"{len(members)} x {bytes_each:,}" if len(members) > 1 else f"{bytes_each:,}"
            rows.append((name, " x ".join(map(str, shape)), _spec_text(spec, self.mesh), count, why))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        sizes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items() if size > 1) or "one device"
        total = sum(w.num_bytes for w in self.weights.values())
        lines.append(f"mesh: {sizes}; {self.bytes_per_device:,} of {total:,} bytes a device")
        return "\n".join(lines)

    __repr__ = __str__


def make_plan(
    module: PreTrainedModel,
    shapes: Mapping[str, torch.Tensor],
    mesh: Mesh,
    *,
    roles: Roles,
    given: Mapping[str, P] | None = None,
    granularity: Mapping[str, tuple[int, int]] | None = None,
    num_bytes: Mapping[str, int] | None = None,
) -> ShardingPlan:
    """Create a sharding plan for all weights.

    Args:
        module: a skeleton's module.
        shapes: its weights, by name.
        mesh: the mesh from `make_mesh`.
        roles: infers roles, see `Roles`.
        given: name patterns mapped to specs; the first match wins.
        granularity: for quantized weights, an axis, counted from the last, and how many neighbours must stay together on it.
        num_bytes: sizes of weights that are stored in another format than in `shapes`.

    Raises:
        InvalidInputError: a given spec names an unknown mesh axis or does not divide the shape, or a pattern matches no weight.
    """
    own = {name: style for name, style in (module.tp_plan or {}).items() if isinstance(style, str)}
    tables, experts = _tables(module), _experts(module)
    # some plans cover only the head, or omit large matrices
    known = {*tables, *experts, *(name for name in shapes if _style(own, name) is not None)}
    is_enough = _share_of_others(shapes, known, experts) <= _MAX_UNPLANNED
    shown = {} if is_enough or size_of(mesh, HEAD_AXES) == 1 else roles()
    given = _checked(given or {}, shapes, mesh)
    plans = {}
    for name, tensor in shapes.items():
        shape, units = tuple(tensor.shape), [1] * tensor.ndim
        if (found := (granularity or {}).get(name)) is not None:
            axis, units[axis] = found
        if name in given:
            spec, why = given[name], "as given"
        else:
            spec, why = _split(name, shape, mesh, own, shown, tables, experts)
            spec, why = _fitting(spec, why, shape, mesh, units)
            spec, why = _with_fsdp(spec, why, shape, mesh, units)
        size = (num_bytes or {}).get(name, tensor.numel() * tensor.element_size())
        plans[name] = WeightPlan(name=name, shape=shape, num_bytes=size, spec=spec, why=why)
    return ShardingPlan(mesh=mesh, weights=plans)


def _share_of_others(shapes: Mapping[str, torch.Tensor], known: Collection[str], experts: Collection[str]) -> float:
    """The share of matrices that are not known. Experts do not count, since they would hide whole attention layers; nor do routers,
    which stay on every device."""
    counts = {shapes[name].shape[0] for name in experts}
    dense = {name: t for name, t in shapes.items() if name not in experts}
    others = (t for name, t in dense.items() if t.ndim == 2 and t.shape[0] not in counts and name not in known)
    return sum(t.numel() for t in others) / max(1, sum(t.numel() for t in dense.values()))


def _split(
    name: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    own: Mapping[str, str],
    shown: Mapping[str, Role],
    tables: set[str],
    experts: Mapping[str, int],
) -> tuple[P, str]:
    """The preferred split over the head and expert axes, whether it divides or not."""
    ndim = len(shape)
    style = _style(own, name)
    if name in experts and (axes := expert_axes(mesh, shape[0])):
        return _on_axis(0, axes, ndim), "experts"
    if size_of(mesh, HEAD_AXES) == 1:
        return P(*[None] * ndim), "no axis splits it"
    if name in tables and ndim == 2:
        return _on_axis(0, HEAD_AXES, ndim), "vocabulary"
    if name in experts:
        # a fused gate and up matrix: splitting outputs between the two would require communication; they share their input
        return _on_axis(experts[name], HEAD_AXES, ndim), "what experts read"
    if style is not None:
        axis = _axis_of_style(style, name, ndim)
        if axis is None:
            return P(*[None] * ndim), f"the model's plan: {style}"
        return _on_axis(axis, _head_axes(name), ndim), f"the model's plan: {style}"
    if (role := shown.get(name)) is not None:
        kind = f"it {'makes' if role.is_output else 'reads'} {role.units} heads or channels"
        axes = next((a for a in (HEAD_AXES, (TENSOR,)) if role.units % size_of(mesh, a) == 0), None)
        if axes is None:
            parts = size_of(mesh, HEAD_AXES)
            return P(*[None] * ndim), f"on every device: {role.units} heads or channels do not divide by {parts}"
        return _on_axis(role.axis, axes, ndim), f"traced: {kind}"
    return P(*[None] * ndim), "on every device"


def _head_axes(name: str) -> tuple[str, ...]:
    layer = name.rpartition(".")[0]
    return (TENSOR,) if _KEYS_AND_VALUES.search(layer) else HEAD_AXES


def _on_axis(axis: int, axes: tuple[str, ...], ndim: int) -> P:
    return P(*(axes if i == axis else None for i in range(ndim)))


def _fitting(spec: P, why: str, shape: tuple[int, ...], mesh: Mesh, units: Sequence[int]) -> tuple[P, str]:
    """The spec, but replicated if a dimension does not divide into parts of whole units."""
    for axis, axes in enumerate(spec):
        parts = size_of(mesh, axes)
        if parts > 1 and shape[axis] % (parts * units[axis]):
            return P(*[None] * len(shape)), f"on every device: {shape[axis]} does not divide by {parts} ({why})"
    return spec, why


def _with_fsdp(spec: P, why: str, shape: tuple[int, ...], mesh: Mesh, units: Sequence[int]) -> tuple[P, str]:
    parts = mesh.shape[FSDP]
    if parts == 1 or len(shape) < 2 or math.prod(shape) < _MIN_FSDP:
        return spec, why
    free = [i for i, axes in enumerate(spec) if axes is None]
    fitting = [i for i in free if shape[i] % (parts * units[i]) == 0]
    if not fitting:
        return spec, f"{why}; no axis divides by {parts} for fsdp"
    chosen = max(fitting, key=lambda i: shape[i])
    return P(*(FSDP if i == chosen else axes for i, axes in enumerate(spec))), f"{why}; fsdp"


def _tables(module: PreTrainedModel) -> set[str]:
    """Token embedding tables and output heads."""
    found = set()
    parts = {part: path for path, part in module.named_modules()}
    for get in (module.get_input_embeddings, module.get_output_embeddings):
        try:
            part = get()
        except (NotImplementedError, AttributeError):
            continue
        if part in parts:
            found.add(f"{parts[part]}.weight")
    return found


def _experts(module: PreTrainedModel) -> dict[str, int]:
    """Stacked expert matrices of each layer, [experts, …], and their input axis."""
    found = {}
    for path, part in module.named_modules():
        if (is_transposed := getattr(part, "is_transposed", None)) is not None:  # transformers' experts interface
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                if getattr(getattr(part, name, None), "ndim", 0) == 3:
                    found[f"{path}.{name}"] = 1 if is_transposed else 2
    return found


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """The plan's entry for a weight or its layer."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    for key in (general, general.rpartition(".")[0]):
        if key in plan:
            return plan[key]
    return None


def _axis_of_style(style: str, name: str, ndim: int) -> int | None:
    """The axis of a layer's weight or bias that a style splits."""
    if "colwise" in style:
        return max(ndim - 2, 0)
    return ndim - 1 if "rowwise" in style and ndim > 1 else None


def _checked(given: Mapping[str, P], shapes: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, P]:
    """The given spec of every weight that a pattern matches, with one entry per axis."""
    found: dict[str, P] = {}
    for pattern, spec in given.items():
        matching = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise InvalidInputError(
                f"The pattern {pattern!r} matches no weight.",
                "Patterns match names in `model.params`; * matches anything.",
                f"Use names such as {', '.join(list(shapes)[:3])}.",
            )
        for name in matching:
            shape = tuple(shapes[name].shape)
            whole = P(*spec, *[None] * (len(shape) - len(spec)))
            unknown = [a for axes in whole if axes for a in ((axes,) if isinstance(axes, str) else axes)]
            unknown = [a for a in unknown if a not in mesh.shape]
            parts = [] if unknown else [size_of(mesh, axes) for axes in whole]
            if unknown or len(whole) > len(shape) or any(n % p for n, p in zip(shape, parts, strict=True)):
                raise InvalidInputError(
                    f"{name}, {' x '.join(map(str, shape))}, cannot be split as {spec}.",
                    f"The mesh has the axes {dict(mesh.shape)}, and each must divide the dimension it splits.",
                    "Change the spec, or remove it to use hfax's plan for this weight.",
                )
            found.setdefault(name, whole)
    return found


def _spec_text(spec: P, mesh: Mesh) -> str:
    """The spec as text, without mesh axes of size 1."""
    parts = []
    for axes in spec:
        names = (axes,) if isinstance(axes, str) else axes or ()
        parts.append("·".join(n for n in names if mesh.shape[n] > 1) or "-")
    return ", ".join(parts) if parts else "-"
