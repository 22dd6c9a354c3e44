"""The pictures of docs/concepts: boxes and arrows, drawn from the text below.

    python scripts/concept_pictures.py

writes docs/images/concepts/*.svg; `tests/docs/test_pictures.py` compares.
"""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "concepts"
BOX_WIDTH, BOX_HEIGHT, GAP, ROW_GAP, MARGIN = 178, 62, 44, 46, 18
FILLS = {"host": "#e8f0fe", "device": "#e6f4ea", "file": "#fef7e0", "plain": "#f1f3f4"}
"""Where a thing is: in host memory, on the device, in a file."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A box: its title, at most two lines below it, and where the thing is."""

    title: str
    lines: tuple[str, ...] = ()
    place: str = "plain"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        title: for those who cannot see it: what the picture says.
        rows: of boxes; an arrow leads from each to the next one of its row.
        down: pairs of (row, column) and the column of the next row that an arrow leads to.
        labels: by (row, column): words on the arrow that leaves that box to the right.
        back: rows whose arrows lead to the left.
        loose: rows without arrows.
    """

    title: str
    rows: tuple[tuple[Box, ...], ...]
    down: tuple[tuple[int, int, int], ...] = ()
    labels: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    back: tuple[int, ...] = ()
    loose: tuple[int, ...] = ()


PICTURES = {
    "data": Picture(
        "A checkpoint's config becomes a skeleton without weights; its tensors become arrays on the device; a trace of the "
        "skeleton becomes programs, which take the arrays as arguments.",
        (
            (
                Box("config.json", (), "file"),
                Box("skeleton", ("transformers' module,", "on the meta device"), "host"),
                Box("trace", ("a pure JAX function", "of weights and inputs"), "host"),
                Box("programs", ("compiled, and kept on", "disk for later processes"), "device"),
            ),
            (
                Box("safetensors, GGUF, …", ("mapped, or read once",), "file"),
                Box("conversion", ("rename, split, stack, cast:", "one tensor at a time"), "host"),
                Box("placement", ("each device's slice only",), "host"),
                Box("params", ("jax.Array by name:", "arguments of programs"), "device"),
            ),
        ),
        down=((0, 1, 1),),
    ),
    "cache": Picture(
        "The prefill program writes the prompt's keys and values into a cache of fixed capacity; the decoding loop donates the "
        "cache to itself and writes one position in each step.",
        (
            (
                Box("prompt", ("padded on the left to", "a power of two"), "host"),
                Box("prefill", ("all positions at once",), "device"),
                Box("cache", ("capacity 128, 256, …", "an array per layer"), "device"),
                Box("decoding loop", ("writes one position,", "reads the live part"), "device"),
            ),
        ),
        labels={(0, 2): "donated"},
    ),
    "programs": Picture(
        "A call's sizes are rounded up to size classes; with the key of model, options, device and versions they find a program "
        "in memory, then on disk, and only then is it traced and compiled.",
        (
            (
                Box("call", ("rows, lengths, options",), "host"),
                Box("size class", ("sizes rounded up",), "host"),
                Box("key", ("model, versions, device,", "which options are active"), "host"),
                Box("in memory?", ("then it runs",), "device"),
            ),
            (
                Box("run", ("arguments: weights,", "inputs, option values"), "device"),
                Box("compile", ("XLA",), "host"),
                Box("trace", ("torch code, patches",), "host"),
                Box("on disk?", ("then it is read and runs",), "file"),
            ),
        ),
        down=((0, 3, 3),),
        back=(1,),
    ),
    "sharding": Picture(
        "The trace tells for each axis of each weight which product it belongs to; a plan gives axes of the mesh to axes of "
        "weights; each device reads its own slices, and XLA adds the sums between devices.",
        (
            (
                Box("mesh", ("data, fsdp, expert,", "tensor: devices by axis"), "host"),
                Box("plan", ("the model's own, else", "from its trace"), "host"),
                Box("slices", ("read from the file,", "whole groups of codes"), "file"),
                Box("programs", ("XLA partitions them:", "one sum after each pair"), "device"),
            ),
        ),
    ),
    "patches": Picture(
        "Modelling code runs unchanged where it can. Where it asks for a value, a patch replaces one operation, function or "
        "forward, only during the trace; what hfax's tensors can answer from shapes needs no patch.",
        (
            (
                Box("modelling code", ("transformers' own",), "host"),
                Box("TraceTensor", ("strides, views, bounds:", "shapes are numbers"), "host"),
                Box("lowering", ("torch operation to JAX",), "host"),
                Box("kernel", ("by platform, dtype", "and number of rows"), "device"),
            ),
            (
                Box("patch", ("operation, function,", "forward or input"), "host"),
                Box("only in this trace", ("torch and transformers", "stay as they are"), "host"),
            ),
        ),
        down=((0, 0, 0),),
    ),
    "engine": Picture(
        "Requests wait in a queue; the scheduler puts tokens of several sequences into one row; a step runs that row over pages "
        "of keys and values; sampling gives each sequence its next token, which streams to its client.",
        (
            (
                Box("requests", ("checked, tokenized,", "queued by client"), "host"),
                Box("scheduler", ("a budget of tokens a step:", "prompts in chunks"), "host"),
                Box("step", ("one row of tokens,", "each with its position"), "device"),
                Box("sampling", ("options by sequence",), "device"),
            ),
            (
                Box("stream", ("text to each client",), "host"),
                Box("prefix cache", ("full pages by content",), "device"),
                Box("pages", ("keys and values,", "shared where equal"), "device"),
            ),
        ),
        down=((0, 2, 2),),
        loose=(1,),
    ),
}


def draw(picture: Picture) -> str:
    """The SVG of a picture. It has a background of its own: it reads the same in a light and in a dark page."""
    columns = max(len(row) for row in picture.rows)
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * GAP
    height = 2 * MARGIN + len(picture.rows) * BOX_HEIGHT + (len(picture.rows) - 1) * ROW_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#202124">',
        f"<title>{escape(picture.title, quote=False)}</title>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5f6368"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for r, row in enumerate(picture.rows):
        for c, box in enumerate(row):
            parts += _box(box, *_corner(r, c))
            if c + 1 < len(row) and r not in picture.loose:
                x, y = _corner(r, c)
                ends = (x + BOX_WIDTH, x + BOX_WIDTH + GAP)
                start, end = reversed(ends) if r in picture.back else ends
                parts.append(_arrow(start, y + BOX_HEIGHT / 2, end, y + BOX_HEIGHT / 2))
                if (label := picture.labels.get((r, c))) is not None:
                    parts.append(_text(x + BOX_WIDTH + GAP / 2, y + BOX_HEIGHT / 2 - 8, label, size=10))
    for r, c, below in picture.down:
        (x, y), (x2, y2) = _corner(r, c), _corner(r + 1, below)
        parts.append(_arrow(x + BOX_WIDTH / 2, y + BOX_HEIGHT, x2 + BOX_WIDTH / 2, y2))
    return "\n".join([*parts, "</svg>"])


def _corner(row: int, column: int) -> tuple[int, int]:
    return MARGIN + column * (BOX_WIDTH + GAP), MARGIN + row * (BOX_HEIGHT + ROW_GAP)


def _box(box: Box, x: int, y: int) -> list[str]:
    middle = x + BOX_WIDTH / 2
    top = y + BOX_HEIGHT / 2 + 4 - 8 * len(box.lines)
    frame = f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{FILLS[box.place]}" stroke="#9aa0a6"/>'
    lines = [_text(middle, top + 16 * (i + 1), line, size=11) for i, line in enumerate(box.lines)]
    return [frame, _text(middle, top, box.title, weight=600), *lines]


def _text(x: float, y: float, text: str, size: int = 13, weight: int = 400) -> str:
    font = f'text-anchor="middle" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {font}>{escape(text, quote=False)}</text>'


def _arrow(x: float, y: float, x2: float, y2: float) -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="#5f6368" stroke-width="1.4" marker-end="url(#end)"/>'


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(picture) + "\n")
