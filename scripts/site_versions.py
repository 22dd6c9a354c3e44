"""mkdocs hook: with `mike`, which keeps a folder of the site for each release, pages have a menu of the versions.

mike says in MIKE_DOCS_VERSION what it builds. Without it the site is one folder that works from the file system, and its pages ask
for no list of versions.
"""

from __future__ import annotations

import os
from typing import Any


def on_config(config: Any) -> Any:
    """Turn the menu on, if mike builds."""
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike", "alias": True}
    return config
