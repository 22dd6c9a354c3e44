"""docs/api.md: current, and complete."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hfax

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "scripts" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == script.render(), "run: python scripts/api_reference.py"


def test_every_public_name_has_one_entry(script: ModuleType) -> None:
    headings = [line for line in script.render().splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings))
    assert {f"### {name}" for name in hfax.__all__ if name != "__version__"} <= set(headings)


def test_a_new_public_name_without_a_section_is_an_error(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {title: names for title, names in script.SECTIONS.items() if title != "Errors"}
    monkeypatch.setattr(script, "SECTIONS", sections)
    with pytest.raises(ValueError, match="HfaxError"):
        script.render()


def test_every_public_member_of_a_model_is_there(script: ModuleType) -> None:
    """The page is read from the source; Python itself says which members there are."""
    from hfax.backends.jax.model import JaxModel

    headings = set(script.render().splitlines())
    public = {name for name in dir(JaxModel) if not name.startswith("_")}
    assert not {name for name in public if f"#### JaxModel.{name}" not in headings}
