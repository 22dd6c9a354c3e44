"""matplotlib, where it is installed, drawing into files."""

from __future__ import annotations

from typing import Any

from hfax.errors import UnsupportedOptionError


def pyplot() -> Any:
    """matplotlib's pyplot, which opens no window.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedOptionError(
            "The plot needs matplotlib.", str(error), "pip install 'hfax[bench]', or leave --plot out."
        ) from error
    return plt
