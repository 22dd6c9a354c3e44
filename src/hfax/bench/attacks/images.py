"""Hostile images: bombs, lies in headers, broken files, and URLs of places that a server must not fetch.

Files are written by hand, so that no image library is needed.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from hfax.bench.attacks.case import CHAT, Case, body_case, field_case, valid_body

_URLS = (
    "http://169.254.169.254/latest/meta-data/", "https://169.254.169.254/latest/meta-data/", "https://[fd00:ec2::254]/",
    "file:///etc/passwd", "file://localhost/etc/hostname", "http://127.0.0.1:1/", "https://localhost/", "https://[::1]/",
    "https://[::ffff:127.0.0.1]/", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/",
    "https://127.0.0.1.nip.io/", "https://localtest.me/", "https://a.1.2.3.4.1time.127.0.0.1.1time.rebind.network/",
    "https://example.com@127.0.0.1/", "https://127.0.0.1#@example.com/", "https://example.com\\@127.0.0.1/",
    "gopher://127.0.0.1:6379/_FLUSHALL", "ftp://127.0.0.1/", "jar:file:///x!/y", "//127.0.0.1/", "https://", "https://:0/",
    "https://example.com:99999/", "https://exa mple.com/", "https://example.com/\r\nX: y", "javascript:alert(1)", "",
)  # fmt: skip
_DATA = {
    "no data": "data:",
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "of HTML": "data:text/html;base64,PHNjcmlwdD4=",
    "of SVG": "data:image/svg+xml;base64," + base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode(),
    "of TIFF": "data:image/tiff;base64,SUkqAAgAAAA=",
    "of wrong base64": "data:image/png;base64,@@@@",
    "of another type": "data:image/jpeg;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7",
    "of white space": "data:image/png;base64," + " " * 100_000,
    "of nothing": "data:image/png;base64,",
}


def images(seed: int) -> dict[str, Callable[[], bytes]]:
    """Image files by name, as functions that make them."""
    whole = png(64, 64)
    noise = random.Random(seed).randbytes(5000)
    return {
        "a bomb of 5792 x 5792": lambda: png(5792, 5792),
        "a bomb of 30000 x 30000": lambda: png(30_000, 30_000, rows=3000),
        "a PNG of 2**31-1": lambda: png(2**31 - 1, 2**31 - 1, rows=0),
        "a PNG of 0 x 0": lambda: png(0, 0, rows=0),
        "a PNG of 1 x 1": lambda: png(1, 1),
        "a PNG of 1 x 100000": lambda: png(1, 100_000),
        "a PNG larger than it says": lambda: png(8, 8, rows=100_000),
        "a PNG smaller than it says": lambda: png(4000, 4000, rows=2),
        "a PNG cut in its header": lambda: whole[:20],
        "a PNG cut in its data": lambda: whole[:-20],
        "a PNG without data": lambda: whole[:33],
        "a PNG with wrong checksums": lambda: whole[:29] + b"\0\0\0\0" + whole[33:],
        "a PNG with a text of 64 MB": lambda: png(8, 8, extra=_chunk(b"zTXt", b"k\0\0" + _zeros(64 << 20))),
        "a PNG with 2,000 texts": lambda: png(8, 8, extra=_chunk(b"tEXt", b"k\0" + b"x" * 500) * 2000),
        "a PNG with a profile of 64 MB": lambda: png(8, 8, extra=_chunk(b"iCCP", b"k\0\0" + _zeros(64 << 20))),
        "a PNG with a chunk of 2**31": lambda: whole[:33] + struct.pack(">I", 2**31 - 1) + b"tEXt" + b"k\0x",
        "an animated PNG": lambda: png(64, 64, extra=_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
        "a GIF of 5,000 frames": lambda: gif(64, 64, 5000),
        "a GIF of 65535 x 65535": lambda: gif(65_535, 65_535, 1),
        "a GIF with large frames": lambda: gif(2, 2, 10, frame=60_000),
        "a GIF cut": lambda: gif(64, 64, 3)[:-10],
        "a JPEG of 65535 x 65535": lambda: jpeg(65_535, 65_535),
        "a JPEG of nothing": lambda: b"\xff\xd8\xff\xd9",
        "a JPEG with 5,000 comments": lambda: b"\xff\xd8" + b"\xff\xfe\0\x0cabcdefghij" * 5000 + b"\xff\xd9",
        "a WebP of 16384 x 16384": lambda: webp(16_384, 16_384),
        "a WebP cut": lambda: webp(64, 64)[:25],
        "a PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n",
        "noise": lambda: noise,
        "a PNG with noise": lambda: whole[:41] + noise,
        "nothing": lambda: b"",
    }


def image_cases(seed: int) -> Iterator[Case]:
    """Requests with hostile images."""
    for name, make in images(seed).items():
        yield body_case("images", name, CHAT, lambda model, make=make: _asking(model, [as_url(make())]))
    bomb = "40 bombs of 5792 x 5792"
    yield body_case("images", bomb, CHAT, lambda model: _asking(model, [as_url(png(5792, 5792))] * 40))
    yield body_case(
        "images", "2 bombs of 5792 x 5792", CHAT, lambda model: _asking(model, [as_url(png(5792, 5792))] * 2)
    )
    yield body_case("images", "3,000 small images", CHAT, lambda model: _asking(model, [as_url(png(8, 8))] * 3000))
    yield body_case("images", "20 MB of base64", CHAT, lambda model: _asking(model, [as_url(b"\0" * (15 << 20))]))
    for name, url in _DATA.items():
        yield body_case("images", f"data: {name}", CHAT, lambda model, url=url: _asking(model, [url]))
    for url in _URLS:
        yield body_case("images", f"URL {url!a}", CHAT, lambda model, url=url: _asking(model, [url]))
    for name, part in {
        "a URL that is a number": {"type": "image_url", "image_url": {"url": 5}},
        "a URL without its object": {"type": "image_url", "image_url": "https://127.0.0.1/"},
        "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "a file": {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    }.items():
        yield field_case("images", name, CHAT, messages=[{"role": "user", "content": [part]}])


def as_url(data: bytes) -> str:
    """A data: URL with the MIME type that the file's first bytes tell; PNG if they tell none."""
    kind = {b"GIF8": "gif", b"RIFF": "webp", b"\xff\xd8\xff": "jpeg"}.get(
        data[:3] if data[:1] == b"\xff" else data[:4], "png"
    )
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _asking(model: str, urls: list[str]) -> bytes:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return valid_body(CHAT, model, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    return b"".join(
        [
            *(packer.compress(piece) for _ in range(count >> 20)),
            packer.compress(bytes(count % (1 << 20))),
            packer.flush(),
        ]
    )


def png(width: int, height: int, *, rows: int | None = None, extra: bytes = b"") -> bytes:
    """A black-and-white PNG of one bit a pixel: 1 kB for a million pixels.

    Args:
        width: width in its header.
        height: height in its header.
        rows: rows that it has; None: `height`.
        extra: chunks before its data.
    """
    start = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    count = (height if rows is None else rows) * (1 + (min(width, 1 << 20) + 7) // 8)
    return b"\x89PNG\r\n\x1a\n" + start + extra + _chunk(b"IDAT", _zeros(count)) + _chunk(b"IEND", b"")


def gif(width: int, height: int, frames: int, *, frame: int = 1) -> bytes:
    """A GIF whose frames have one pixel each, and are `frame` pixels wide and high by their headers."""
    start = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    one = b"\x21\xf9\x04\x08\0\0\0\0" + b"," + struct.pack("<HHHHB", 0, 0, frame, frame, 0) + b"\x02\x02\x44\x01\0"
    return start + one * frames + b";"


def jpeg(width: int, height: int) -> bytes:
    """A JPEG's headers, without data."""
    frame = b"\xff\xc0\0\x0b\x08" + struct.pack(">HH", height, width) + b"\x01\x01\x11\0"
    return (
        b"\xff\xd8"
        + b"\xff\xdb\0\x43\0"
        + b"\x01" * 64
        + frame
        + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0"
        + b"\0" * 50
        + b"\xff\xd9"
    )


def webp(width: int, height: int) -> bytes:
    """A lossless WebP's header, without data."""
    bits = struct.pack("<I", (width - 1) | (height - 1) << 14)
    data = b"VP8L" + struct.pack("<I", 5 + 20) + b"\x2f" + bits + b"\0" * 20
    return b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WEBP" + data
