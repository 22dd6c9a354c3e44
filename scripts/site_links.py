"""mkdocs hook: links to files of the repository outside docs/ lead to GitHub.

On GitHub such links are relative; the site has only docs/. A link to a file that does not exist stays as it is, and fails
the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with links out of docs/ as addresses of the repository."""
    folder = Path(page.file.abs_src_path).parent

    def lead_out(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists() or target.is_relative_to(config["docs_dir"]):
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{found[1]}{config['repo_url']}/{kind}/main/{target.relative_to(ROOT)}{found[3] or ''}{found[4]}"

    return _LINK.sub(lead_out, markdown)
