"""Worker processes that read requests: what a request may cost, who waits for whom, and what is left of it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hfax.server import run
from hfax.server.chat import ChatTemplate
from hfax.server.embeddings import EmbeddingQueue
from hfax.server.failures import ApiError
from hfax.server.images import ImageLoader
from hfax.server.request_reader import RequestReader
from hfax.server.workers import WorkerPool

CHAT = [{"role": "user", "content": "What does list.append do?"}]
HELLO = json.dumps({"model": "demo", "messages": CHAT}).encode()
LARGE_PRIMES = (62615533, 62615537, 99999989, 73939133)
"""llguidance compiles "multipleOf" of one of these for minutes, into gigabytes."""


def post(server, path: str = "/v1/completions", **body) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={"model": "demo", **body})


def is_error(answer: httpx.Response, status: int) -> bool:
    return answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def multiple_of(prime: int) -> dict:
    schema = {"type": "integer", "multipleOf": prime}
    return {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}


def expensive(prime: int = LARGE_PRIMES[0]) -> bytes:
    return json.dumps({"model": "demo", "messages": CHAT, "response_format": multiple_of(prime)}).encode()


# -------------------------------------------------------------------------------------------------- requests to a server


def test_schemas_that_compile_for_minutes_are_refused_and_the_next_requests_are_served(make_server):
    """Four of them ended the service: a thread cannot be stopped, and there were four threads."""
    with make_server(request_cpu_s=0.3) as running, ThreadPoolExecutor(len(LARGE_PRIMES)) as threads:
        bodies = [{"messages": CHAT, "response_format": multiple_of(prime), "max_tokens": 4} for prime in LARGE_PRIMES]
        answers = list(threads.map(lambda body: post(running, "/v1/chat/completions", **body), bodies))
        for answer in answers:
            assert is_error(answer, 400)
            assert answer.json()["error"]["code"] == "too_expensive"
        assert running.served.workers.num_killed == len(LARGE_PRIMES)
        assert post(running, "/v1/chat/completions", messages=CHAT, max_tokens=4).status_code == 200
        assert running.served.state == "ready"
        with running.client() as client:
            assert (
                f'request_workers_killed_total{{model_name="demo"}} {len(LARGE_PRIMES)}.0'
                in client.get("/metrics").text
            )


def test_what_clients_sent_who_left_is_not_read(make_server):
    """A flood of schemas went on to be compiled, one a second, when nobody waited for the answers."""
    with make_server(request_cpu_s=20.0) as running:
        body = expensive()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
        workers = running.served.workers
        clients = [socket.create_connection(("127.0.0.1", httpx.URL(running.url).port)) for _ in range(6)]
        for client in clients:
            client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        running.wait_until(lambda: workers.num_busy + workers.num_waiting == len(clients))
        assert workers.num_waiting >= len(clients) - 1
        for client in clients:
            client.close()
        running.wait_until(lambda: workers.num_waiting == 0, 15)
        assert post(running, prompt="Return", max_tokens=4).status_code == 200


def test_a_template_that_fills_the_memory_is_refused(make_server):
    template = "{{ 'a' * (messages | length * 500000000) }}"
    with make_server(template, request_memory_bytes=1 << 28, request_cpu_s=30.0) as running:
        answer = post(running, "/v1/chat/completions", messages=CHAT, max_tokens=4)
        assert is_error(answer, 400)
        assert "256 MB of memory" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [None] * 1_000_000}, "prompt.str"),
        ({"prompt": "a", "logit_bias": {f"x{i}": "a" for i in range(200_000)}}, "logit_bias"),
        ({"prompt": "a", "stop": [1] * 1_000_000}, "stop"),
        ({"prompt": list(range(100)) * 10_000}, "prompt"),
        ({"prompt": "a b " * 1_000_000}, "prompt"),
    ],
    ids=["nulls", "keys", "stops", "tokens", "text"],
)
def test_large_bodies_are_refused_with_their_first_error(make_server, body, param):
    with make_server(request_cpu_s=30.0) as running:  # the claim is not about time
        answer = post(running, **body)
        assert is_error(answer, 400)
        assert (answer.json()["error"]["param"] or "").startswith(param)
        assert len(answer.text) < 500


def test_images_are_refused_before_they_are_decoded_if_the_model_reads_none(server):
    """Forty images of 34 million pixels filled 4 GB."""
    url = "data:image/png;base64," + base64.b64encode(b"not an image").decode()
    content = [{"type": "image_url", "image_url": {"url": url}}] * 40
    answer = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert is_error(answer, 400)
    assert "does not support image input" in answer.json()["error"]["message"]


def test_bodies_in_all_are_bounded(make_server):
    with make_server(max_buffered_bytes=100_000) as running:
        answer = post(running, prompt="a" * 200_000)
        assert is_error(answer, 503)
        assert answer.headers["Retry-After"] == "1"
        running.wait_until(lambda: running.app._num_buffered == 0)  # it is counted until its answer is sent
        assert post(running, prompt="a", max_tokens=2).status_code == 200
        running.wait_until(lambda: running.app._num_buffered == 0)


def test_a_body_that_does_not_come_in_time_is_no_longer_counted(make_server):
    """A few clients that stopped in the middle of a large body would have used up the bound of all bodies for good."""
    with make_server(body_timeout_s=0.3) as running:
        url = httpx.URL(running.url)
        with socket.create_connection((url.host, url.port), timeout=30) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 5000\r\n\r\n"
            client.sendall(head.encode() + b"{" * 1000)
            assert client.recv(4096).startswith(b"HTTP/1.1 408")
        running.wait_until(lambda: running.app._num_buffered == 0)


def test_requests_are_refused_while_the_process_has_too_much_memory(make_server):
    with make_server(max_host_memory_bytes=1 << 20) as running:
        answer = post(running, prompt="a", max_tokens=2)
        assert is_error(answer, 503)
        assert answer.json()["error"]["code"] == "out_of_host_memory"


# ---------------------------------------------------------------------------------------------------------------- images


def _header_of_png(width: int, height: int) -> str:
    """A PNG of one color, which takes few bytes."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_pixels_and_images_in_all_are_bounded():
    loader, url = ImageLoader(), _header_of_png(5000, 6000)
    loader(url)
    loader(url)
    with pytest.raises(ApiError, match="64 million pixels in all"):
        loader(url)
    loader, url = ImageLoader(), _header_of_png(8, 8)
    for _ in range(32):
        loader(url)
    with pytest.raises(ApiError, match="32 images"):
        loader(url)


# -------------------------------------------------------------------------------------------------------------- the pool


@pytest.fixture(scope="module")
def reader(demo):
    model, tokenizer = demo
    return RequestReader(
        tokenizer,
        ChatTemplate(tokenizer),
        vocab_size=model.vocabulary_size,
        eos_token_ids=(0,),
        max_model_len=512,
        model_names=("demo",),
    )


def with_pool(reader, work, **options):
    """Run `work(pool)` with a pool in an event loop."""
    pool = WorkerPool(**{"num_workers": 2, "memory_bytes": 1 << 30, "max_waiting": 8, **options})
    pool.start(reader)

    async def run():
        try:
            return await work(pool)
        finally:
            pool.close()
            await asyncio.sleep(0.1)

    return asyncio.run(run())


def read(pool, data=HELLO, client="one", cpu_s=30.0):
    is_expensive = b"json_schema" in data
    return pool.run("chat", data, client=client, is_expensive=is_expensive, cpu_s=cpu_s, what="Reading")


def test_cheap_tasks_do_not_wait_for_expensive_ones(reader):
    async def work(pool):
        slow = [asyncio.ensure_future(read(pool, expensive())) for _ in range(3)]
        found = await read(pool)
        return found, [task.done() for task in slow], [task.cancel() for task in slow]

    found, done, _ = with_pool(reader, work)
    assert found.token_ids
    assert done == [False] * 3


def test_clients_are_served_in_turns(reader):
    async def work(pool):
        order = []

        async def one(client):
            with pytest.raises(ApiError):
                await read(pool, expensive(), client, cpu_s=0.1)
            order.append(client)

        await asyncio.gather(*[one("greedy") for _ in range(4)], one("other"))
        return order

    assert with_pool(reader, work).index("other") == 1


def test_a_client_has_half_of_the_queue_and_all_have_a_bounded_one(reader):
    async def work(pool):
        tasks = [asyncio.ensure_future(read(pool, expensive(), "one")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as own:
            await read(pool, expensive(), "one")
        tasks += [asyncio.ensure_future(read(pool, expensive(), "two")) for _ in range(2)]
        await asyncio.sleep(0)
        is_exhausted = pool.is_exhausted
        with pytest.raises(ApiError) as everyone:
            await read(pool, expensive(), "three")
        for task in tasks:
            task.cancel()
        return own.value, everyone.value, is_exhausted

    own, everyone, is_exhausted = with_pool(reader, work, max_waiting=4)
    assert (own.status, everyone.status, is_exhausted) == (429, 503, True)
    assert own.headers["Retry-After"] == everyone.headers["Retry-After"] == "1"


def test_the_queue_empties_when_those_who_wait_leave(reader):
    async def work(pool):
        tasks = [asyncio.ensure_future(read(pool, expensive(), str(i), cpu_s=0.2)) for i in range(8)]
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        with pytest.raises(ApiError):
            await tasks[0]
        found = await read(pool)
        return found.token_ids, pool.num_waiting

    token_ids, num_waiting = with_pool(reader, work)
    assert token_ids
    assert num_waiting == 0


def test_a_pool_whose_processes_were_killed_goes_on(reader):
    async def work(pool):
        await read(pool)
        os.kill(pool._forks._process.pid, signal.SIGKILL)
        for worker in list(pool._workers):
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ApiError) as found:  # the worker that was idle
            await read(pool)
        assert found.value.status == 503  # not the request's fault
        return await read(pool)

    assert with_pool(reader, work).token_ids


def test_a_process_that_ended_with_its_parent_is_not_looked_for_again(reader):
    """Its id may be another process's by now."""
    pool = WorkerPool(num_workers=2, memory_bytes=1 << 30, max_waiting=8)
    pool.start(reader)
    with subprocess.Popen(["sleep", "60"]) as other:
        assert pool._forks.reap(other.pid) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
    pool.close()


def test_a_grammar_is_measured_and_refused_if_it_is_large(reader):
    def body(regex):
        return json.dumps(
            {"model": "demo", "messages": CHAT, "response_format": {"type": "regex", "regex": regex}}
        ).encode()

    async def work(pool):
        with pytest.raises(ApiError, match="MB once compiled") as caught:
            await read(pool, body("((a{50}){50}){50}"))
        assert caught.value.status == 400
        return await read(pool, body("[a-z]{1,20}"))

    assert 0 < with_pool(reader, work).structured_outputs.num_bytes < 1 << 20


def test_an_idle_server_gives_memory_back_once_after_requests(monkeypatch):
    given = asyncio.Event()
    num_given = 0

    def give():
        nonlocal num_given
        num_given += 1
        given.set()

    async def work():
        served = SimpleNamespace(is_idle=False, num_read=1)
        tidying = asyncio.ensure_future(run._tidy(served))
        await asyncio.sleep(0.1)
        assert num_given == 0
        for count in (1, 2):
            served.is_idle, served.num_read = True, count
            await asyncio.wait_for(given.wait(), 60)
            given.clear()
            await asyncio.sleep(0.1)  # several turns, which give nothing
            assert num_given == count
        tidying.cancel()

    monkeypatch.setattr(run, "_TIDY_S", 0.01)
    monkeypatch.setattr(run, "give_memory_back", give)
    asyncio.run(work())


def test_closing_ends_what_runs(reader):
    async def work(pool):
        running = asyncio.ensure_future(read(pool, expensive()))
        while pool.num_busy == 0 or not pool._workers:
            await asyncio.sleep(0.01)
        processes = [worker.pid for worker in pool._workers]
        await asyncio.to_thread(pool.close)
        with pytest.raises(ApiError):
            await running
        with pytest.raises(ApiError, match="stopping"):
            await read(pool)
        return processes

    for process in with_pool(reader, work):
        assert not _is_alive(process)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_cannot_be_started_says_why():
    pool = WorkerPool(num_workers=2, memory_bytes=1 << 30, max_waiting=8)
    with pytest.raises(RuntimeError, match="AttributeError"):
        pool.start("a string, which reads nothing")
    pool.close()


# ------------------------------------------------------------------------------------------------------------ embeddings


class _SlowEmbedder:
    """Waits in its batch until it is told to go on."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.goes_on = threading.Event()

    def check(self, texts):
        pass

    def batches(self, texts):
        return [[i] for i in range(len(texts))]

    def embed_batch(self, texts):
        import numpy as np

        self.num_batches += 1
        self.goes_on.wait(30)
        return np.zeros((len(texts), 2), np.float32)


def test_embeddings_are_bounded_and_stop_when_nobody_waits_for_them():
    from hfax.errors import EngineBusyError

    async def work():
        queue, embedder = EmbeddingQueue(1), _SlowEmbedder()
        first = asyncio.ensure_future(queue.compute(embedder, [[1]] * 5))
        while embedder.num_batches == 0:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(queue.compute(embedder, [[1]]))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError):
            await queue.compute(embedder, [[1]])
        first.cancel()
        embedder.goes_on.set()
        await second
        return embedder.num_batches

    assert asyncio.run(work()) == 2


def test_a_client_that_left_is_not_waited_for(make_server):
    with make_server() as running:
        with pytest.raises(httpx.ReadTimeout), running.client() as client:
            client.post("/v1/chat/completions", content=expensive(), timeout=0.05)
        assert post(running, "/v1/chat/completions", messages=CHAT, max_tokens=2).status_code == 200
