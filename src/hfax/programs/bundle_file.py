"""The files that make a folder a bundle. Imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfax.load.weight_files import BUNDLE_FILE

if TYPE_CHECKING:
    from hfax.load.source import CheckpointSource

FILE = BUNDLE_FILE
START, TOKENIZER = "start.json", "start-tokenizer.json"
"""Records of its model and tokenizer (`hfax.stored`), in a bundle for one device."""
PROGRAMS = "programs"
"""The folder of the programs in a bundle."""


def is_bundle(source: CheckpointSource) -> bool:
    """Whether a checkpoint is a bundle. On the Hub, bundles are loaded as plain checkpoints, since programs are code."""
    return source.revision is None and (source.folder / FILE).is_file()
