"""A build hook of hatchling: compiles the C++ kernels into the wheel, for every instruction set of this machine's architecture.

Off unless HATCH_BUILD_HOOK_ENABLE_CUSTOM is "true", so that an installation from source needs no compiler. The libraries have no
Python ABI: the wheel is tagged py3-none-PLATFORM.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACOS = "11.0"
"""The oldest macOS that has arm64."""


class KernelsHook(BuildHookInterface):
    """Compiles into a folder of its own, which the wheel takes as hfax/kernels/cpu/libraries."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written."""
        if version == "editable":  # compiled on first use, whenever the source changes
            return
        self.folder = tempfile.TemporaryDirectory()
        compile_into(Path(self.root, "src"), Path(self.folder.name))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["force_include"][self.folder.name] = "hfax/kernels/cpu/libraries"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what has been copied."""
        if self.folder is not None:
            self.folder.cleanup()


def compile_into(source: Path, folder: Path) -> None:
    """Compile all libraries and write their manifest, as many at a time as there are cores."""
    sys.path.insert(0, str(source))
    try:
        from hfax.kernels.cpu import compiler, prebuilt
        from hfax.kernels.cpu.instruction_sets import sets_of_machine
        from hfax.kernels.cpu.threads import usable_cores
    finally:
        sys.path.remove(str(source))
    found = compiler.find_compiler()
    if found is None:
        raise RuntimeError("a wheel with kernels needs a C++ compiler: c++, g++ or clang++, or what CXX names")
    if sys.platform == "darwin":
        os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", MACOS)  # clang reads it
    headers = ffi_headers()

    def compile_for(instructions: Any) -> None:
        library = folder / prebuilt.library_name(instructions)
        compiler.compile_library(found, instructions, headers, library, is_portable=True)

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(compile_for, sets_of_machine()))
    prebuilt.write_manifest(folder, headers)


def ffi_headers() -> Path:
    """The include folder of the jaxlib that is installed where the wheel is built."""
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("a wheel with kernels needs jaxlib, whose headers they are compiled with")
    return Path(spec.submodule_search_locations[0], "include")


def platform_tag() -> str:
    """This machine's platform in the name of a wheel; auditwheel makes a manylinux one of a Linux one."""
    if sys.platform == "darwin":
        name = f"macosx-{os.environ.get('MACOSX_DEPLOYMENT_TARGET', MACOS)}-{platform.machine()}"
    else:
        name = sysconfig.get_platform()
    return name.replace("-", "_").replace(".", "_")
