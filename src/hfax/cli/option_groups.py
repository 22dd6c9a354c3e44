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
    """Replace each parameter whose type is a dataclass with the dataclass's fields, which are annotated as typer's options.

    A field that several of them have is one option, as the first declares it.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            options = list(_options(kind))
            groups[parameter.name] = kind, tuple(o.name for o in options)
            known = {p.name for p in parameters}
            parameters += [o for o in options if o.name not in known]
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{n: given[n] for n in names}) for name, (kind, names) in groups.items()}
        of_groups = {n for _, names in groups.values() for n in names}
        command(**made, **{name: value for name, value in given.items() if name not in of_groups})

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
