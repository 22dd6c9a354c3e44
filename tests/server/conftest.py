"""Servers for the tests: real HTTP on loopback, in this process, so that the engine behind can be looked at."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from transformers import AutoTokenizer

from hfax import AutoModelForTPU, Engine, EngineConfig
from hfax.server.app import make_app
from hfax.server.connection import make_config
from hfax.server.loading import Loaded, load_writer
from hfax.server.served import Served
from hfax.server.settings import Settings


@dataclasses.dataclass
class Running:
    """A server that listens, and what is behind it."""

    url: str
    served: Served
    app: object

    @property
    def engine(self) -> Engine:
        return self.served._loaded.engine

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            core = self.engine.core if self.served._loaded is not None else None
            assert time.monotonic() < deadline, (
                f"it did not happen in time: {core and vars(core)} {core and vars(core.scheduler)}"
            )
            time.sleep(0.01)


@contextlib.contextmanager
def serving(load: Callable[..., Loaded], *, waits: bool = True, **settings) -> Iterator[Running]:
    """A server while the block runs."""
    options = {"model": "demo", "served_model_names": ("demo",), "port": 0, "drain_timeout_s": 5.0, **settings}
    served = Served(Settings(**options), load)
    app = make_app(served)
    server = uvicorn.Server(make_config(app, served.settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    served.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    running = Running(f"http://127.0.0.1:{port}", served, app)
    try:
        if waits:
            running.wait_until(lambda: served.state != "loading", 120)
            assert served.state == "ready", served.failure
        yield running
    finally:
        server.should_exit = True
        served.close()
        thread.join(20)


@pytest.fixture(scope="session")
def demo():
    """The demo model and its tokenizer; in bfloat16, several of its best tokens tie."""
    model = AutoModelForTPU.from_pretrained("demo", dtype="float32")
    return model, AutoTokenizer.from_pretrained(model.folder)


def loader(demo, template: str | None = None, **config) -> Callable[..., Loaded]:
    """What loads the demo model into a server."""
    model, tokenizer = demo

    def load(on_step) -> Loaded:
        options = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 128, "max_waiting": 16, **config}
        return load_writer(
            model, tokenizer, EngineConfig(**options), processor=None, chat_template=template, on_step=on_step
        )

    return load


@pytest.fixture(scope="session")
def server(demo) -> Iterator[Running]:
    """One for all tests that leave it as it was."""
    with serving(loader(demo)) as running:
        yield running


@pytest.fixture
def make_server(demo):
    """`serving`, for tests that break things, or set something."""

    def make(template: str | None = None, config=None, before_loading=None, tokenizer=None, **settings):
        load = loader((demo[0], tokenizer or demo[1]), template, **(config or {}))

        def after(on_step):
            if before_loading is not None:
                before_loading()
            return load(on_step)

        return serving(after, **settings)

    return make
