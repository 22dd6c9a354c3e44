"""The README's plot: tokens per second of one sequence, hfax beside transformers, from the recorded measurements.

    python scripts/speed_plot.py > docs/images/speed.svg

reads benchmarks/results/cpu-*.json, which `python benchmarks/cpu.py` writes; `tests/docs/test_pictures.py` compares.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "llama-3.2-1b": "Llama-3.2-1B"}
SUBJECTS = {"eager": "transformers, eager", "static": "transformers, static cache + torch.compile", "hfax": "hfax"}
"""Of the group "peers", in which the subjects take turns; all in bfloat16."""
WITH_WEIGHTS = {"hfax int8": "hfax, int8 weights", "hfax int4": "hfax, int4 weights"}
COLORS = {"hfax": "#2f6fde", "hfax int8": "#2f6fde", "hfax int4": "#2f6fde"}
BAR, GAP, LEFT, WIDTH = 20, 6, 310, 760


def tokens_per_second(model: str) -> dict[str, float]:
    """By subject: tokens over the median of the rounds' seconds, one sequence after 128 tokens."""
    groups: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/cpu-{model}.json").read_text())

    def speed(group: str, subject: str) -> float:
        case = groups[group]["subjects"][subject]["cases"]["decode 1 x 128"]
        return case["tokens"] / case["median_seconds"]

    peers = {subject: speed("peers", subject) for subject in SUBJECTS}
    return peers | {subject: speed("weights", subject) for subject in WITH_WEIGHTS}


def draw() -> str:
    """The SVG. Its background is its own, so that it reads the same in a light and in a dark page."""
    speeds = {title: tokens_per_second(model) for model, title in MODELS.items()}
    most = max(max(found.values()) for found in speeds.values())
    lines: list[str] = []
    y = 34
    for title, found in speeds.items():
        lines.append(f'<text x="16" y="{y + 4}" font-weight="600">{escape(title)}</text>')
        y += 16
        for subject, speed in found.items():
            name = {**SUBJECTS, **WITH_WEIGHTS}[subject]
            width = (WIDTH - LEFT - 70) * speed / most
            color, middle = COLORS.get(subject, "#9aa0a6"), y + BAR - 6
            lines += [
                f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{color}"/>',
                f'<text x="{LEFT + width + 8:.1f}" y="{middle}">{speed:.1f}</text>',
            ]
            y += BAR + GAP
        y += 22
    about = "; ".join(
        f"{title}: hfax {found['hfax']:.1f}, eager {found['eager']:.1f}" for title, found in speeds.items()
    )
    height = y - 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
            f' font-family="system-ui, sans-serif" font-size="13" fill="#202124">',
            f"<title>Tokens per second of one sequence, two CPU cores, bfloat16. {escape(about)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            *lines,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(draw())
