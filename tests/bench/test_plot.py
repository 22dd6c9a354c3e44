"""What `hfax bench --plot` draws, from a report made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfax.bench import report as reports

MACHINE = {"processor": "Test", "cores": 2}


def case(kind: str, batch_size: int, context: int, rate: float, share: float) -> dict[str, Any]:
    name = "share_of_bandwidth" if kind == "decode" else "share_of_operations"
    seconds = batch_size * 32 / rate
    found = {"kind": kind, "batch_size": batch_size, "context": context, "tokens": 32, "draft_tokens": 0, name: share}
    return found | {"seconds": [seconds], "median_seconds": seconds, "tokens_per_second": rate}


def report(cases: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    subjects = {name: {"cases": {str(i): c for i, c in enumerate(some)}} for name, some in cases.items()}
    return {"model": "Qwen/Qwen3-0.6B", "machine": MACHINE, "subjects": subjects}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were saved."""
    figures: list[Any] = []
    plt = reports.pyplot()
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def test_one_point_is_a_bar_beside_its_limit(tmp_path: Path, drawn: list[Any]) -> None:
    cases = {"hfax": [case("decode", 1, 128, 40, 0.8), case("prefill", 1, 256, 500, 0.5)], "eager": []}
    reports.plot(report(cases), tmp_path / "a.png")
    left, right = drawn[0].axes
    assert [bar.get_width() for bar in left.patches] == [50, 40]
    assert [text.get_text() for text in left.texts] == ["40.0 (80%)"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["hfax"]
    assert left.get_title() == "Decoding, batch 1, 128 tokens"
    assert [bar.get_width() for bar in right.patches] == [1000, 500]
    assert drawn[0].get_suptitle().startswith("Qwen/Qwen3-0.6B\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_several_points_are_lines(tmp_path: Path, drawn: list[Any]) -> None:
    sizes = [case("decode", batch, context, 10.0 * batch, 0.5) for batch in (1, 4) for context in (128, 512)]
    reports.plot(report({"hfax": sizes}), tmp_path / "b.png")
    left, right = drawn[0].axes
    assert left.lines[0].get_xdata().tolist() == [1, 4]
    assert left.lines[0].get_ydata().tolist() == [10, 40]
    assert right.lines[0].get_xdata().tolist() == [128, 512]


def test_a_subject_without_a_limit_has_its_rate_alone(tmp_path: Path, drawn: list[Any]) -> None:
    cases = {"hfax": [case("decode", 1, 128, 40, 0.8)], "static": [case("decode", 1, 128, 20, 0)]}
    reports.plot(report(cases), tmp_path / "c.png")
    left, right = drawn[0].axes
    assert [text.get_text() for text in left.texts] == ["40.0 (80%)", "20.0"]
    assert not right.axison
