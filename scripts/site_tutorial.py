"""mkdocs hook: the tutorial's notebooks become pages with what they print and draw.

docs/tutorial/*.py are notebooks in jupytext's percent format. Each is executed from top to bottom in this Python, and an error in a
cell fails the build. A page is a cell's source and its outputs in turn; cells tagged `by-hand` and `setup` are folded, and a cell
that draws has an `alt` text. The notebook itself lies beside its page as .ipynb, which Colab opens.

Executed notebooks stay in build/tutorial, under a hash of their source: an unchanged one is not run again. Remove the folder to run
all of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_BUILD = ROOT / "build" / "tutorial"
# By version of the site, see site_versions.py; "dev" is the branch main.
_COLAB = "https://colab.research.google.com/github/hfax/hfax/blob/gh-pages/{version}/tutorial/{name}.ipynb"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "HFAX_HOME": str(_BUILD / "hfax"),
    "TOKENIZERS_PARALLELISM": "false",
    "JAX_PPRINT_USE_COLOR": "0",
}
# Transparent, in colours that can be read on white and on black.
_STYLE = """
import matplotlib
from matplotlib_inline.backend_inline import set_matplotlib_formats
_ink = "#76808f"
matplotlib.rcParams.update({
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.framealpha": 0,
    "text.color": _ink, "axes.labelcolor": _ink, "axes.edgecolor": _ink, "xtick.color": _ink, "ytick.color": _ink,
    "axes.prop_cycle": matplotlib.cycler(color=["#4c8bf5", "#e07b39", "#3aa675", "#b065c8", "#76808f"]),
    "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "hfax", "font.size": 11,
})
set_matplotlib_formats("svg")
"""
_FOLDED = {"by-hand": "example", "setup": "note"}
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
log = logging.getLogger("mkdocs.hooks.tutorial")


def on_files(files: Files, config: Any) -> Files:
    """Every notebook's page, drawings and .ipynb in place of its source."""
    for file in sorted(files, key=lambda f: f.src_uri):
        path = Path(file.src_uri)
        if path.parent.name != "tutorial" or path.suffix != ".py":
            continue
        files.remove(file)
        folder = _BUILD / "pages"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _page(Path(file.abs_src_path)).items():
            (folder / name).write_text(content, encoding="utf-8")
            files.append(File.generated(config, f"{path.parent}/{name}", abs_src_path=str(folder / name)))
    return files


def _page(source: Path) -> dict[str, str]:
    """The files of a notebook, by name."""
    notebook = jupytext.read(source)
    found = {f"{source.stem}.ipynb": nbformat.writes(notebook)}
    executed = _executed(source)
    first, *cells = (c for c in executed.cells if "site" not in _tags(c))
    title, _, rest = first.source.partition("\n")
    address = _COLAB.format(name=source.stem, version=os.environ.get("MIKE_DOCS_VERSION", "dev"))
    colab = f"[Open in Colab]({address}){{ .md-button }}"
    parts = [title, f"{colab} [Notebook]({source.stem}.ipynb){{ .md-button }}", rest.strip()]
    for fold, group in groupby(cells, lambda c: next(iter(_tags(c) & _FOLDED.keys()), None)):
        text = "\n\n".join(part for cell in group for part in _parts(cell, source.stem, found))
        parts.append(_folded(fold, text) if fold else text)
    found[f"{source.stem}.md"] = "\n\n".join(parts) + "\n"
    return found


def _executed(source: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, from build/tutorial if it was executed before."""
    digest = hashlib.sha256(source.read_bytes() + _STYLE.encode()).hexdigest()[:16]
    kept = _BUILD / f"{source.stem}-{digest}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    notebook = jupytext.read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_STYLE, metadata={"tags": ["site"]}))
    work = _BUILD / "work"
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    try:
        client.execute(env={**os.environ, **_ENVIRONMENT})
    except nbclient.exceptions.CellExecutionError as error:
        raise PluginError(f"{source.name}: {error.ename}: {error.evalue}\n{_COLOURS.sub('', str(error))}") from None
    log.info("%s: executed in %.0f s", source.name, time.monotonic() - start)
    for old in _BUILD.glob(f"{source.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook


def _tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _folded(kind: str, text: str) -> str:
    """A closed box, whose title is the text's heading."""
    heading, _, body = text.partition("\n")
    title = heading.lstrip("# ").replace('"', "'")
    return f'??? {_FOLDED[kind]} "{title}"\n\n' + "\n".join(
        f"    {line}".rstrip() for line in body.strip().splitlines()
    )


def _parts(cell: nbformat.NotebookNode, stem: str, files: dict[str, str]) -> Iterator[str]:
    """A cell as Markdown; its drawings go into `files`."""
    if cell.cell_type == "markdown":
        yield cell.source
        return
    yield f"```python\n{cell.source}\n```"
    text = ""
    for output in cell.outputs:
        if output.output_type == "stream":
            text += output.text if output.name == "stdout" else ""  # warnings are not the page's subject
            continue
        if text:
            yield _printed(text)
            text = ""
        yield _shown(output.data, cell, stem, files)
    if text:
        yield _printed(text)


def _shown(data: dict[str, str], cell: nbformat.NotebookNode, stem: str, files: dict[str, str]) -> str:
    if "image/svg+xml" not in data:
        return _printed(data["text/plain"])
    if not (alt := cell.metadata.get("alt")):
        raise PluginError(f"{stem}: a cell draws and has no alt text.\n{cell.source}")
    name = f"{stem}-{sum(n.endswith('.svg') for n in files) + 1}.svg"
    files[name] = data["image/svg+xml"]
    return f"![{alt}]({name})"


def _printed(text: str) -> str:
    return f"```text\n{_COLOURS.sub('', text).rstrip()}\n```"
