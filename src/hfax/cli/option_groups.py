"""Groups of command-line options: dataclasses whose fields are options, in place of a long list of parameters.

A command takes such a dataclass as one parameter; `expand` gives typer a function with one parameter for each field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass with the dataclass's fields, which are annotated as typer's options."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            options = list(_options(kind))
            groups[parameter.name] = kind, tuple(o.name for o in options)
            parameters += options
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, names) in groups.items():
            given[name] = kind(**{n: given.pop(n) for n in names})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options(group: type) -> typing.Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
