"""Images in requests: from data: URLs, or from allowed hosts.

A URL is parsed and resolved once, so the checked address is the one fetched: the host must be allowed, all its addresses must be
public, and the connection goes to a checked address. Redirects are rejected. Sizes are limited before and during decoding.
"""

from __future__ import annotations

import base64
import binascii
import io
import ipaddress
import socket
import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from hfax.server.failures import ApiError

MAX_IMAGES = 32
"""Maximum images per request."""
_MAX_BYTES = 16 << 20
_MAX_PIXELS = 32 << 20
_MAX_PIXELS_IN_ALL = 64 << 20
_TIMEOUT_S = 10.0
_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


class ImageLoader:
    """Loads the images of one request, whose number and pixels in all are limited.

    Args:
        allowed_hosts: host names that images may be fetched from.
    """

    def __init__(self, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._allowed_hosts = allowed_hosts
        self._num_images = self._num_pixels = 0

    def __call__(self, url: str) -> Any:
        """Load an image as an RGB PIL image.

        Args:
            url: data:image/…;base64,… or https://… on an allowed host.

        Raises:
            ApiError: 400, with the reason the image was rejected.
        """
        self._num_images += 1
        if self._num_images > MAX_IMAGES:
            raise _refused(f"a request may have {MAX_IMAGES} images.")
        data = _from_data(url) if url.startswith("data:") else _from_host(url, self._allowed_hosts)
        return _decode(data, self._count)

    def _count(self, num_pixels: int) -> None:
        self._num_pixels += num_pixels
        if self._num_pixels > _MAX_PIXELS_IN_ALL:
            raise _refused(f"the request's images exceed {_MAX_PIXELS_IN_ALL >> 20} million pixels in all.")


def _refused(why: str) -> ApiError:
    return ApiError(400, f"The image was rejected: {why}", param="messages")


def _from_data(url: str) -> bytes:
    head, comma, body = url.partition(",")
    kind, _, encoding = head.removeprefix("data:").partition(";")
    if not comma or kind not in _TYPES or encoding != "base64":
        raise _refused(f"a data: URL must be data:TYPE;base64,… with TYPE one of {', '.join(_TYPES)}.")
    if len(body) > _MAX_BYTES * 4 // 3 + 4:
        raise _refused(f"it exceeds {_MAX_BYTES >> 20} MB.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused("it is not valid base64.") from error


def check_url(url: str, allowed_hosts: tuple[str, ...]) -> tuple[str, str, int, str]:
    """Split an allowed URL into host, address, port and path.

    Raises:
        ApiError: the URL may not be fetched.
    """
    if any(c in url for c in "\\@ \t\r\n") or not url.isprintable():
        raise _refused("its URL has characters that are not allowed.")
    try:
        parts = urlsplit(url)
        port = parts.port or 443
    except ValueError as error:
        raise _refused("its URL is malformed.") from error
    host = parts.hostname or ""
    if parts.scheme != "https" or host not in allowed_hosts:
        raise _refused("its host is not allowed. Send a data: URL, or start the server with --allowed-image-host.")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise _refused("its host name does not resolve.") from error
    addresses = sorted(str(address) for address in found)
    if not addresses or any(not _is_public(address) for address in addresses):
        raise _refused("its host has a non-public address.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return host, addresses[0], port, path


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_global and not ip.is_multicast and (mapped is None or mapped.is_global)


def _from_host(url: str, allowed_hosts: tuple[str, ...]) -> bytes:
    import http.client
    import ssl

    host, address, port, path = check_url(url, allowed_hosts)
    context = ssl.create_default_context()
    try:
        raw = socket.create_connection((address, port), timeout=_TIMEOUT_S)
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
        connection.sock = context.wrap_socket(raw, server_hostname=host)
        connection.request("GET", path, headers={"Accept": ", ".join(_TYPES)})
        answer = connection.getresponse()
        if answer.status != 200:
            raise _refused(f"its host returned HTTP {answer.status}; redirects are not followed.")
        data = answer.read(_MAX_BYTES + 1)
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise _refused("the download failed.") from error
    if len(data) > _MAX_BYTES:
        raise _refused(f"it exceeds {_MAX_BYTES >> 20} MB.")
    return data


def _decode(data: bytes, count: Callable[[int], None]) -> Any:
    """Decode an image, after its size has been checked and counted."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP", "GIF"))
            if image.width * image.height > _MAX_PIXELS:
                raise _refused(f"it exceeds {_MAX_PIXELS >> 20} million pixels.")
            if min(image.size) < 2:
                raise _refused(f"it is {image.width} x {image.height} pixels; each side must be at least 2.")
            count(image.width * image.height)
            return image.convert("RGB")
    except (
        UnidentifiedImageError,
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise _refused("it is not a readable PNG, JPEG, WebP or GIF.") from error
