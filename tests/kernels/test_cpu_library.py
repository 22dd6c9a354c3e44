"""The library of C++ kernels: what it is compiled for, by whom, and what happens without it."""

import concurrent.futures
import json
import platform
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

from hfax.cli.env import read_environment
from hfax.errors import InvalidInputError
from hfax.kernels.cache_write import cache_write
from hfax.kernels.cpu import compiler, instruction_sets, library, prebuilt
from hfax.kernels.cpu.instruction_sets import INSTRUCTION_SETS, available_instruction_sets
from hfax.kernels.target import compiling_for
from hfax.programs.program_cache import environment_key

from .hosts import Host


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
def test_a_cache_is_written_in_place():
    buffer, new = jnp.zeros((2, 3, 16, 8), jnp.bfloat16), jnp.ones((2, 3, 2, 8), jnp.bfloat16)
    with compiling_for("cpu") as where:
        compiled = jax.jit(cache_write, donate_argnums=0).lower(buffer, new, jnp.int32(5)).compile()
    assert any("C++ kernel" in way for way in where.chosen)
    assert compiled.memory_analysis().temp_size_in_bytes < buffer.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes == buffer.nbytes
    assert compiled(buffer, new, jnp.int32(5)).sum((0, 1, 3)).tolist() == [48 * (i in (5, 6)) for i in range(16)]


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("most", "helpers"), [(0, 2), (1, 0), (2, 1), (8, 2)])
def test_kernels_use_no_more_threads_than_they_are_told(tmp_path, most, helpers):
    """The host has three; the calling thread is one of them."""
    host = Host(tmp_path, compiler.find_compiler(), library.kernels().path, most_threads=most)
    x, weight = (np.random.default_rng(0).standard_normal((n, 512), np.float32) for n in (1, 2048))
    (got,) = host.call("hfax_linear", [jax.ShapeDtypeStruct((1, 2048), jnp.float32)], [x, weight], {})
    host.close()
    assert host.num_helpers == helpers
    np.testing.assert_allclose(got, x.astype(float) @ weight.T, atol=1e-3)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_number_of_threads_that_is_none_is_refused_by_name():
    code = "from hfax.kernels.cpu import library; library.kernels()"
    done = processes.run(["-c", code], {"HFAX_CPU_KERNELS": "1", "HFAX_NUM_THREADS": "many"})
    assert "HFAX_NUM_THREADS='many' is not a number of threads" in done.stderr


@pytest.fixture
def stub(tmp_path):
    """A source that takes no time to compile, for claims about who compiles, and where the library is from."""
    path = tmp_path / "kernels.cc"
    path.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in library._TARGETS))
    path.write_text(path.read_text() + 'extern "C" void hfax_set_most_threads(long long) {}\n')
    return path


_WITH_STUB = """
import pathlib, sys
from hfax.kernels.cpu import compiler, library, prebuilt
compiler.SOURCE, compiler.HEADERS = pathlib.Path(sys.argv[1]), ()
prebuilt.FOLDER = pathlib.Path(sys.argv[1]).parent / "libraries"
library._folders = lambda: (library.hfax_home(),)  # not beside the source, where others' are
found = library.kernels()
"""


@pytest.mark.usefixtures("cpu_kernels")
def test_processes_that_need_the_kernels_at_once_compile_them_once(tmp_path, monkeypatch, stub):
    wrapper, calls = tmp_path / "compiler", tmp_path / "calls"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nsleep 1\nexec {compiler.find_compiler()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    code = f"{_WITH_STUB}print(found.problem, found.origin)"
    variables = {"HFAX_HOME": str(tmp_path / "home"), "HFAX_CPU_KERNELS": "1"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: processes.run(["-c", code, stub], variables), range(2)))
    assert sorted(done.stdout for done in both) == ["None cache\n", "None compiled\n"], both
    assert sum("-shared" in line for line in calls.read_text().splitlines()) == 1
    assert [path.suffix for path in (tmp_path / "home").iterdir()] == [".so"]


@pytest.mark.usefixtures("cpu_kernels")
def test_loading_the_kernels_does_not_change_the_arithmetic_of_the_process():
    """Linked with -ffast-math they made every thread round numbers below 1e-38 to 0, numpy's and torch's too."""
    code = (
        "import numpy as np; from hfax.kernels.cpu import library; assert library.problem() is None;"
        "print(np.array([1e-40], np.float32) * np.float32(0.5) > 0)"
    )
    assert processes.run(["-c", code], {"HFAX_CPU_KERNELS": "1"}).stdout == "[ True]\n"


@pytest.fixture
def wheel(tmp_path, monkeypatch, stub):
    """What a wheel brings, for all instruction sets of this machine; and no compiler. Returns the manifest."""
    monkeypatch.setattr(compiler, "SOURCE", stub)
    monkeypatch.setattr(compiler, "HEADERS", ())
    folder, found = tmp_path / "libraries", compiler.find_compiler()
    folder.mkdir()
    for instructions in available_instruction_sets()[-1:]:
        path = folder / prebuilt.library_name(instructions)
        compiler.compile_library(found, instructions, library._headers(), path, is_portable=True)
    prebuilt.write_manifest(folder, library._headers())
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    return folder / prebuilt.MANIFEST


def _with_wheel(stub, home):
    code = f"{_WITH_STUB}print(found)"
    variables = {"HFAX_HOME": str(home), "HFAX_CPU_KERNELS": "1", "HFAX_CPU_TARGET": ""}
    return processes.run(["-c", code, stub], variables).stdout


@pytest.mark.usefixtures("cpu_kernels")
def test_a_wheel_brings_the_best_set_of_the_processor_and_needs_no_compiler(tmp_path, stub, wheel):
    best = available_instruction_sets()[-1]
    path = wheel.parent / prebuilt.library_name(best)
    assert _with_wheel(stub, tmp_path / "home") == f"{best.name}, from the wheel ({path})\n"
    assert not (tmp_path / "home").exists()
    major, minor = json.loads(wheel.read_text())["ffi"]
    wheel.write_text(json.dumps({"source": compiler.source_digest(), "ffi": [major, minor - 1]}))  # jaxlib is newer
    assert "from the wheel" in _with_wheel(stub, tmp_path / "home")


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("change", ["source", "major", "minor", "library", "manifest"])
def test_a_library_that_does_not_fit_is_not_loaded(tmp_path, stub, wheel, change):
    made = json.loads(wheel.read_text())
    major, minor = made["ffi"]
    if change == "source":  # someone has edited the installed package
        made["source"] = "0" * 64
    elif change == "library":
        next(wheel.parent.glob("*.so")).write_bytes(b"cut off")
    else:
        made["ffi"] = [major + 1, minor] if change == "major" else [major, minor + 1]  # jaxlib is older
    wheel.write_text(json.dumps(made)[: 10 if change == "manifest" else None])
    assert "no C++ compiler was found" in _with_wheel(stub, tmp_path / "home")


@pytest.mark.usefixtures("cpu_kernels")
def test_env_says_which_kernels_are_used_and_where_they_are_from(monkeypatch):
    kernels = read_environment()["cpu_kernels"]
    assert kernels["instruction_set"] == library.instruction_set().name
    assert kernels["origin"] in ("wheel", "cache", "compiled")
    assert Path(kernels["path"]).is_file()
    assert kernels["path"] in kernels["text"]
    monkeypatch.setenv("HFAX_CPU_KERNELS", "0")
    assert "turned off by HFAX_CPU_KERNELS=0" in read_environment()["cpu_kernels"]["text"]


_ALL = frozenset[str]().union(*(s.features for s in INSTRUCTION_SETS))


@pytest.mark.parametrize(
    ("machine", "missing", "best"),
    [
        ("x86_64", (), "amx"),
        ("x86_64", ("amx_int8",), "avx512-bf16"),
        ("x86_64", ("avx512_bf16", "avx_vnni"), "avx512-vnni"),
        ("x86_64", ("avx512_bf16", "avx512_vnni", "avx_vnni"), "avx512"),
        ("x86_64", [name for name in _ALL if name.startswith("avx512")], "avx2-vnni"),
        ("x86_64", [name for name in _ALL if "512" in name or "vnni" in name], "avx2"),
        ("x86_64", ("fma",), "native"),
        ("arm64", (), "neon"),
    ],
)
def test_of_a_wheels_libraries_the_processors_best_is_used(tmp_path, monkeypatch, machine, missing, best):
    monkeypatch.setattr(instruction_sets, "features", lambda: _ALL - set(missing))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delenv("HFAX_CPU_TARGET", raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    prebuilt.write_manifest(tmp_path, library._headers())
    for instructions in INSTRUCTION_SETS:
        (tmp_path / prebuilt.library_name(instructions)).touch()
    assert library._default.__wrapped__().name == best


@pytest.mark.parametrize(("name", "why"), [("sse9", "no such instruction set"), ("avx512-bf16", "does not support it")])
def test_an_instruction_set_that_cannot_be_used_is_refused_by_name(monkeypatch, name, why):
    monkeypatch.setattr(instruction_sets, "features", lambda: frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
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


_WITHOUT_TILES = """
import ctypes

# A filter of system calls: on x86-64, arch_prctl(ARCH_REQ_XCOMP_PERM) gives EPERM, everything else is allowed.
LOAD, JUMP_IF_EQUAL, RETURN, ALLOW, REFUSE = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
CODE = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, 5, 0xC000003E), (LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 3, 158), (LOAD, 0, 0, 16)]
CODE += [(JUMP_IF_EQUAL, 0, 1, 0x1023), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(Filter))]

libc = ctypes.CDLL(None, use_errno=True)
filters = (Filter * len(CODE))(*CODE)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
program = ctypes.byref(Program(len(CODE), filters))
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

import jax.numpy as jnp
import numpy as np
from hfax.kernels import quantized
from hfax.kernels.linear import linear
from hfax.kernels.target import compiling_for

rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((40, 256)), jnp.bfloat16)
weight = jnp.asarray(rng.standard_normal((70, 256)), jnp.bfloat16)
codes, scale = jnp.asarray(rng.integers(-127, 128, (70, 256)), jnp.int8), jnp.ones((70, 2), jnp.bfloat16)
packed = quantized.QuantizedArray(values=codes, scale=scale, encoding="int8", dtype=jnp.dtype("bfloat16"))
with compiling_for("cpu") as where:
    for got, wide in ((linear(x, weight), weight), (quantized.linear(x, packed), codes)):
        exact = np.asarray(x, np.float64) @ np.asarray(wide, np.float64).T
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=2**-8 * np.abs(exact).max())
assert any("C++ kernel" in way for way in where.chosen), where.chosen
"""


def test_products_are_right_where_the_system_refuses_a_processors_tiles():
    """A sandbox may forbid the system call by which a process asks for AMX's registers."""
    done = processes.run(["-c", _WITHOUT_TILES], {})
    assert done.returncode == 0, done.stderr
