"""What `hfax doctor` prints for a person."""

from __future__ import annotations

import pytest

from hfax.cli.doctor import as_text
from hfax.doctor import Diagnosis, diagnose


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose("demo")


def test_sizes_have_units_and_patches_are_counted(found: Diagnosis) -> None:
    text = as_text(found, False, ("this machine's memory", 20_000_000_000))
    assert "parameters       3.15M, 6.3 MB in bfloat16" in text
    assert "fits here        yes (20 GB of this machine's memory are free)" in text
    assert f"patches          {len(found.patches)}, and" in text
    assert not any(f"patch {name}:" in text for name in found.patches)


def test_more_is_said_when_asked(found: Diagnosis) -> None:
    text = as_text(found, True, None)
    assert "fits here" not in text
    assert all(f"patch {name}:" in text for name in found.patches)
    assert all(way in text for way in found.lowerings)


def test_a_model_that_does_not_fit_is_told_what_to_do(found: Diagnosis) -> None:
    assert "fits here        no; hfax plan" in as_text(found, False, ("TPU_0", 1_000_000))
