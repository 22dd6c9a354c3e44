"""`drive`: process 0 controls the model, all processes compute.

Process 0 gets a proxy model that announces each call before making it; the other processes make the same calls. This module is
independent of what the calls do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfax.errors import UnsupportedOptionError
from hfax.launch.together import announce, follow


def drive(model: Any, main: Callable[[Any], Any]) -> Any:
    """Call `main(model)` in process 0 only; the other processes mirror its calls to the model.

    Args:
        model: a `JaxModel`, the same in every process of the run.
        main: receives a proxy model; its `generate`, calls, `map`, `compile` and `save_pretrained` run in every process.

    Returns:
        The result of `main` in process 0; None in the others.

    Raises:
        Exception: an exception from `main`, in process 0.
    """
    import jax

    if jax.process_count() == 1:
        return main(model)
    if jax.process_index() != 0:
        follow(lambda name, args, options: getattr(model, name)(*args, **options))
        return None
    try:
        return main(Driven(model))
    finally:
        announce("end", None)


class Driven:
    """A proxy for a model in process 0; the other processes mirror its calls. Other attributes are the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._everywhere("__call__", args, inputs)

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """`JaxModel.generate` in every process, without support for assistant models.

        Raises:
            UnsupportedOptionError: `assistant_model` was passed.
        """
        if options.get("assistant_model") is not None:
            raise UnsupportedOptionError(
                "drive() does not support assistant_model.",
                "The other processes do not have the assistant model.",
                "Use prompt_lookup_num_tokens, or run the same script in every process without drive().",
            )
        return self._everywhere("generate", (inputs,), options)

    def map(self, dataset: Any, **options: Any) -> list[Any]:
        """`JaxModel.map` in every process; the dataset stays in process 0."""
        return type(self._model).map(self, dataset, **options)

    def compile(self, *args: Any, **options: Any) -> Any:
        """`JaxModel.compile` in every process."""
        return self._everywhere("compile", args, options)

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        """`JaxModel.save_pretrained` in every process."""
        self._everywhere("save_pretrained", (folder,), options)

    def _everywhere(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        shared = dict(options)
        if shared.get("streamer") is not None:
            shared["streamer"] = _Silent()
        announce("call", (name, args, shared))
        try:
            result = getattr(self._model, name)(*args, **options)
        except BaseException:
            announce("failed", None)
            raise
        announce("done", None)
        return result


class _Silent:
    """Replaces process 0's streamer in the other processes."""

    def put(self, value: Any) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""
