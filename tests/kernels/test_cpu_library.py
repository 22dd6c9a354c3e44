"""The library of C++ kernels: what it is compiled for, by whom, and what happens without it."""

import concurrent.futures
import sys

import jax
import processes
import pytest

from hfax.errors import InvalidInputError
from hfax.kernels.cpu import library
from hfax.programs.program_cache import environment_key


def test_programs_without_a_compiler_give_the_same(tmp_path):
    """The same greedy text from a process that may not use the kernels."""
    code = (
        "import hfax; m = hfax.AutoModelForTPU.from_pretrained('demo', dtype='float32');"
        "print(m.generate([[1, 5, 6, 9]], max_new_tokens=12, do_sample=False).tolist())"
    )
    with_and_without = ({"HFAX_HOME": str(tmp_path / setting), "HFAX_CPU_KERNELS": setting} for setting in ("1", "0"))
    runs = [processes.run(["-c", code], variables) for variables in with_and_without]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout == runs[1].stdout


def test_a_compiler_that_fails_is_reported_not_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    code = "from hfax.kernels.cpu import library; print(library.problem())"
    done = processes.run(["-c", code], {"HFAX_HOME": str(tmp_path), "HFAX_CPU_KERNELS": "1"})
    assert "could not build them" in done.stdout, done.stderr


@pytest.mark.usefixtures("cpu_kernels")
def test_processes_that_need_the_kernels_at_once_compile_them_once(tmp_path, monkeypatch):
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nsleep 1\nexec {library._compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    source = tmp_path / "kernels.cc"  # one that takes no time: what is claimed is who compiles, not what
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in library._TARGETS))
    code = (
        "import pathlib, sys\n"
        "from hfax.kernels.cpu import library\n"
        "library._SOURCE, library._HEADERS = pathlib.Path(sys.argv[1]), ()\n"
        "library._folders = lambda: (library.hfax_home(),)\n"  # not beside the source, where others' are
        "print(library.problem())"
    )
    variables = {"HFAX_HOME": str(tmp_path / "home"), "HFAX_CPU_KERNELS": "1"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: processes.run(["-c", code, source], variables), range(2)))
    assert [done.stdout for done in both] == ["None\n"] * 2, both
    assert sum("-shared" in line for line in calls.read_text().splitlines()) == 1
    assert [path.suffix for path in (tmp_path / "home").iterdir()] == [".so"]


@pytest.mark.parametrize(("name", "why"), [("sse9", "no such instruction set"), ("avx512-bf16", "does not support it")])
def test_an_instruction_set_that_cannot_be_used_is_refused_by_name(monkeypatch, name, why):
    monkeypatch.setattr(library, "_features", lambda: frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}))
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("HFAX_CPU_TARGET", name)
    with pytest.raises(InvalidInputError, match=why) as error:
        library.instruction_set()
    assert "native, avx2," in error.value.fix


def test_programs_are_kept_apart_by_instruction_set(monkeypatch):
    monkeypatch.setattr(library, "problem", lambda: None)  # which would compile for each
    keys = set()
    for name in ("native", *(s.name for s in library.available_instruction_sets())):
        with library.compiled_for(name):
            keys.add(environment_key(jax.devices("cpu")[0]))
            assert library.instruction_set().name == name
    assert len(keys) == 1 + len(library.available_instruction_sets())
