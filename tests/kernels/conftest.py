"""The C++ kernels are compiled and tested for every instruction set that the processor has, whatever the environment names, and
for arm64 in an emulator."""

import contextlib
from collections.abc import Iterator

import pytest

from hfax.kernels.cpu import compiler, library

from . import hosts

OLDER_SETS = [s.name for s in library.available_instruction_sets()[:-1]]
"""The processor's newest set is what "native" means."""
EMULATED = "neon, emulated"
SETS = [
    library.NATIVE.name,
    *OLDER_SETS[:1],
    *(pytest.param(name, marks=pytest.mark.sweep) for name in OLDER_SETS[1:]),  # 20 s of compilation each
    *([] if hosts.IS_NATIVE else [pytest.param(EMULATED, marks=pytest.mark.sweep)]),
]

if compiler.find_compiler() is None:  # nobody has kernels there, and hfax works without: the rest of the tests shows it
    collect_ignore = ["test_cpu_kernels.py", "test_packed_products.py"]


@pytest.fixture(scope="session")
def emulated_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Host]:
    """The kernels on an emulated arm64 machine."""
    host = hosts.emulated_host(tmp_path_factory.mktemp("neon"))
    yield host
    host.close()


@pytest.fixture(scope="module", params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels are compiled for this one while the test runs."""
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.delenv("HFAX_CPU_KERNELS", raising=False)
        if request.param == EMULATED:
            stack.enter_context(hosts.called(request.getfixturevalue("emulated_host")))
        else:
            stack.enter_context(library.compiled_for(request.param))
        assert library.problem() is None
        yield request.param
