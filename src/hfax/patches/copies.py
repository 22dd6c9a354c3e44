"""Whether a function is a copy of another one, including everything it references.

transformers copies functions and classes from model to model, and a patch that replaces one of them identifies its copies by
source. A function's own source is not enough: NanoChat's `apply_rotary_pos_emb` is identical to Llama's, but the `rotate_half` it
calls rotates in the other direction. So a function is compared together with everything it references, recursively: what it calls
(through its module's globals, its closure, or its class), the constants it uses, and its argument defaults. Names of local
variables count, types and docstrings do not. Objects without readable source are copies only of themselves.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import symtable
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_MISSING = object()
_DISPATCHERS: set[types.CodeType] = set()


def stands_in(function: Callable[..., Any]) -> None:
    """From now on, functions with this code object are compared as the function they wrap (`__wrapped__`)."""
    _DISPATCHERS.add(function.__code__)  # type: ignore[attr-defined]


def difference(
    function: Any, reference: Any, *, owner: type | None = None, reference_owner: type | None = None
) -> str | None:
    """The first difference between a function and a reference that it may be a copy of.

    Args:
        function: a function, or a method as stored on its class.
        reference: the possible original.
        owner: class of the method's first argument; None: not a method.
        reference_owner: class of the first argument of `reference`; None: not a method.

    Returns:
        A name from the function's code ("apply_rotary_pos_emb", "rotate_half", "self._norm"), or None if it is a copy.
    """
    function, reference = _without_dispatcher(function), _without_dispatcher(reference)
    if function is reference and owner is reference_owner:
        return None
    name = getattr(reference, "__name__", "it")
    if (read := _read(function)) is None or read != _read(reference):
        return name  # most functions differ here, before any further lookup
    ours, theirs = _facts(function, name, owner), _facts(reference, name, reference_owner)
    return next((n for n in [*theirs, *ours] if ours.get(n) != theirs.get(n)), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """The parsed source of a function.

    Args:
        arguments: names and kinds.
        body: its statements.
        names: external names that it uses, with attributes: ("torch", "cat").
        own: attributes of its first argument that it uses.
    """

    arguments: str
    body: str
    names: tuple[tuple[str, ...], ...]
    own: tuple[str, ...]


def _read(function: Any) -> _Reading | None:
    return _read_code(function.__code__) if isinstance(function, types.FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _read_code(code: types.CodeType) -> _Reading | None:
    try:
        source = textwrap.dedent(inspect.getsource(code))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    tree.args, tree.decorator_list, tree.returns = _bare(tree.args), [], None
    text = ast.unparse(tree)
    outside = _outside(symtable.symtable(text, "function", "exec").get_children()[0])
    chains = [chain for s in statements for chain in _chains(s)]
    first = code.co_varnames[0] if code.co_argcount else None
    return _Reading(
        arguments=f"{code.co_varnames[: _num_arguments(code)]} {code.co_posonlyargcount} {code.co_argcount} "
        f"{code.co_kwonlyargcount} {code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)}",
        body=ast.unparse(ast.Module(body=statements, type_ignores=[])),
        names=tuple(dict.fromkeys(c for c in chains if c[0] in outside)),
        own=tuple(dict.fromkeys(c[1] for c in chains if c[0] == first and len(c) > 1)),
    )


def _bare(arguments: ast.arguments) -> ast.arguments:
    """Arguments without types and defaults, which are outside the function's own scope."""

    def bare(argument: ast.arg | None) -> Any:
        return argument and ast.arg(arg=argument.arg)

    return ast.arguments(
        posonlyargs=[bare(a) for a in arguments.posonlyargs],
        args=[bare(a) for a in arguments.args],
        vararg=bare(arguments.vararg),
        kwonlyargs=[bare(a) for a in arguments.kwonlyargs],
        kw_defaults=[None] * len(arguments.kwonlyargs),
        kwarg=bare(arguments.kwarg),
        defaults=[],
    )


def _num_arguments(code: types.CodeType) -> int:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _outside(table: symtable.SymbolTable) -> set[str]:
    """Names that a function, or a function nested in it, takes from its enclosing scope."""
    found = {s.get_name() for s in table.get_symbols() if s.is_global()}
    return found.union(*(_outside(child) for child in table.get_children()))


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """`a.b.c` as ("a", "b", "c"), for every name in a statement."""
    attributes: list[str] = []
    base = node
    while isinstance(base, ast.Attribute):
        attributes.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name):
        yield (base.id, *reversed(attributes))
        return
    for child in ast.iter_child_nodes(base):
        yield from _chains(child)


_Facts = dict[str, list[Any]]
"""Names in order of first use, mapped to comparable facts, one per use."""


def _facts(function: Any, name: str, owner: type | None) -> _Facts:
    """Everything that a function references."""
    found: _Facts = {}
    _add_function(found, {}, name, function, owner)
    return found


def _add_function(
    found: _Facts, seen: dict[tuple[int, int], str], name: str, function: Any, owner: type | None
) -> None:
    function = _without_dispatcher(function)
    key = (id(function), id(owner))
    if key in seen:
        _note(found, name, ("as", seen[key]))
        return
    seen[key] = name
    reading = _read(function)
    if reading is None or _is_of_libraries(function):
        _note(found, name, id(function))
        return
    _note(found, name, (reading.arguments, reading.body))
    for number, value in enumerate(function.__defaults__ or ()):
        _add(found, seen, f"a default of {name}" if not number else f"default {number} of {name}", value, None)
    for argument, value in (function.__kwdefaults__ or {}).items():
        _add(found, seen, f"the default of {name}'s {argument}", value, None)
    for chain in reading.names:
        value, used = _resolve(function, chain)
        _add(found, seen, ".".join(used), value, None)
    if "super" in {chain[0] for chain in reading.names} or "__class__" in function.__code__.co_freevars:
        _note(found, "super()", tuple(id(c) for c in (owner or object).__mro__))
    if owner is not None:
        for attribute in (*reading.own, "__getattr__", "__getattribute__"):
            _add(found, seen, f"self.{attribute}", inspect.getattr_static(owner, attribute, _MISSING), owner)


def _add(found: _Facts, seen: dict[tuple[int, int], str], name: str, value: Any, owner: type | None) -> None:
    if isinstance(value, (staticmethod, classmethod)):
        _note(found, name, type(value))
        value, name = value.__func__, f"{name}()"
    if isinstance(value, property):
        for part in ("fget", "fset"):
            _add(found, seen, f"{name}.{part}", getattr(value, part), owner)
    elif isinstance(value, types.FunctionType):
        _add_function(found, seen, name, value, owner)
    elif isinstance(value, type) and not _is_of_libraries(value):
        _note(found, name, tuple(id(c) for c in value.__mro__[1:]))
        if (id(value), 0) not in seen:
            seen[id(value), 0] = name
            for attribute, part in vars(value).items():
                if attribute not in ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"):
                    _add(found, seen, f"{name}.{attribute}", part, value)
    else:
        _note(found, name, _comparable(value))


def _note(found: _Facts, name: str, fact: Any) -> None:
    found.setdefault(name, []).append(fact)


def _comparable(value: Any) -> Any:
    """A constant by value, anything else by identity."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(_comparable(v) for v in value)
    if type(value) is dict:
        return dict, tuple((_comparable(k), _comparable(v)) for k, v in value.items())
    return id(value)


def _resolve(function: Any, chain: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """The object of a dotted name in a function, and the attributes used to reach it: attributes are followed only in modules."""
    code, cells = function.__code__, function.__closure__ or ()
    closure = dict(zip(code.co_freevars, cells, strict=True))
    first = chain[0]
    if first in closure:
        try:
            value = closure[first].cell_contents
        except ValueError:
            value = _MISSING
    else:
        value = function.__globals__.get(first, getattr(builtins, first, _MISSING))
    used = 1
    while isinstance(value, types.ModuleType) and used < len(chain):
        value = getattr(value, chain[used], _MISSING)
        used += 1
    return value, chain[:used]


def _is_of_libraries(value: Any) -> bool:
    """Whether an object comes from torch or Python, which all models share."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in ("torch", "builtins", "math", "typing")


def _without_dispatcher(function: Any) -> Any:
    while isinstance(function, types.FunctionType) and function.__code__ in _DISPATCHERS:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function
