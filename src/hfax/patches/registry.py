"""The registry of patches, and the patches that are active.

The patch modules list their patches as `PATCHES`; other packages add theirs by `register_patch` or the entry point
`hfax.patches` (a patch, a list of patches, or a function that returns one). `patched(module)` activates the patches of a model,
for this thread, until its block ends; other threads keep the originals. Activation is atomic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hfax.errors import InvalidInputError
from hfax.patches import copies
from hfax.patches.patch import ForwardPatch, FunctionPatch, InputPatch, OpPatch, Patch

logger = logging.getLogger(__name__)

ENTRY_POINT = "hfax.patches"
_FAMILIES = (
    "ops",
    "attention",
    "branches",
    "masks",
    "experts",
    "control_flow",
    "ctc",
    "images",
    "indexers",
    "latents",
    "norms",
    "packed_images",
    "steps",
    "windows",
    "torch_xla",
)
_OF_JAX = ("ops", "attention", "control_flow", "ctc", "images", "latents", "norms", "windows")
"""The modules that import JAX; loaded only for the JAX backend."""

_lock = threading.RLock()
_registered: dict[str, Patch] = {}
_own: set[str] = set()
_version = 0
_loaded: set[str] = set()


def register_patch(patch: Patch) -> Callable[[], None]:
    """Register a patch for every model it matches, from the next trace on.

    Args:
        patch: an `OpPatch`, `FunctionPatch`, `ForwardPatch` or `InputPatch` with a unique name.

    Returns:
        A function that unregisters it.

    Raises:
        InvalidInputError: the name is taken, or `patch` is not a patch.
    """
    global _version
    _load()
    if not isinstance(patch, Patch):
        raise InvalidInputError(
            f"{patch!r} is not a patch.",
            "A patch declares what it changes and why.",
            "Pass an OpPatch, FunctionPatch, ForwardPatch or InputPatch from hfax.patches.patch.",
        )
    with _lock:
        if patch.name in _registered:
            raise InvalidInputError(
                f"A patch named {patch.name!r} is already registered.",
                f"It applies to {_registered[patch.name].applies_to()}.",
                "Choose another name, or undo the first registration.",
            )
        _registered[patch.name] = patch
        _version += 1

    def undo() -> None:
        global _version
        with _lock:
            if _registered.get(patch.name) is patch:
                del _registered[patch.name]
                _version += 1

    return undo


def all_patches(backend: str = "jax") -> list[Patch]:
    """All patches of a backend that the installed versions need, hfax's own first."""
    _load(backend)
    with _lock:
        return [p for p in _registered.values() if backend in p.backends and p.is_needed()]


def refusals(module: torch.nn.Module, backend: str = "jax") -> dict[str, str]:
    """Patches that do not apply to modules resembling their targets: name mapped to why.

    Modules covered by another patch for the same candidates are not reported.
    """
    patches = all_patches(backend)
    refused = {p.name: p.refused(module) for p in patches}
    groups: dict[str, list[str]] = {}
    for patch in patches:
        groups.setdefault(getattr(patch, "candidates", "") or patch.name, []).append(patch.name)
    found = {}
    for names in groups.values():
        for name in names:
            reasons = [why for part, why in refused[name].items() if all(part in refused[n] for n in names)]
            if reasons:
                found[name] = "; ".join(dict.fromkeys(reasons))
    return found


def version() -> int:
    """Changes with every registration."""
    _load()
    return _version


def fingerprint() -> str:
    """Fingerprint of third-party patches, for the key of a compiled program; "" if there are none."""
    foreign = [p for p in all_patches() if p.name not in _own]
    return hashlib.sha256("".join(repr(p) + _source(p) for p in foreign).encode()).hexdigest() if foreign else ""


@contextlib.contextmanager
def patched(module: torch.nn.Module, backend: str = "jax") -> Iterator[set[str]]:
    """Activate the model's function and forward patches for this thread until the block ends.

    Yields:
        The names of the patches used; filled while the block runs.
    """
    used: set[str] = set()
    with contextlib.ExitStack() as stack:
        for patch in all_patches(backend):
            if isinstance(patch, FunctionPatch) and patch.matches(module):
                for holder, name in patch.owners(module):
                    stack.enter_context(_function_in_force(patch, holder, name, used))
        forwards = [p for p in all_patches(backend) if isinstance(p, ForwardPatch)]
        for part in module.modules():
            for patch in forwards:
                if patch.fits(part):
                    stack.enter_context(_forward_in_force(patch, part, used))
        yield used


def prepare_inputs(
    module: torch.nn.Module, inputs: dict[str, Any], used: set[str], backend: str = "jax"
) -> dict[str, Any]:
    """The inputs after the model's input patches.

    Args:
        module: the model.
        inputs: host arrays by name.
        used: collects the names of the patches that changed something.
        backend: name of the backend that runs the model.
    """
    for patch in all_patches(backend):
        if isinstance(patch, InputPatch) and (holder := patch.holder(module)) is not None:
            changed = patch.prepare(holder, inputs)
            if changed is not inputs:
                used.add(patch.name)
            inputs = changed
    return inputs


_Place = tuple[Any, str]
"""A module or class, and the name of the function in it."""


@dataclasses.dataclass(kw_only=True)
class _Dispatcher:
    """A dispatcher that stands in the place of a function.

    Args:
        original: what stood there.
        is_inherited: whether the place is a class that inherited it.
        num_blocks: number of blocks that use the dispatcher.
    """

    original: Any
    is_inherited: bool
    num_blocks: int = 0


_local = threading.local()
_dispatchers: dict[_Place, _Dispatcher] = {}
"""The dispatchers in force: there are none when no thread traces."""


@contextlib.contextmanager
def _function_in_force(patch: FunctionPatch, holder: Any, name: str, used: set[str]) -> Iterator[None]:
    place = (holder, name)
    with _dispatched(place) as original:
        stacks: dict[_Place, list[Any]] = _local.__dict__.setdefault("stacks", {})
        replacement = patch.make(stacks[place][-1] if place in stacks else _plain(original, holder))

        def recorded(*args: Any, **kwargs: Any) -> Any:
            used.add(patch.name)
            return replacement(*args, **kwargs)

        stacks.setdefault(place, []).append(recorded)
        try:
            yield
        finally:
            stacks[place].pop()
            if not stacks[place]:
                del stacks[place]


@contextlib.contextmanager
def _dispatched(place: _Place) -> Iterator[Any]:
    """Within the block, a dispatcher stands in a place; gives what stood there before any dispatcher."""
    holder, name = place
    with _lock:
        if place not in _dispatchers:
            original = inspect.getattr_static(holder, name)
            _dispatchers[place] = _Dispatcher(original=original, is_inherited=name not in vars(holder))
            setattr(holder, name, _dispatcher(place, original))
        dispatcher = _dispatchers[place]
        dispatcher.num_blocks += 1
    try:
        yield dispatcher.original
    finally:
        with _lock:
            dispatcher.num_blocks -= 1
            if not dispatcher.num_blocks:
                _remove(place, dispatcher)


def _remove(place: _Place, dispatcher: _Dispatcher) -> None:
    holder, name = place
    del _dispatchers[place]
    if dispatcher.is_inherited:
        delattr(holder, name)
    else:
        setattr(holder, name, dispatcher.original)


def _plain(original: Any, holder: Any) -> Any:
    """The function wrapped by a static or class method."""
    return original.__func__ if isinstance(original, (staticmethod, classmethod)) else original


def _dispatcher(place: _Place, original: Any) -> Any:
    """The function installed in the module, which calls this thread's replacement or the original."""
    plain = _plain(original, None)

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        stack = getattr(_local, "stacks", {}).get(place)
        return (stack[-1] if stack else plain)(*args, **kwargs)

    copies.stands_in(dispatch)
    if isinstance(original, staticmethod):
        return staticmethod(dispatch)
    return classmethod(dispatch) if isinstance(original, classmethod) else dispatch


@contextlib.contextmanager
def _forward_in_force(patch: ForwardPatch, module: torch.nn.Module, used: set[str]) -> Iterator[None]:
    had_own = patch.method in module.__dict__
    before = getattr(module, patch.method)
    replacement = patch.make(module, before)

    def recorded(_: Any, *args: Any, **kwargs: Any) -> Any:
        used.add(patch.name)
        return replacement(*args, **kwargs)

    signature = inspect.signature(before)  # callers look which arguments a forward takes
    bound = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    recorded.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])  # type: ignore[attr-defined]
    module.__dict__[patch.method] = types.MethodType(recorded, module)
    try:
        yield
    finally:
        if had_own:
            module.__dict__[patch.method] = before
        else:
            del module.__dict__[patch.method]


def _load(backend: str | None = None) -> None:
    """Load hfax's patches for a backend, or for JAX if it is installed, then those of entry points; once."""
    if backend is None:
        backend = "jax" if importlib.util.find_spec("jax") else "torch_xla"
    wanted = [family for family in _FAMILIES if backend == "jax" or family not in _OF_JAX]
    with _lock:
        is_first, missing = not _loaded, [family for family in wanted if family not in _loaded]
        _loaded.update(missing)
        for family in missing:
            for patch in importlib.import_module(f"hfax.patches.{family}").PATCHES:
                if patch.name in _registered:
                    raise RuntimeError(f"two patches are named {patch.name!r}")
                _registered[patch.name] = patch
                _own.add(patch.name)
        for entry in () if not is_first else importlib.metadata.entry_points(group=ENTRY_POINT):
            for patch in _of_entry_point(entry):
                register_patch(patch)


def _of_entry_point(entry: importlib.metadata.EntryPoint) -> Iterable[Patch]:
    try:
        found = entry.load()
        found = found if isinstance(found, (Patch, list, tuple)) else found()
        return [found] if isinstance(found, Patch) else list(found)
    except Exception:
        logger.exception("The patches of %s could not be loaded and are skipped", entry.value)
        return []


def _source(patch: Patch) -> str:
    functions = [v for v in vars(patch).values() if callable(v)]
    try:
        return "".join(inspect.getsource(f) for f in functions)
    except (OSError, TypeError):
        return repr(functions)


def op_patches(backend: str = "jax") -> list[OpPatch]:
    """The operation patches."""
    return [p for p in all_patches(backend) if isinstance(p, OpPatch)]
