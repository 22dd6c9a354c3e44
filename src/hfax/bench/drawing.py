"""File-only plotting with matplotlib, an optional dependency."""

from __future__ import annotations

from typing import Any

from hfax.errors import UnsupportedOptionError


def pyplot() -> Any:
    """Return matplotlib's pyplot with a non-interactive backend.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedOptionError(
            "--plot requires matplotlib.", str(error), "Run pip install 'hfax[bench]', or omit --plot."
        ) from error
    return plt
