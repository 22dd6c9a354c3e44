"""Classes that tests register with transformers' auto classes, taken back: other tests of the process go over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@contextlib.contextmanager
def registrations_taken_back() -> Iterator[None]:
    """After the block, transformers knows the classes that it knew before."""
    mappings: list[Any] = [CONFIG_MAPPING]
    mappings += [cls._model_mapping for cls in vars(modeling_auto).values() if hasattr(cls, "_model_mapping")]
    mappings = [mapping for mapping in mappings if hasattr(mapping, "_extra_content")]
    before = [dict(mapping._extra_content) for mapping in mappings]
    try:
        yield
    finally:
        for mapping, content in zip(mappings, before, strict=True):
            mapping._extra_content.clear()
            mapping._extra_content.update(content)
