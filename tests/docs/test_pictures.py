"""Pictures that scripts draw: of recorded figures, and of concepts. What is in docs/images is what the scripts draw now."""

import re
import runpy

import pytest
from code_blocks import ROOT

CONCEPTS = sorted(path.stem for path in (ROOT / "docs" / "concepts").glob("*.md"))


def test_the_plot_of_speeds_shows_the_recorded_figures() -> None:
    plot = runpy.run_path(str(ROOT / "scripts" / "speed_plot.py"))
    drawn = (ROOT / "docs" / "images" / "speed.svg").read_text()
    assert plot["draw"]() == drawn.rstrip("\n")
    for model in plot["MODELS"]:
        assert all(f">{speed:.1f}</text>" in drawn for speed in plot["tokens_per_second"](model).values())


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_has_its_picture_and_says_what_it_shows(name: str) -> None:
    pictures = runpy.run_path(str(ROOT / "scripts" / "concept_pictures.py"))
    assert sorted(pictures["PICTURES"]) == CONCEPTS
    picture = pictures["PICTURES"][name]
    assert (ROOT / "docs" / "images" / "concepts" / f"{name}.svg").read_text() == pictures["draw"](picture) + "\n"
    (alternative,) = re.findall(r"!\[(.*?)\]\(", (ROOT / "docs" / "concepts" / f"{name}.md").read_text())
    assert alternative == picture.title
