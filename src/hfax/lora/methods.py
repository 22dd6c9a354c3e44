"""A model's methods for adapters, with the names that transformers gives them (`PeftAdapterMixin`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import jax

from hfax.errors import InvalidInputError
from hfax.lora.adapters import Adapters, trained_names
from hfax.lora.config import LoraConfig
from hfax.lora.files import find_adapter
from hfax.tracing.adapters import SCALING


class AdapterMethods:
    """Adapters of a model that has `params`.

    Attributes:
        adapters: those there are.
    """

    params: dict[str, jax.Array]
    adapters: Adapters
    name_or_path: str

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str = "default", *, seed: int = 0) -> None:
        """Add a new adapter and put it in force; it changes nothing before it is trained.

        Args:
            adapter_config: its shape.
            adapter_name: of one's own choice.
            seed: of its random part.

        Raises:
            InvalidInputError: the name is taken, or the config names no layers of the model.
        """
        self.adapters.draw(adapter_name, adapter_config, self._own_params(), seed)
        self.set_adapter(adapter_name)

    def load_adapter(
        self,
        peft_model_id: str | Path,
        adapter_name: str = "default",
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> None:
        """Load an adapter that peft or hfax saved, and put it in force.

        Args:
            peft_model_id: a folder, or a Hub id.
            adapter_name: of one's own choice.
            revision: of the Hub's repository.
            token: for it.

        Raises:
            CheckpointNotFoundError: there is none.
            InvalidInputError: it belongs to another architecture, or the name is taken.
            UnsupportedOptionError: of a kind that hfax does not compute.
        """
        folder = find_adapter(peft_model_id, revision=revision, token=token)
        self.adapters.load(adapter_name, folder, self._own_params())
        self.set_adapter(adapter_name)

    def set_adapter(self, adapter_name: str) -> None:
        """Put an adapter in force, instead of the one that is. Programs stay, if all adapters are on the same layers.

        Raises:
            InvalidInputError: there is none of that name, or one is merged.
        """
        self.params = self.adapters.activate(adapter_name, self.params)
        self._disabled = None

    def disable_adapters(self) -> None:
        """Run the model without any."""
        self._disabled = self.adapters.active
        self.params = self.adapters.activate(None, self.params)

    def enable_adapters(self) -> None:
        """Undo `disable_adapters`.

        Raises:
            InvalidInputError: none was disabled.
        """
        if getattr(self, "_disabled", None) is None:
            raise InvalidInputError(
                "No adapter was disabled.", "There is nothing to enable.", "Call set_adapter(name)."
            )
        self.set_adapter(str(self._disabled))

    def active_adapters(self) -> list[str]:
        """The adapter in force, if there is one."""
        return [] if self.adapters.active is None else [self.adapters.active]

    def delete_adapter(self, adapter_name: str) -> None:
        """Forget an adapter.

        Raises:
            InvalidInputError: there is none of that name, or it is merged.
        """
        self.params = self.adapters.delete(adapter_name, self.params)

    def save_adapter(self, folder: str | Path, adapter_name: str | None = None) -> None:
        """Write an adapter into a folder that peft loads.

        Args:
            folder: made if it is not there; an interrupted save leaves what was there before.
            adapter_name: None: the one in force.

        Raises:
            InvalidInputError: there is none.
            HfaxError: the folder cannot be written.
        """
        name = adapter_name or self.adapters.active
        if name is None:
            raise InvalidInputError("No adapter is in force.", "None was named.", "Pass adapter_name=….")
        self.adapters.save(name, Path(folder), self.params, self.name_or_path)

    def merge_adapter(self) -> None:
        """Add the adapter in force to the weights, so that it costs nothing; the weights it changes are kept for `unmerge_adapter`.

        Raises:
            InvalidInputError: none is in force.
            UnsupportedOptionError: the weights are integers.
        """
        self.params = self.adapters.merge(self.params)

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`, bit for bit.

        Raises:
            InvalidInputError: none is merged.
        """
        self.params = self.adapters.unmerge(self.params)

    def merge_and_unload(self) -> Self:
        """Merge the adapter in force for good, and forget all adapters; the model is then one of its own.

        Raises:
            InvalidInputError: none is in force.
            UnsupportedOptionError: the weights are integers.
        """
        if self.adapters.merged is None:
            self.merge_adapter()
        self.adapters.forget()
        return self

    def print_trainable_parameters(self) -> None:
        """Print how many of the weights training would change, in peft's words."""
        total = sum(array.size for name, array in self.params.items() if not name.endswith(SCALING))
        trained = sum(self.params[name].size for name in trained_names(self.params))
        print(  # noqa: T201 (that is what it is for)
            f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {100 * trained / total:.4f}"
        )

    def _own_params(self) -> dict[str, Any]:
        """The model's weights as they are without adapters."""
        if self.adapters.merged is not None:
            raise InvalidInputError(
                f"The adapter {self.adapters.merged!r} is merged into the weights.",
                "Others are made beside the model's own weights.",
                "Call unmerge_adapter() first.",
            )
        return self.adapters.without(self.params)
