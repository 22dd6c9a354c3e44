"""What a backend is: the protocol that one must speak.

A third one is a module with an object that has these methods, and an entry point of the group `hfax.backends`:

    [project.entry-points."hfax.backends"]
    torch_tpu = "my_package:BACKEND"

Its models should be `hfax.backends.base_model.BaseModel`s, which checks inputs and resolves generation options for every backend.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hfax.errors import BackendNotAvailableError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.load.source import CheckpointSource


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
    """What every backend's model can do. `hfax.backends.base_model.BaseModel` has all of it but the first four."""

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
        capabilities: of "apply", "quantization", "parallelism", "plan", "processes", "export" and "speculation", those that it has.
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
