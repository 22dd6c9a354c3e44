"""Generation options shared by `generate` and `chat`: length, sampling, stop strings.

Converts them to arguments of `model.generate`. Values that are invalid for every model are usage errors, reported before loading.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Annotated, Any

import typer

_PANEL = "Generation"


def _check_length(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not a positive number. Pass 1 or more.")
    return value


def _check_temperature(value: float | None) -> float | None:
    if value is not None and not 0 <= value < float("inf"):
        raise typer.BadParameter(
            f"{value} is not a valid temperature. Pass 0 for greedy decoding, or a positive number."
        )
    return value


def _check_top_k(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not a valid top-k. Pass 1 or more, or omit the option.")
    return value


def _check_probability(value: float | None) -> float | None:
    if value is not None and not 0 <= value <= 1:
        raise typer.BadParameter(f"{value} is not a probability. Pass a number between 0 and 1.")
    return value


def _check_stop(value: list[str]) -> list[str]:
    if "" in value:
        raise typer.BadParameter("an empty stop string matches everywhere. Pass at least one character.")
    return value


def _check_cache_dtype(value: str) -> str:
    from hfax.kv_cache.dtypes import CACHE_DTYPES

    if value not in CACHE_DTYPES:
        raise typer.BadParameter(f"{value} is not a dtype of the KV cache. Pass one of {', '.join(CACHE_DTYPES)}.")
    return value


NumBeamsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Beams of beam search, which prints the text at the end; 1: no beam search. Default: the model's.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        callback=_check_length,
        help="Maximum new tokens; default: the command's own limit, or the remaining context.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_temperature,
        help="Sampling temperature; lower values favour likely tokens. 0: greedy decoding.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        callback=_check_top_k,
        help="Sample from the K most likely tokens.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_probability,
        help="Sample from the smallest set of tokens with this cumulative probability.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        callback=_check_probability,
        help="Sample from tokens with at least this fraction of the top token's probability.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**32 - 1,
        help="Random seed; the same seed gives the same output.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
StopOption = Annotated[
    list[str],
    typer.Option(
        callback=_check_stop,
        help="Stop string. May be repeated.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def kv_cache_dtype_option(panel: str | None) -> Any:
    """The option --kv-cache-dtype, in a panel of the help."""
    return typer.Option(
        callback=_check_cache_dtype,
        help="fp8 (fp8_e4m3): round keys and values to 8 bits, so that twice as many tokens fit; auto: the model's dtype.",
        envvar="HFAX_KV_CACHE_DTYPE",
        rich_help_panel=panel,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """Generation options from the command line.

    None means the default from the checkpoint's generation_config.json. Temperature, top-k, top-p and min-p enable sampling; a
    temperature of 0 disables it.
    """

    max_new_tokens: MaxNewTokensOption = None
    temperature: TemperatureOption = None
    top_k: TopKOption = None
    top_p: TopPOption = None
    min_p: MinPOption = None
    num_beams: NumBeamsOption = None
    seed: SeedOption = None
    stop: StopOption = dataclasses.field(default_factory=list)
    kv_cache_dtype: Annotated[str, kv_cache_dtype_option(_PANEL)] = "auto"

    def draw_seed(self) -> int:
        """Return the given seed, or a random one."""
        return secrets.randbits(32) if self.seed is None else self.seed

    def length_within(self, default: int, prompt_length: int, context: int | None) -> int:
        """Compute max_new_tokens.

        Args:
            default: length if the user gave none; limited to the remaining context.
            prompt_length: prompt length, in tokens.
            context: context length in tokens; None if unlimited.

        Returns:
            The user's length unchanged, even if it does not fit: generate() then raises an error.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        room = default if context is None else context - prompt_length
        return min(default, room) if room > 0 else default

    def as_arguments(self) -> dict[str, Any]:
        """Convert to arguments of `model.generate`, without length and seed."""
        others = {**self._beams(), **self._stops(), **self._cache()}
        if self.temperature == 0:
            return {"do_sample": False, **others}
        drawn = {
            name: value
            for name in ("temperature", "top_k", "top_p", "min_p")
            if (value := getattr(self, name)) is not None
        }
        return {**({"do_sample": True} if drawn else {}), **drawn, **others}

    def _beams(self) -> dict[str, int]:
        return {} if self.num_beams is None else {"num_beams": self.num_beams}

    def _cache(self) -> dict[str, str]:
        return {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}

    def _stops(self) -> dict[str, Any]:
        return {"stop_strings": list(self.stop)} if self.stop else {}
