"""Which way imports point: down the way of the data, never in a circle, neither by statements nor by names in strings."""

from __future__ import annotations

from pathlib import Path

import pytest
from import_graph import Import, first_circle, imports_of, missing_names, upward

import hfax
from hfax.programs.versions import LEAVES

SOURCE = Path(hfax.__file__).parent
ORDER = [
    {"errors", "float32_products", "home", "object_storage", "progress", "demo"},
    {"phases"},
    {"known_words"},
    {"launch"},
    {"synthetic"},
    {"sharding"},
    {"kernels"},
    {"kv_cache"},
    {"load"},
    {"patches"},
    {"tracing"},
    {"programs"},
    {"portable"},
    {"generation"},
    {"parallelism"},
    {"lora"},
    {"backends"},
    {"stored"},
    {"auto"},
    {"checkpoint"},
    {"engine"},
    {"planning"},
    {"exporting"},
    {"pipelines"},
    {"bench"},
    {"train", "flax_nnx"},
    {"quantization"},
    {"evaluation"},
    {"matrix"},
    {"doctor"},
    {"server"},
    {"cli", "__main__"},
]
"""The way of the data: a file imports from its own row and from those above it."""


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of(SOURCE)


def test_no_files_import_each_other_in_a_circle(imports: list[Import]) -> None:
    assert first_circle(imports) == []


def test_what_tests_benchmarks_and_scripts_import_exists() -> None:
    """Imports inside functions, too, which no other check sees before the test itself runs."""
    root = Path(__file__).parents[1]
    folders = ("tests", "benchmarks", "scripts", "examples", "deploy")
    assert missing_names([path for name in folders for path in sorted((root / name).rglob("*.py"))], SOURCE) == []


def test_a_name_that_a_package_lacks_is_found(tmp_path: Path) -> None:
    (package := tmp_path / "kit").mkdir()
    (package / "__init__.py").touch()
    (package / "tools.py").write_text(
        "import os\nif os.name == 'nt':\n    saw = 1\nelse:\n    hammer, (nail, *_) = 1, (2, 3)\n"
    )
    (caller := tmp_path / "caller.py").write_text(
        "def f():\n"
        "    from kit.tools import hammer, nail, os, saw, drill\n"
        'SCRIPT = """\n'
        "from kit.tools import chisel, saw\n"
        "from kit import tools\n"
        '"""\n'
        "from kit.shed import tools\n"
    )
    assert sorted(missing_names([caller], package)) == [
        "caller.py:2: kit.tools has no drill",
        "caller.py:3: kit.tools has no chisel",
        "caller.py:7: kit.shed has no tools",
    ]


def test_no_file_imports_from_further_down(imports: list[Import]) -> None:
    assert upward(imports, ORDER) == []


def test_every_part_has_its_place() -> None:
    parts = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert sorted(parts) == sorted(name for row in ORDER for name in row)


def test_what_programs_do_not_depend_on_is_imported_by_nothing_that_traces(imports: list[Import]) -> None:
    """Else programs on disk would outlive an edit that changes them."""
    parts = [(one, one.importer.split(".")[1], one.imported.split(".")[1]) for one in imports]
    assert [str(one) for one, importer, imported in parts if imported in LEAVES and importer not in LEAVES] == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two folders with two files each, `low` below `high`."""
    root = tmp_path / "house"
    for name in ("low/a", "low/b", "high/c", "high/d"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text("")
    (root / "high/c.py").write_text("from house.low import a\n")
    return root


def test_a_circle_of_two_files_of_one_folder_is_found(package: Path) -> None:
    (package / "low/a.py").write_text("def f():\n    from house.low import b\n")
    assert first_circle(imports_of(package)) == []
    (package / "low/b.py").write_text("import house.low.a\n")
    assert sorted(set(first_circle(imports_of(package)))) == ["house.low.a", "house.low.b"]


@pytest.mark.parametrize(
    "line",
    [
        "import house.high.d",
        "from house.high.d import g",
        "BUILT_IN = {'d': 'house.high.d:BACKEND'}",
        "command = [python, '-m', 'house.high.d']",
        "def f(name): return import_module(f'house.high.{name}')",
    ],
)
def test_an_upward_import_is_found_with_its_line(package: Path, line: str) -> None:
    (package / "high/__init__.py").write_text("")
    order = [{"low"}, {"high"}]
    assert upward(imports_of(package), order) == []
    (package / "low/b.py").write_text(f'"""Like house.high.d."""\n{line}\n')
    found = upward(imports_of(package), order)
    assert any(text.startswith("house.low.b:2 -> house.high.d (") for text in found), found
