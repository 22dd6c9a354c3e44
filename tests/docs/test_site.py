"""The documentation's site as `make test-docs` has just built it, in a browser as wide as a phone."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT

pytestmark = pytest.mark.docs
_SITE = ROOT / "build" / "site"
_NOTEBOOKS = sorted(path.stem for path in (ROOT / "docs" / "tutorial").glob("*.py"))
_PHONE = 390


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not of interest."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert (_SITE / "index.html").is_file(), "run: make docs"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=_SITE))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "the site is tested in Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def test_every_page_fits_a_phone_and_says_what_its_images_show(address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": _PHONE, "height": 800})
    messages: list[str] = []
    page.on("console", lambda m: messages.append(f"{page.url}: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: messages.append(f"{page.url}: {error}"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    wide, silent = [], []
    pages = sorted(str(p.relative_to(_SITE)) for p in _SITE.rglob("*.html") if p.name != "404.html")
    assert len(pages) > len(_NOTEBOOKS)
    for name in pages:
        page.goto(f"{address}/{name}")
        page.evaluate("document.querySelectorAll('details').forEach(box => box.open = true)")
        if (width := page.evaluate("document.documentElement.scrollWidth")) > _PHONE:
            wide.append((name, width))
        silent += [(name, n) for n in page.evaluate("[...document.images].filter(i => !i.alt).map(i => i.src)")]
    page.close()
    assert not wide
    assert not silent
    assert not messages
    assert not [url for url in asked if not url.startswith(address)], "the site works without a network"


@pytest.mark.parametrize("name", _NOTEBOOKS)
def test_a_notebook_has_its_drawings_its_boxes_and_its_file(name: str, address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": _PHONE, "height": 800})
    page.goto(f"{address}/tutorial/{name}.html")
    assert page.locator("details.example").count() >= 1, "no box by hand"
    page.evaluate("document.querySelectorAll('details').forEach(box => box.open = true)")
    broken = page.evaluate("[...document.querySelectorAll('article img')].filter(i => !i.naturalWidth).length")
    assert (page.locator("article img").count() > 0, broken) == (True, 0)
    link = page.locator("a", has_text="Open in Colab").get_attribute("href")
    assert link.endswith(f"/gh-pages/dev/tutorial/{name}.ipynb")
    assert Path(_SITE, "tutorial", f"{name}.ipynb").is_file()
    page.close()
