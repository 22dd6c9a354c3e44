"""The README's plot shows the figures that are recorded."""

import runpy

from code_blocks import ROOT


def test_the_plot_is_drawn_from_the_recorded_figures() -> None:
    plot = runpy.run_path(str(ROOT / "scripts" / "speed_plot.py"))
    drawn = (ROOT / "docs" / "images" / "speed.svg").read_text()
    assert plot["draw"]() == drawn.rstrip("\n")
    for model in plot["MODELS"]:
        assert all(f">{speed:.1f}</text>" in drawn for speed in plot["tokens_per_second"](model).values())
