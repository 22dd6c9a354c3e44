"""Patches: named, documented, reversible changes that are active only while one thread traces.

There are four kinds, in order of preference. An `OpPatch` lowers one torch operation. A `FunctionPatch` replaces one function or
method of transformers or torch, only in the tracing thread. A `ForwardPatch` replaces the forward of certain modules of the
model, on the instances, not on their class. An `InputPatch` changes the model's inputs on the host, before tracing, where shapes
depend on their values. The registry tracks which patches exist and which are active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from packaging.requirements import Requirement

from hfax.patches import copies

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """The fields common to all patches.

    Args:
        name: unique, lower case with hyphens.
        why: the error or wrong result that it fixes, with a link if there is one.
        versions: requirements ("transformers>=5.0") that must all hold for it to be needed; empty: always.
        backends: names of the backends it applies to.
    """

    kind: ClassVar[str] = ""
    name: str
    why: str
    versions: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("jax",)

    def applies_to(self) -> str:
        """A description of what it changes."""
        raise NotImplementedError

    def is_needed(self) -> bool:
        """Whether the installed versions need it."""
        requirements = [Requirement(v) for v in self.versions]
        return all(r.specifier.contains(_version(r.name), prereleases=True) for r in requirements)

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether it applies to this model."""
        return True

    def refused(self, module: torch.nn.Module) -> dict[Any, str]:
        """Classes or functions of this model that resemble its targets, mapped to why it does not apply."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpPatch(Patch):
    """A lowering of a torch operation to a function of arrays.

    Args:
        ops: names of the operation, such as "torch.nn.functional.linear" or "aten.linear" (or "aten.linear.default").
        lower: takes the operation's arguments with `jax.Array`s instead of tensors; returns arrays.
        takes_quantized: weights may be `QuantizedArray`s; otherwise they are dequantized.
        draws: it also takes `next_key`, a function that returns a new PRNG key.
    """

    kind: ClassVar[str] = "operation"
    ops: tuple[str, ...]
    lower: Callable[..., Any]
    takes_quantized: bool = False
    draws: bool = False

    def applies_to(self) -> str:
        """The names of the operations."""
        return ", ".join(self.ops)

    def resolve(self) -> list[Any]:
        """The torch objects for the names; names that this torch version lacks are skipped."""
        found = (_torch_op(name) for name in self.ops)
        return [op for op in found if op is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPatch(Patch):
    """A replacement for a function of a module or a method of a class.

    Args:
        target: "package.module:function" or "package.module:Class.method"; "*:function" for the function of that name in every
            module that defines a class of the model.
        make: takes the original and returns its replacement.
        model_types: model types it applies to; empty: all.
        only_if: a further condition on the function.
        why_not: returns why the patch cannot replace a function, for `hfax doctor`; None: it can.
    """

    kind: ClassVar[str] = "function"
    target: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    model_types: tuple[str, ...] = ()
    only_if: Callable[[Any], bool] = lambda function: True
    why_not: Callable[[Any], str | None] = lambda function: None

    def applies_to(self) -> str:
        """The name of the function."""
        return self.target

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether the model has one of the types."""
        return not self.model_types or bool(set(self.model_types) & model_types_of(module))

    def owners(self, module: torch.nn.Module) -> list[tuple[Any, str]]:
        """The objects that hold the function for this model, and its name on them."""
        found = self._holders(module)
        return [(h, n) for h, n in found if self.only_if(getattr(h, n)) and self.why_not(getattr(h, n)) is None]

    def refused(self, module: torch.nn.Module) -> dict[Any, str]:
        """Functions of that name that it does not replace."""
        found = [getattr(h, n) for h, n in self._holders(module)] if self.matches(module) else []
        return {function: why for function in found if (why := self.why_not(function)) is not None}

    def _holders(self, module: torch.nn.Module) -> list[tuple[Any, str]]:
        module_name, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        if module_name == "*":
            holders = {
                id(m): m for part in module.modules() if (m := sys.modules.get(type(part).__module__)) is not None
            }
            return [(m, name) for m in holders.values() if name in vars(m)]
        holder: Any = importlib.import_module(module_name)
        for part in classes:
            holder = getattr(holder, part)
        return [(holder, name)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPatch(Patch):
    """A replacement for the forward (or another method) of some modules of a model.

    Args:
        classes: class names of the modules, or of a base class ("DbrxExperts"); empty: only `only_if` decides. With the defining
            module ("transformers.models.dbrx.modeling_dbrx:DbrxExperts") the patch replaces the method of that class and its
            copies, but not an override in a subclass or in another class of that name.
        make: takes the module and its own method, and returns the replacement.
        method: name of the method.
        only_if: a further condition on the module.
        why_not: returns why the patch cannot replace a module's method; None: it can.
        candidates: a pattern of class names ("*RMSNorm") for which `hfax doctor` reports `why_not`.
    """

    kind: ClassVar[str] = "module"
    classes: tuple[str, ...]
    make: Callable[[torch.nn.Module, Callable[..., Any]], Callable[..., Any]]
    method: str = "forward"
    only_if: Callable[[Any], bool] = lambda module: True
    why_not: Callable[[Any], str | None] = lambda module: None
    candidates: str = ""

    def applies_to(self) -> str:
        """The classes and the method."""
        if not self.classes:
            return f"{self.method} of modules known by their source"
        return ", ".join(f"{name}.{self.method}" for name in self._named())

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether the model has such a module."""
        return any(self.fits(m) for m in module.modules())

    def fits(self, module: torch.nn.Module) -> bool:
        """Whether it applies to this module."""
        return self._is_candidate(module) and self.only_if(module) and self._why_not(module) is None

    def refused(self, module: torch.nn.Module) -> dict[Any, str]:
        """Named or candidate classes that it does not replace."""
        found = {
            type(m): m
            for m in module.modules()
            if (self._is_candidate(m) if self.classes else fnmatch.fnmatchcase(type(m).__name__, self.candidates))
        }
        return {kind: why for kind, m in found.items() if (why := self._why_not(m)) is not None}

    def _named(self) -> dict[str, str]:
        """Class names mapped to their modules; "" for any module."""
        return {name: place for place, _, name in (c.rpartition(":") for c in self.classes)}

    def _is_candidate(self, module: torch.nn.Module) -> bool:
        named = self._named()
        return hasattr(module, self.method) and (
            not named or any(cls.__name__ in named for cls in type(module).__mro__)
        )

    def _why_not(self, module: torch.nn.Module) -> str | None:
        kind, named = type(module), self._named()
        name = next((cls.__name__ for cls in kind.__mro__ if cls.__name__ in named), None)
        if name is not None and named[name]:
            reference = getattr(importlib.import_module(named[name]), name)
            ours, theirs = getattr(kind, self.method), getattr(reference, self.method)
            different = copies.difference(ours, theirs, owner=kind, reference_owner=reference)
            if different is not None:
                return f"{different} of {kind.__name__} differs from that of transformers' {name}"
        return self.why_not(module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputPatch(Patch):
    """A change of inputs on the host, before tracing, for models with shapes that depend on input values.

    Args:
        classes: class names of the model or of a module in it.
        prepare: takes the module and the inputs by name, as host arrays; returns the inputs to trace. Must be idempotent.
    """

    kind: ClassVar[str] = "inputs"
    classes: tuple[str, ...]
    prepare: Callable[[torch.nn.Module, dict[str, Any]], dict[str, Any]]

    def applies_to(self) -> str:
        """The names of the classes."""
        return ", ".join(self.classes)

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether the model has such a module."""
        return self.holder(module) is not None

    def holder(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The module it applies to."""
        return next((m for m in module.modules() if {c.__name__ for c in type(m).__mro__} & set(self.classes)), None)


def model_types_of(module: torch.nn.Module) -> set[str]:
    """The model types of a model and its submodels."""
    config = getattr(module, "config", None)
    found = {getattr(config, "model_type", "")}
    for name in getattr(config, "sub_configs", None) or ():
        found.add(getattr(getattr(config, name, None), "model_type", ""))
    return found - {""}


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _torch_op(name: str) -> Any:
    if name.startswith("aten."):
        found: Any = torch.ops.aten
        parts = name.split(".")[1:]
    else:
        module, _, attribute = name.rpartition(".")
        if module.startswith("torch.ops."):
            found, parts = torch.ops, name.split(".")[2:]
        else:
            found, parts = torch, [*module.split(".")[1:], attribute]
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


@contextlib.contextmanager
def forwards_replaced(replaced: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block, each module's `forward` is replaced by its function; restored afterwards."""
    given = list(replaced)
    before = [module.__dict__.get("forward") for module, _ in given]
    try:
        for module, forward in given:
            module.__dict__["forward"] = forward
        yield
    finally:
        for (module, _), forward in zip(given, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
