"""Wheels, built from this source and installed in environments of their own."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hfax.kernels.cpu import prebuilt
from hfax.kernels.cpu.instruction_sets import available_instruction_sets, sets_of_machine

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
USE = """
import jax, numpy as np
from hfax.kernels import linear
from hfax.kernels.cpu import library
from hfax.kernels.target import compiling_for

x, weight = (np.random.default_rng(0).standard_normal((n, 64), np.float32) for n in (1, 48))
with compiling_for("cpu") as where:
    got = jax.jit(lambda *a: linear.linear(*a))(x, weight)
np.testing.assert_allclose(got, x.astype(float) @ weight.T, atol=1e-4)
found = library.kernels()
print(where.chosen, found.instruction_set, found.origin, found.path, found.problem, sep="\\n")
"""


def _run(*command, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HFAX_") and name != "CXX"}
    environment = kept | {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | variables
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wheel(folder, **variables):
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    _run(*pip, **variables)
    (wheel,) = folder.iterdir()
    return wheel


def _use(wheel, folder):
    """What `USE` prints where only that wheel's hfax is installed, beside this environment's other packages, without a compiler."""
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "others.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # the editable hfax among them is not followed
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    home = folder / "home"
    printed = _run(str(python), "-c", USE, PATH="", PYTHONPATH="", HFAX_HOME=str(home)).splitlines()
    assert not [*home.rglob("*.so"), *(packages / "hfax").rglob("__pycache__/*.so")]  # nothing was compiled
    return printed, packages


def test_a_wheel_from_source_needs_no_compiler_and_is_for_every_machine(tmp_path):
    wheel = _wheel(tmp_path / "wheels", PATH="")
    assert wheel.name.endswith("-py3-none-any.whl")
    (chosen, _, origin, _, problem), _ = _use(wheel, tmp_path / "fresh")
    assert "C++ kernel" not in chosen
    assert origin == "None"
    assert "no C++ compiler was found" in problem


def test_a_wheel_with_kernels_runs_them_without_a_compiler(tmp_path):
    wheel = _wheel(tmp_path / "wheels", HATCH_BUILD_HOOK_ENABLE_CUSTOM="true")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    (chosen, name, origin, path, problem), packages = _use(wheel, tmp_path / "fresh")
    assert "C++ kernel" in chosen
    assert (name, origin, problem) == (available_instruction_sets()[-1].name, "wheel", "None")
    brought = packages / "hfax" / "kernels" / "cpu" / "libraries"
    assert Path(path).parent == brought
    assert {p.name for p in brought.iterdir()} == {prebuilt.MANIFEST, *map(prebuilt.library_name, sets_of_machine())}
