"""The protocol that a backend implements.

A third-party backend is an object with these methods and an entry point in the group `hfax.backends`:

    [project.entry-points."hfax.backends"]
    torch_tpu = "my_package:BACKEND"

Its models should subclass `hfax.backends.base_model.BaseModel`, which checks inputs and resolves generation options.
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
    """The arguments of `AutoModelForTPU.from_pretrained` that are passed to a backend."""

    task: str | None = None
    dtype: Any = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    strict: bool = True
    quantization: str | None = None
    parallelism: Any = None
    plan: str | Path | None = None
    num_labels: int | None = None

    def code_folder(self, source: CheckpointSource | None) -> str | None:
        """Where to import custom modelling code from; None if it is not trusted, or there is no checkpoint."""
        return str(source.folder) if source is not None and self.trust_remote_code else None

    def changed(self, **values: Any) -> LoadOptions:
        """A copy with the given values replaced."""
        return dataclasses.replace(self, **values)


class Model(Protocol):
    """The model interface of every backend. `hfax.backends.base_model.BaseModel` implements all but the first four members."""

    config: Any
    generation_config: Any
    backend: str

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run one forward pass."""
        ...

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Generate tokens after each prompt, with transformers' names and defaults."""
        ...

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Save in the format of plain transformers."""
        ...

    def can_generate(self) -> bool:
        """Whether `generate` works on this class."""
        ...


class Backend(Protocol):
    """Loads models and declares its capabilities.

    Attributes:
        name: the name that users pass.
        capabilities: the supported ones of "apply", "quantization", "parallelism", "plan", "num_labels", "processes", "export",
            "speculation".
    """

    name: str
    capabilities: frozenset[str]

    def problem(self) -> BackendNotAvailableError | None:
        """Why the backend is not available; None if it is. Imports its dependencies."""
        ...

    def devices(self) -> list[str]:
        """A description of each device."""
        ...

    def load(self, source: CheckpointSource, options: LoadOptions) -> Any:
        """A `Model` with the weights of a checkpoint, on one device or sharded over several."""
        ...

    def from_config(self, config: PretrainedConfig, options: LoadOptions, seed: int) -> Any:
        """A `Model` with the same random weights as transformers after `torch.manual_seed(seed)`."""
        ...
