"""The C++ kernels are compiled and tested for every instruction set that the processor has, whatever the environment names."""

from collections.abc import Iterator

import pytest

from hfax.kernels.cpu import compiler, library

OLDER_SETS = [s.name for s in library.available_instruction_sets()[:-1]]
"""The processor's newest set is what "native" means."""
SETS = [
    library.NATIVE.name,
    *OLDER_SETS[:1],
    *(pytest.param(name, marks=pytest.mark.sweep) for name in OLDER_SETS[1:]),  # 20 s of compilation each
]

if compiler.find_compiler() is None:  # nobody has kernels there, and hfax works without: the rest of the tests shows it
    collect_ignore = ["test_cpu_kernels.py", "test_packed_products.py"]


@pytest.fixture(scope="module", params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels are compiled for this one while the test runs."""
    with pytest.MonkeyPatch.context() as patched, library.compiled_for(request.param):
        patched.delenv("HFAX_CPU_KERNELS", raising=False)
        assert library.problem() is None
        yield request.param
