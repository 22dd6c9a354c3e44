"""What a backend is: the protocol that one must speak, and the choice among those that there are.

A third one is a module with an object that has these methods, and an entry point of the group `hfax.backends`:

    [project.entry-points."hfax.backends"]
    torch_tpu = "my_package:BACKEND"

Its models should be `hfax.base_model.BaseModel`s, which checks inputs and resolves generation options for every backend.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hfax.errors import BackendNotAvailableError, InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from hfax.load.source import CheckpointSource

logger = logging.getLogger(__name__)

ENTRY_POINT = "hfax.backends"
_BUILT_IN = {"jax": "hfax.jax_backend:BACKEND", "torch_xla": "hfax.torch_xla.backend:BACKEND"}
"""In the order in which "auto" takes them."""
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The arguments of `AutoModelForTPU.from_pretrained` that a backend sees; see there."""

    task: str | None = None
    dtype: Any = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    strict: bool = True
    quantization: str | None = None
    parallelism: Any = None
    plan: str | Path | None = None

    def changed(self, **values: Any) -> LoadOptions:
        """The same with other values."""
        return dataclasses.replace(self, **values)


class Model(Protocol):
    """What every backend's model can do. `hfax.base_model.BaseModel` has all of it but the first four."""

    config: Any
    generation_config: Any
    backend: str

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """One forward pass."""
        ...

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Tokens after each prompt, with the names and defaults of transformers."""
        ...

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write what plain transformers reads."""
        ...

    def can_generate(self) -> bool:
        """Whether `generate` works on this class."""
        ...


class Backend(Protocol):
    """Loads models and says what it can do.

    Attributes:
        name: as users write it.
        capabilities: of "apply", "quantization", "parallelism", "plan", "processes", "export" and "guesses", those that it has.
    """

    name: str
    capabilities: frozenset[str]

    def problem(self) -> BackendNotAvailableError | None:
        """Why it cannot be used here; None if it can. Imports what it needs."""
        ...

    def devices(self) -> list[str]:
        """Each device in words."""
        ...

    def load(self, source: CheckpointSource, options: LoadOptions) -> Any:
        """A `Model` with the weights of a checkpoint, on the device or split over several."""
        ...

    def from_config(self, config: PretrainedConfig, options: LoadOptions, seed: int) -> Any:
        """A `Model` with the random weights that transformers draws after `torch.manual_seed(seed)`."""
        ...


def names() -> list[str]:
    """Of all backends, those of other packages last."""
    others = [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT)]
    return [*_BUILT_IN, *(name for name in others if name not in _BUILT_IN)]


def choose_backend(name: str) -> Backend:
    """The backend of that name; for "auto" the first that works here, which is logged.

    Raises:
        InvalidInputError: there is none of that name.
        BackendNotAvailableError: it cannot be used here; it says why.
    """
    if name == "auto":
        problems = []
        for candidate in names():
            backend = _find(candidate)
            problem = backend.problem()
            if problem is None:
                logger.info("backend: %s", candidate)
                return backend
            problems.append(f"{candidate}: {problem.what}")
        raise BackendNotAvailableError(
            "No backend works here.",
            " ".join(problems),
            "Install one of the extras: pip install 'hfax[tpu]', 'hfax[cuda]', 'hfax[cpu]' or 'hfax[torch-xla]'.",
        )
    backend = _find(name)
    if (problem := backend.problem()) is not None:
        raise problem
    return backend


def require_capabilities(backend: Backend, options: LoadOptions) -> None:
    """Raise `UnsupportedOptionError` for loading options that the backend does not have."""
    for option in ("quantization", "parallelism", "plan"):
        if getattr(options, option) is not None and option not in backend.capabilities:
            raise UnsupportedOptionError(
                f"The backend {backend.name} has no {option}.",
                "It loads models as they are, onto one device.",
                f'Leave {option} out, or use backend="jax".',
            )


def _find(name: str) -> Backend:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise BackendNotAvailableError(
                f"The backend {name} could not be imported.",
                str(error),
                f"Install what it needs: pip install 'hfax[{'cpu' if name == 'jax' else name.replace('_', '-')}]'.",
            ) from error
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT):
        if entry.name == name:
            return entry.load()
    raise InvalidInputError(
        f"There is no backend {name!r}.",
        f"There are {', '.join(names())}.",
        'Use backend="jax", "torch_xla" or "auto".',
    )


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, stored: torch.dtype | None) -> torch.dtype:
    """The dtype asked for; for "auto" the config's, else that of the stored weights, else float32.

    Raises:
        InvalidInputError: it is none that every XLA device has.
    """
    import torch

    if dtype == "auto":
        chosen: Any = getattr(config, "dtype", None) or stored or torch.float32
    else:
        chosen = dtype
    name = str(chosen).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidInputError(
            f"dtype={dtype!r} is not available.",
            "Models run in one of the floating-point types that every XLA device has.",
            f"Use 'auto' or one of {', '.join(_DTYPES)}.",
        )
    return getattr(torch, name)
