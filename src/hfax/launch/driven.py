"""`drive`: one process of a run decides, all of them compute.

Process 0 gets the model in a shape whose calls are announced to the others before they are made; the others make the same calls.
This module does not know what the calls do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfax.errors import UnsupportedOptionError
from hfax.launch.together import announce, follow


def drive(model: Any, main: Callable[[Any], Any]) -> Any:
    """Call `main(model)` in process 0, and nowhere else; the other processes make the calls of the model that it makes.

    Args:
        model: a `JaxModel`, the same in every process of the run.
        main: gets a model whose `generate`, calls, `map`, `compile` and `save_pretrained` run in every process.

    Returns:
        What `main` returned, in process 0; None in the others.

    Raises:
        Exception: what `main` raises, in process 0.
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
    """A model in process 0, whose calls the other processes make, too. It has everything else that the model has."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._everywhere("__call__", args, inputs)

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """As `JaxModel.generate`; an assistant model cannot be sent to the other processes.

        Raises:
            UnsupportedOptionError: there is one.
        """
        if options.get("assistant_model") is not None:
            raise UnsupportedOptionError(
                "assistant_model was given to a model that process 0 drives.",
                "The other processes would need their own parts of it.",
                "Use prompt_lookup_num_tokens, or run the same script in every process without drive().",
            )
        return self._everywhere("generate", (inputs,), options)

    def map(self, dataset: Any, **options: Any) -> list[Any]:
        """As `JaxModel.map`; the data set stays in process 0."""
        return type(self._model).map(self, dataset, **options)

    def compile(self, *args: Any, **options: Any) -> Any:
        """As `JaxModel.compile`."""
        return self._everywhere("compile", args, options)

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        """As `JaxModel.save_pretrained`."""
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
    """Stands for process 0's streamer in the others."""

    def put(self, value: Any) -> None:
        """Nothing is shown."""

    def end(self) -> None:
        """Nothing is shown."""
