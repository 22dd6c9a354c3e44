"""The running Python's own documentation, as training text for the demo model: names, docstrings, language topics.

Everything is read from the interpreter that runs this file: the docstrings of the standard library's Python sources,
those of its C modules, and the language reference that `help()` shows (`pydoc_data.topics`). All of it is under the
PSF licence, and the same interpreter always gives the same corpus. This module knows nothing of tokens, chat
templates or models.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Kind = Literal["module", "class", "function", "topic"]

HELD_OUT_ONE_IN = 40
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "_bundled"}
PUBLIC_NAMES = {  # where the standard library keeps the implementation -> where people import it from
    "posixpath": "os.path",
    "genericpath": "os.path",
    "posix": "os",
    "_pyio": "io",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_collections_abc": "collections.abc",
    "_pylong": "int",
}
TYPOGRAPHY = str.maketrans(  # curly quotes, dashes, the ellipsis and the no-break space, as typed on a keyboard
    {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "--", 0x2013: "-", 0x2026: "...", 0xA0: " "}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One documented object, or one part of a language topic.

    `name` is what a person would type (`textwrap.dedent`), or for a topic its title (`The "with" statement`); parts
    of a topic after the first have a number appended. `signature` is the parameter list without its brackets, where
    known.
    """

    name: str
    kind: Kind
    signature: str | None
    text: str

    @property
    def is_public(self) -> bool:
        """Whether a user could ask for it by name: no private component, and not a later part of a topic."""
        return not any(part.startswith("_") for part in self.name.split(".")) and "#" not in self.name

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept out of training, decided by its name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train on and documents held out; no text occurs twice."""

    train: list[Document]
    held_out: list[Document]


def read_corpus(limit: int | None = None) -> Corpus:
    """Read the whole corpus in a fixed order; takes a few seconds.

    Args:
        limit: keep only the first so many training documents and as many held-out ones, for quick trials.

    A held-out document whose first 60 characters also open a training document is dropped from both, so that the
    held-out loss does not reward copying of near duplicates.
    """
    seen: set[str] = set()
    documents: list[Document] = []
    for document in (*_python_documents(), *_c_documents(), *_topic_documents()):
        key = re.sub(r"\W+", " ", document.text).lower()
        if len(document.text) < 25 or key in seen or not _is_ascii_prose(document.text):
            continue
        seen.add(key)
        documents.append(document)
    train = [document for document in documents if not document.is_held_out]
    openings = {document.text[:60] for document in train}
    held_out = [document for document in documents if document.is_held_out and document.text[:60] not in openings]
    return Corpus(train=train[:limit], held_out=held_out[:limit])


def tidy(text: str) -> str:
    """Lay out one docstring for reading: prose paragraphs on one line each, what is indented or listed left as it is.

    >>> tidy("Return the\\n``length`` of :class:`X`.\\n\\n    >>> f()\\n    1")
    'Return the `length` of `X`.\\n\\n    >>> f()\\n    1'
    """
    text = text.expandtabs(4).translate(TYPOGRAPHY)
    text = re.sub(r":(?:py:)?[a-z]+:`([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`\n]+)``", r"`\1`", text)
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in text.strip("\n").split("\n")))
    return "\n\n".join(_unwrap(paragraph) for paragraph in paragraphs if paragraph.strip()).strip()


def _unwrap(paragraph: str) -> str:
    """Join the lines of a prose paragraph; a paragraph with structure (indents, bullets, prompts, tables) stays."""
    lines = paragraph.split("\n")
    if item := re.match(r" *[*-] (?=\S)", paragraph):  # a list item, its other lines indented to its text
        indent = " " * item.end()
        if all(line.startswith(indent) and line[len(indent)] != " " for line in lines[1:]):
            return " ".join([lines[0], *(line.strip() for line in lines[1:])])
        return paragraph
    structured = re.compile(r"\s|[-*+o>|=~^#] |\d+[.)]\s|>>>|\.\. |[@:|+]|[\w.]+ -- |.*[^.!?:]  ")
    if any(structured.match(line) for line in lines):
        return paragraph
    if max(len(line) for line in lines[:-1] or [""]) < 45:  # short lines were broken on purpose
        return paragraph
    return re.sub(r"([.!?])  +", r"\1 ", " ".join(lines))


def _is_ascii_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return text.isascii() and letters > 0.6 * len(text)


def _python_documents() -> Iterator[Document]:
    """Every docstring of the standard library's Python sources, tests left out."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError:  # the standard library carries a few files that are broken on purpose
                continue
        module = ".".join(part for part in relative.with_suffix("").parts if part != "__init__")
        yield from _walk(tree, _public_module(module))


def _walk(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Document]:
    if docstring := ast.get_docstring(node):
        if isinstance(node, ast.Module | ast.ClassDef):
            kind, signature = "module" if isinstance(node, ast.Module) else "class", None
        else:
            kind, signature = "function", _python_signature(node)
        yield Document(name=name, kind=kind, signature=signature, text=tidy(docstring))
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")


def _python_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    signature = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    return signature if len(signature) <= 100 else None


def _public_module(module: str) -> str:
    """The name that people import: `_struct` is `struct`, `posixpath` is `os.path`."""
    top, _, rest = module.partition(".")
    public = PUBLIC_NAMES.get(top) or (top[1:] if top[1:] in sys.stdlib_module_names and top[0] == "_" else top)
    return f"{public}.{rest}" if rest else public


def _c_documents() -> Iterator[Document]:
    """The docstrings of built-in and extension modules, which have no Python source."""
    extensions = {path.name.split(".")[0] for path in Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")}
    for module_name in sorted(extensions.union(sys.builtin_module_names) & sys.stdlib_module_names):
        if re.match(r"_?(test|xx)|_ctypes_test|_testcapi", module_name):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            try:
                module = importlib.import_module(module_name)
            except ImportError:  # an extension whose system library is missing
                continue
        public = _public_module(module_name)
        prefix = "" if module_name == "builtins" else f"{public}."
        yield from _live(module, public, "module")
        for attribute, value in sorted(vars(module).items()):
            if isinstance(value, type):
                yield from _live(value, f"{prefix}{attribute}", "class")
                for method, function in sorted(vars(value).items()):
                    if callable(function) and not isinstance(function, type):
                        yield from _live(function, f"{prefix}{attribute}.{method}", "function")
            elif isinstance(value, types.BuiltinFunctionType):
                yield from _live(value, f"{prefix}{attribute}", "function")


def _live(value: Any, name: str, kind: Kind) -> Iterator[Document]:
    docstring = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    if isinstance(docstring, str) and docstring.strip():
        signature = getattr(value, "__text_signature__", None)
        if signature is not None:
            signature = re.sub(r"^\(\$?(self|module|type)(, )?(/(, )?)?|^\(|\)$", "", signature)
            signature = re.sub(r"\)$", "", signature)
        yield Document(name=name, kind=kind, signature=signature or None, text=tidy(inspect.cleandoc(docstring)))


def _topic_documents() -> Iterator[Document]:
    """The language reference behind `help("with")` and the like, in parts of about 1,500 characters."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for label in sorted(topics):
        title, _, body = topics[label].strip().partition("\n")
        title = title.translate(TYPOGRAPHY).replace('"', "`") if body.lstrip().startswith(("*", "=", "-")) else label
        body = re.sub(
            r"^[*=\-~^]{4,}$", "", topics[label].partition("\n")[2] if title != label else topics[label], flags=re.M
        )
        for number, part in enumerate(_parts(tidy(textwrap.dedent(body)), size=1500)):
            name = title if number == 0 else f"{title} #{number + 1}"
            yield Document(name=name, kind="topic", signature=None, text=re.sub(r'"+([^"\s]{1,40})"+', r"`\1`", part))


def _parts(text: str, size: int) -> Iterator[str]:
    """Cut text at blank lines into parts of at least `size` characters, the last one shorter."""
    part = ""
    for paragraph in text.split("\n\n"):
        part = f"{part}\n\n{paragraph}" if part else paragraph
        if len(part) >= size:
            yield part
            part = ""
    if part:
        yield part
