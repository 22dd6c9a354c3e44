"""Every example, run as a user runs it; what it prints is checked, not only that it ends well."""

import re
from pathlib import Path

import processes
import pytest

_EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(name: str, *args: str) -> str:
    done = processes.run([_EXAMPLES / name, *args])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_in_the_list_and_in_the_tests() -> None:
    names = {p.name for p in _EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r"`(\d\d_\w+\.py)`", (_EXAMPLES / "README.md").read_text()))
    assert names == set(re.findall(r'_run\("(\d\d_\w+\.py)"', Path(__file__).read_text()))


@pytest.mark.sweep
def test_another_architecture() -> None:
    out = _run("06_another_architecture.py", "gpt2", "qwen3_moe")
    rows = re.findall(r"^(\w+) +([\d,]+) parameters +differs by (\S+) +writes \[(.*)\]$", out, re.MULTILINE)
    assert [r[0] for r in rows] == ["gpt2", "qwen3_moe"]
    assert all(float(r[2]) < 1e-4 for r in rows)
    assert all(len(r[3].split(",")) == 4 for r in rows)


@pytest.mark.sweep
def test_images() -> None:
    out = _run("07_images.py")
    assert "a grid of [1, 6, 4] patches, 6 image tokens" in out
    ours, theirs = (re.search(rf"^{name}: +(.*)$", out, re.MULTILINE) for name in ("hfax", "transformers"))
    assert ours is not None
    assert theirs is not None
    assert ours.group(1) == theirs.group(1)


@pytest.mark.sweep
def test_finetuning() -> None:
    out = _run("08_finetuning.py")
    before, after = (float(x) for x in re.findall(r"loss before ([\d.]+), after ([\d.]+)", out)[0])
    assert after < 0.5 < 2 < before
    assert "adapter_config.json, adapter_model.safetensors" in out
    answers = re.findall(r"(?:with the adapter|merged): (.*)", out)
    assert answers[0] == answers[1]
    assert answers[0].startswith("blue")


@pytest.mark.sweep
def test_preferences() -> None:
    out = _run("09_preferences.py")
    found = [tuple(map(float, x)) for x in re.findall(r"loss ([\d.]+)  accuracy ([\d.]+)  margin (-?[\d.]+)", out)]
    (first, _, margin), (last, accuracy, reached) = found
    assert first == pytest.approx(0.693, abs=0.002)  # the adapter changes nothing yet: log 2
    assert margin == pytest.approx(0, abs=0.01)
    assert last < 0.3
    assert accuracy == 1
    assert reached > 1


@pytest.mark.sweep
def test_distillation() -> None:
    out = _run("10_distillation.py")
    first, last = (float(x) for x in re.findall(r"([\d.]+) nats from the teacher", out))
    assert last < first / 2
