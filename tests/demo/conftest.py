"""Makes the modules of `scripts/` importable, and names the bundled checkpoint's folder."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return REPOSITORY / "src" / "hfax" / "demo"


@pytest.fixture(scope="session")
def tokenizer(demo_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder)
