"""docs/api.md: every public name, all of them documented; and on the site, types that lead to other libraries' references."""

import functools
import http.server
import importlib
import inspect
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from code_blocks import ROOT

import hfax

_BESIDE = {
    "hfax.evaluation.verification.PromptResult",
    "hfax.evaluation.first_difference.Difference",
    "hfax.generation.kept_cache.KeptCache",
    "hfax.engine.request.Request",
    "hfax.patches.patch.Patch",
}
"""Classes that exported ones hold or derive from."""
OF_OTHERS = ("jax.Array", "torch.dtype", "transformers.PretrainedConfig", "pathlib.Path")
"""Types in signatures."""
_KINDS = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)


def _entries() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


def _public_members(of: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(of, "__dataclass_fields__", {})
    for owner in of.__mro__:
        if owner.__module__.startswith("hfax."):
            names = (name for name in vars(owner) if not name.startswith("_") and name not in fields)
            yield from ((name, vars(owner)[name]) for name in names)


def test_every_public_name_has_one_entry() -> None:
    public = {f"hfax.{name}" for name in hfax.__all__ if name != "__version__"}
    assert sorted(_entries()) == sorted(public | _BESIDE)


@pytest.mark.parametrize("entry", _entries())
def test_an_entry_and_its_methods_are_documented(entry: str) -> None:
    """mkdocstrings leaves out what has no docstring."""
    module, _, name = entry.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not inspect.isclass(found):
        assert inspect.getdoc(found) or not inspect.isfunction(found)
        return
    assert vars(found)["__doc__"]
    assert not [name for name, member in _public_members(found) if isinstance(member, _KINDS) and not member.__doc__]


@pytest.mark.docs
def test_the_site_has_every_name_and_every_member_of_a_model() -> None:
    from hfax.backends.jax.model import JaxModel

    page = (ROOT / "build" / "site" / "api.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="(hfax\.[\w.]+)"', page))
    assert not set(_entries()) - anchors
    public = {f"hfax.JaxModel.{name}" for name, of in _public_members(JaxModel) if isinstance(of, _KINDS)}
    assert len(public) > 50
    assert not public - anchors
    assert (ROOT / "build" / "site" / "objects.inv").is_file()


@pytest.fixture
def inventory(tmp_path: Path) -> Iterator[str]:
    """Address of a site's inventory, as Sphinx writes it."""
    from mkdocstrings import Inventory

    items = Inventory()
    for name in OF_OTHERS:
        items.register(name, "py", "class", f"{name}.html")
    (tmp_path / "objects.inv").write_bytes(items.format_sphinx())
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/objects.inv"
        server.shutdown()
        thread.join()


@pytest.mark.docs
def test_published_pages_link_to_other_libraries(tmp_path: Path, inventory: str) -> None:
    """The published configuration, with one inventory here in place of the real ones."""
    config = yaml.safe_load((ROOT / "mkdocs.published.yml").read_text())
    handler = config["plugins"]["mkdocstrings"]["handlers"]["python"]
    assert all(re.fullmatch(r"https://\S+/objects\.inv", url) for url in handler["inventories"])
    handler |= {"inventories": [inventory], "paths": [str(ROOT / "src")]}
    config |= {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(tmp_path / "docs"),
        "site_dir": str(tmp_path / "site"),
    }
    config |= {
        "hooks": [],
        "nav": [{"Python": "index.md"}],
        "theme": {"custom_dir": str(ROOT / "scripts" / "site_theme")},
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("".join(f"::: {entry}\n\n" for entry in _entries()))
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not [name for name in OF_OTHERS if f'href="{inventory.replace("objects.inv", name)}.html"' not in page]
