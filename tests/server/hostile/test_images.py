"""Hostile images, read as a server with a model that sees them reads them: loaded, or refused with a reason."""

from __future__ import annotations

import pytest

from hfax.bench.attacks import images
from hfax.server.failures import ApiError
from hfax.server.images import ImageLoader

FILES = images.images(0)
LOADED = {
    "a bomb of 5792 x 5792",
    "a PNG larger than it says",
    "a GIF of 5,000 frames",
    "a PNG with 2,000 texts",
    "an animated PNG",
}
"""Files that are within the limits, or whose first image is."""


def load(name: str) -> tuple[str, ApiError | None]:
    """The mode of the image, or why it was refused; any other exception is a defect."""
    try:
        return ImageLoader()(images.as_url(FILES[name]())).mode, None
    except ApiError as error:
        return "", error


@pytest.mark.parametrize("name", FILES)
def test_an_image_is_loaded_or_refused(name):
    mode, error = load(name)
    if error is None:
        assert mode == "RGB"
    else:
        assert name not in LOADED
        assert (error.status, error.message[:24]) == (400, "The image was rejected: ")


def test_two_bombs_fit_and_a_third_does_not():
    """40 of them are 224 kB; each decoded in 100 MB."""
    load, url = ImageLoader(), images.as_url(images.png(5792, 5792))
    assert 40 * len(url) < 224 * 1000
    assert [load(url).size for _ in range(2)] == [(5792, 5792)] * 2
    with pytest.raises(ApiError, match="in all"):
        load(url)
