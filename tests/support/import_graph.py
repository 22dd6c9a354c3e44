"""Which file of a package imports which: by statements at any depth, and by module names in strings."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One file that reaches another.

    Args:
        importer: a module's dotted name.
        imported: likewise.
        line: of the importer's file.
        how: "import", or "string".
    """

    importer: str
    imported: str
    line: int
    how: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} -> {self.imported} ({self.how})"


def imports_of(folder: Path) -> list[Import]:
    """Every import of one file of a package by another. The package's own `__init__.py` is left out: it names its contract.

    A string counts if it is a module's dotted name, alone or before a colon; an f-string that begins with a package's name and a
    dot counts for all modules of that package.

    Args:
        folder: of the package, whose name it has.
    """
    package = folder.name
    modules = {_name(package, path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
    found = []
    for name, path in modules.items():
        if name == package:
            continue
        for target, line, how in _targets(ast.parse(path.read_text()), package, modules):
            if target not in (name, package):
                found.append(Import(importer=name, imported=target, line=line, how=how))
    return found


def first_circle(imports: Sequence[Import]) -> list[str]:
    """The files of a circle, in the order in which they import each other, the first again at its end; none without a circle."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        graph.setdefault(one.importer, set()).add(one.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def upward(imports: Sequence[Import], order: Sequence[set[str]]) -> list[str]:
    """The imports of something that stands further down in an order.

    Args:
        imports: of one package.
        order: names of its folders and top modules, row by row.

    Raises:
        KeyError: a name that has no row.
    """
    rank = {name: row for row, names in enumerate(order) for name in names}
    return [str(one) for one in imports if rank[one.imported.split(".")[1]] > rank[one.importer.split(".")[1]]]


def _name(package: str, path: Path) -> str:
    parts = (package, *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(tree: ast.Module, package: str, modules: dict[str, Path]) -> Iterator[tuple[str, int, str]]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield _existing(alias.name, modules), node.lineno, "import"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module and node.module.split(".")[0] == package:
                for alias in node.names:
                    yield _existing(f"{node.module}.{alias.name}", modules), node.lineno, "import"
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            start = str(node.values[0].value)
            if re.fullmatch(r"(\w+\.)+", start) and start.rstrip(".") in modules:
                for name in modules:
                    if name.startswith(start):
                        yield name, node.lineno, "string"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            name = node.value.partition(":")[0]
            if name in modules:
                yield name, node.lineno, "string"


def _existing(name: str, modules: dict[str, Path]) -> str:
    """The module that a dotted name is, or is in."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def missing_names(files: Sequence[Path], folder: Path) -> list[str]:
    """What files import from a package and it does not have: `from package.module import name`, in their code and in scripts that
    they hold as strings. Names of the package's own `__init__.py` are left out: it finds them when they are asked for.

    Args:
        files: Python files.
        folder: of the package, whose name it has.
    """
    package = folder.name
    modules = {_name(package, path.relative_to(folder)): path for path in folder.rglob("*.py")}
    defined = {name: _defined(ast.parse(path.read_text())) for name, path in modules.items()}
    in_text = re.compile(rf"^\s*from ({package}\.[\w.]+) import ([\w, ]+)$", re.M)
    found = []
    for path in files:
        wanted: list[tuple[int, str, str]] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                wanted += [(node.lineno, str(node.module), alias.name) for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in in_text.findall(node.value):
                    wanted += [(node.lineno, module, name.split(" as ")[0].strip()) for name in names.split(",")]
        for line, module, name in wanted:
            if f"{module}.{name}" not in modules and name not in defined.get(module, ()):
                found.append(f"{path.name}:{line}: {module} has no {name}")
    return found


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module's own statements bind, those in `if` and `try` included."""
    names: set[str] = set()
    inside: list[ast.stmt] = list(tree.body)
    while inside:
        node = inside.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            case ast.If() | ast.Try() | ast.With() | ast.For():
                inside += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
                inside += [s for h in getattr(node, "handlers", ()) for s in h.body]
    return names
