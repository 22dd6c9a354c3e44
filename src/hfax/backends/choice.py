"""The available backends, hfax's own and third-party ones, and backend selection."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

from hfax.backends.protocol import Backend, LoadOptions
from hfax.errors import BackendNotAvailableError, InvalidInputError, UnsupportedOptionError

logger = logging.getLogger(__name__)

ENTRY_POINT = "hfax.backends"
_BUILT_IN = {"jax": "hfax.backends.jax.backend:BACKEND", "torch_xla": "hfax.backends.torch_xla.backend:BACKEND"}
"""In the order that "auto" tries them."""


def names() -> list[str]:
    """Names of all backends, third-party ones last."""
    others = [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT)]
    return [*_BUILT_IN, *(name for name in others if name not in _BUILT_IN)]


def choose_backend(name: str) -> Backend:
    """The backend with this name; for "auto" the first available one, which is logged.

    Raises:
        InvalidInputError: there is no backend with this name.
        BackendNotAvailableError: the backend is not available; the message says why.
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
            "No backend is available.",
            " ".join(problems),
            "Install one of the extras: pip install 'hfax[tpu]', 'hfax[cuda]', 'hfax[cpu]' or 'hfax[torch-xla]'.",
        )
    backend = _find(name)
    if (problem := backend.problem()) is not None:
        raise problem
    return backend


def require_capabilities(backend: Backend, options: LoadOptions) -> None:
    """Raise `UnsupportedOptionError` for loading options that the backend does not support."""
    for option in ("quantization", "parallelism", "plan", "num_labels"):
        if getattr(options, option) is not None and option not in backend.capabilities:
            raise UnsupportedOptionError(
                f"The backend {backend.name} does not support {option}.",
                "It loads models unchanged onto one device.",
                f'Remove {option}, or use backend="jax".',
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
                f"Install its dependencies: pip install 'hfax[{'cpu' if name == 'jax' else name.replace('_', '-')}]'.",
            ) from error
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT):
        if entry.name == name:
            return entry.load()
    raise InvalidInputError(
        f"There is no backend {name!r}.",
        f"Available: {', '.join(names())}.",
        'Use backend="jax", "torch_xla" or "auto".',
    )
