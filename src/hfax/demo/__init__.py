"""The checkpoint that the package carries; its README.md says how it was made, from what, and what it is not."""

from pathlib import Path


def demo_folder() -> Path:
    """The demo checkpoint's folder, for tokenizers; `AutoModelForTPU.from_pretrained("demo")` finds it by itself."""
    return Path(__file__).parent
