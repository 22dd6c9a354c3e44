"""The options that say how to write: length, sampling, stop strings. The same for `generate` and `chat`.

Turns them into arguments of `model.generate`. Values that no model could take are wrong usage, found before anything is
loaded.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Annotated, Any

import typer

_PANEL = "Writing"


def _check_length(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} leaves nothing to write. Ask for 1 token or more.")
    return value


def _check_temperature(value: float | None) -> float | None:
    if value is not None and not 0 <= value < float("inf"):
        raise typer.BadParameter(
            f"{value} is not a temperature. Pass 0 for the likeliest tokens, or a positive number."
        )
    return value


def _check_top_k(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} leaves no token to draw from. Pass 1 or more, or leave it out.")
    return value


def _check_probability(value: float | None) -> float | None:
    if value is not None and not 0 <= value <= 1:
        raise typer.BadParameter(f"{value} is not a probability. Pass a number from 0 to 1.")
    return value


def _check_stop(value: list[str]) -> list[str]:
    if "" in value:
        raise typer.BadParameter("an empty string stands in every text. Pass at least one character.")
    return value


MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        callback=_check_length,
        help="Most tokens to write; if left out, what the verb says, or what the model's context has room for.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_temperature,
        help="Draw tokens; below 1 the likely ones more often. 0: always the likeliest.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        callback=_check_top_k,
        help="Draw among the K likeliest tokens.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_probability,
        help="Draw among the likeliest tokens that together have this probability.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_probability,
        help="Draw among tokens with at least this share of the likeliest one's probability.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**32 - 1,
        help="Of the draws: the same seed writes the same text.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
StopOption = Annotated[
    list[str],
    typer.Option(
        callback=_check_stop,
        help="Stop after this text. May be given several times.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """The options of a command line that concern the text.

    What is None is left to the checkpoint's generation_config.json. Temperature, top-k, top-p and min-p turn sampling
    on; a temperature of 0 turns it off.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def draw_seed(self) -> int:
        """The seed asked for, or one from the system's entropy."""
        return secrets.randbits(32) if self.seed is None else self.seed

    def length_within(self, default: int, prompt_length: int, context: int | None) -> int:
        """How many tokens to ask for.

        Args:
            default: where the user gave no length; it gives way to what the context has room for.
            prompt_length: tokens.
            context: tokens, or None if not bound.

        Returns:
            The user's own length as it is, even where it does not fit: generate() then says so.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        room = default if context is None else context - prompt_length
        return min(default, room) if room > 0 else default

    def as_arguments(self) -> dict[str, Any]:
        """Arguments of `model.generate`, without length and seed."""
        if self.temperature == 0:
            return {"do_sample": False, **self._stops()}
        drawn = {
            name: value
            for name in ("temperature", "top_k", "top_p", "min_p")
            if (value := getattr(self, name)) is not None
        }
        return {**({"do_sample": True} if drawn else {}), **drawn, **self._stops()}

    def _stops(self) -> dict[str, Any]:
        return {"stop_strings": list(self.stop)} if self.stop else {}
