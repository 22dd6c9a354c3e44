"""Small checkpoints with a tokenizer, and a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantizable_models import CONFIGS, TOKENIZER
from tiny_models import random_model, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of one of `CONFIGS`, once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            config = CONFIGS[name]()
            model = random_model(config, dtype=config.dtype)
            _make_channels_differ(model)
            made[name] = save(tmp_path_factory.mktemp("plain"), model, TOKENIZER)
        return made[name]

    return of


def _make_channels_differ(model: torch.nn.Module) -> None:
    """Norms with weights as unlike as trained ones: those of new models are all 1, and hide what is not multiplied with them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and weight.ndim == 1:
                weight += 3 * torch.rand(weight.shape, generator=generator) ** 4


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousand tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = (f"Return item {i} of the list of {i * 7 % 31} names, or raise an error.\n" for i in range(200))
    path.write_text("".join(lines))
    return path
