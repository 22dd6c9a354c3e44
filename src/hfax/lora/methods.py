"""Adapter methods of a model, named as in transformers' `PeftAdapterMixin`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax

from hfax.errors import InvalidInputError
from hfax.lora.adapters import Adapters
from hfax.lora.combination import Combination
from hfax.lora.config import LoraConfig
from hfax.lora.files import find_adapter
from hfax.tracing.adapters import SCALING


class AdapterMethods:
    """Adapter methods for a model with `params`.

    Attributes:
        adapters: the loaded adapters.
    """

    params: dict[str, jax.Array]
    adapters: Adapters
    name_or_path: str

    def add_adapter(self, adapter_config: Any, adapter_name: str = "default", *, seed: int = 0) -> None:
        """Add a new adapter and activate it; outputs do not change until it is trained.

        Args:
            adapter_config: LoRA configuration, hfax's or peft's `LoraConfig`.
            adapter_name: name for the adapter.
            seed: seed of the random initialisation.

        Raises:
            InvalidInputError: the name is taken, or the config matches no layers of the model.
            UnsupportedOptionError: another adapter type, or an unsupported option.
        """
        self.adapters.draw(adapter_name, LoraConfig.of(adapter_config), self._own_params(), seed)
        self.set_adapter(adapter_name)

    def load_adapter(
        self,
        peft_model_id: str | Path,
        adapter_name: str = "default",
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> None:
        """Load an adapter saved by PEFT or hfax, and activate it.

        Args:
            peft_model_id: a folder or a Hub id.
            adapter_name: name for the adapter.
            revision: branch, tag or commit of the Hub repository.
            token: Hub token.

        Raises:
            CheckpointNotFoundError: no such adapter.
            InvalidInputError: it is for another architecture, or the name is taken.
            UnsupportedOptionError: an unsupported adapter type or option.
        """
        folder = find_adapter(peft_model_id, revision=revision, token=token)
        self.adapters.load(adapter_name, folder, self._own_params())
        self.set_adapter(adapter_name)

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "svd",
        *,
        svd_rank: int | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
    ) -> None:
        """Add an adapter that combines others, as in PEFT; `set_adapter` makes it the active one.

        Args:
            adapters: names of loaded adapters.
            weights: a weight for each; may be negative.
            adapter_name: name for the new adapter.
            combination_type: "cat": the weighted sum of the updates, exactly; its rank is the sum of their ranks. Several adapters
                are so used at once. "svd": the nearest of rank `svd_rank`. "linear", "ties", "magnitude_prune", "ties_svd" and
                "magnitude_prune_svd" as in PEFT; a single adapter is always combined by "linear".
            svd_rank: rank for "svd"; None: the largest of the adapters.
            density: share of the numbers that "ties" and "magnitude_prune" keep.
            majority_sign_method: how "ties" elects signs, "total" or "frequency".

        Raises:
            InvalidInputError: an adapter does not exist, the name is taken, or an option does not fit.
            UnsupportedOptionError: an adapter with weights in full, DoRA, PiSSA, OLoRA or parameters; or a random "dare_…".
        """
        if isinstance(adapters, str) or len(adapters) != len(weights) or not len(adapters):
            raise InvalidInputError(
                f"{len(weights)} weights are given for the adapters {adapters!r}.",
                "Each adapter has a weight.",
                "Pass two lists of equal length.",
            )
        combination = Combination(
            combination_type="linear" if len(adapters) == 1 else combination_type,
            weights=tuple(map(float, weights)),
            svd_rank=svd_rank,
            density=density,
            majority_sign_method=majority_sign_method,
        )
        self.adapters.combine(adapter_name, list(adapters), combination, self.params)
        if (active := self.adapters.active) is not None:  # its arrays are padded to the largest rank
            self.params = self.adapters.activate(active, self.params)

    def set_adapter(self, adapter_name: str) -> None:
        """Switch to an adapter. Does not recompile if all adapters are on the same layers.

        Raises:
            InvalidInputError: no such adapter, or an adapter is merged.
        """
        self.params = self.adapters.activate(adapter_name, self.params)
        self._disabled = None

    def disable_adapters(self) -> None:
        """Run the model without adapters."""
        self._disabled = self.adapters.active
        self.params = self.adapters.activate(None, self.params)

    def enable_adapters(self) -> None:
        """Undo `disable_adapters`.

        Raises:
            InvalidInputError: no adapter was disabled.
        """
        if getattr(self, "_disabled", None) is None:
            raise InvalidInputError(
                "No adapter was disabled.", "There is nothing to enable.", "Call set_adapter(name)."
            )
        self.set_adapter(str(self._disabled))

    def active_adapters(self) -> list[str]:
        """The active adapter, if any."""
        return [] if self.adapters.active is None else [self.adapters.active]

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter.

        Raises:
            InvalidInputError: no such adapter, or it is merged.
        """
        self.params = self.adapters.delete(adapter_name, self.params)

    def save_adapter(self, folder: str | Path, adapter_name: str | None = None) -> None:
        """Save an adapter in PEFT format.

        Args:
            folder: created if it does not exist; an interrupted save keeps its previous contents.
            adapter_name: adapter to save; None: the active one.

        Raises:
            InvalidInputError: no such adapter, or none is active.
            HfaxError: the folder cannot be written.
        """
        name = adapter_name or self.adapters.active
        if name is None:
            raise InvalidInputError("No adapter is active.", "No adapter_name was given.", "Pass adapter_name=….")
        self.adapters.save(name, Path(folder), self.params, self.name_or_path)

    def merge_adapter(self) -> None:
        """Merge the active adapter into the weights, so that it adds no cost; the original weights are kept for `unmerge_adapter`.

        Raises:
            InvalidInputError: no adapter is active.
            UnsupportedOptionError: a weight is quantized, or tied to another.
        """
        self.params = self.adapters.merge(self.params)

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`, bit for bit.

        Raises:
            InvalidInputError: no adapter is merged.
        """
        self.params = self.adapters.unmerge(self.params)

    def merge_and_unload(self) -> Self:
        """Merge the active adapter permanently and drop all adapters.

        Raises:
            InvalidInputError: no adapter is active.
            UnsupportedOptionError: a weight is quantized, or tied to another.
        """
        if self.adapters.merged is None:
            self.merge_adapter()
        self.adapters.forget()
        return self

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, in PEFT's format."""
        total = sum(array.size for name, array in self.params.items() if not name.endswith(SCALING))
        trained = sum(self.params[name].size for name in self.adapters.trained(self.params))
        print(  # noqa: T201 (that is what it is for)
            f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {100 * trained / total:.4f}"
        )

    def _own_params(self) -> dict[str, Any]:
        """The base model's weights, without adapters."""
        if self.adapters.merged is not None:
            raise InvalidInputError(
                f"The adapter {self.adapters.merged!r} is merged into the weights.",
                "New adapters are added to the unmerged base weights.",
                "Call unmerge_adapter() first.",
            )
        return self.adapters.without(self.params)
