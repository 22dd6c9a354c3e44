"""The load generator against a real server."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from hfax.bench import serving
from hfax.cli.app import run
from hfax.errors import HfaxError, InvalidInputError

ASKED: list[dict] = []


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams as many words as it is asked for; every fourth request fails."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "words"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append(body)
        if len(ASKED) % 4 == 0:
            self.answer(500, "{}")
            return
        events = [{"choices": [{"text": "word"}], "usage": None} for _ in range(body["max_tokens"])]
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.answer(200, "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url():
    ASKED.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_is_sent_and_what_is_counted(url, tmp_path):
    load = serving.Load(
        url=url,
        num_requests=12,
        concurrency=1,
        prompt_tokens=serving.Range.read("", "3:9"),
        output_tokens=serving.Range.read("", "2:5"),
        shared_tokens=4,
        num_groups=2,
    )
    report = serving.run_load(load)
    assert (report["requests"], report["failed"], report["errors"]) == (12, 3, {"status 500": 3})
    assert all(7 <= len(body["prompt"]) <= 13 and 2 <= body["max_tokens"] <= 5 and body["ignore_eos"] for body in ASKED)
    assert len({tuple(body["prompt"][:4]) for body in ASKED}) == 2
    good = [body for index, body in enumerate(ASKED, 1) if index % 4]
    assert report["output_tokens"] == sum(body["max_tokens"] for body in good)
    assert report["output_tokens_per_second"] == pytest.approx(report["output_tokens"] / report["seconds"])
    assert 0 < report["time_to_first_token"]["p50"] <= report["end_to_end"]["max"]
    first = [body["prompt"] for body in ASKED]
    ASKED.clear()
    serving.run_load(load)
    assert [body["prompt"] for body in ASKED] == first
    serving.plot([report, report], tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"


def test_poisson_arrivals_take_their_time(url):
    report = serving.run_load(serving.Load(url=url, num_requests=10, rate=50.0))
    assert report["seconds"] > 0.05


def test_nobody_there_is_an_error():
    with pytest.raises(HfaxError, match="Could not query the model name"):
        serving.run_load(serving.Load(url="http://127.0.0.1:9"))


def test_the_command_fails_if_every_request_did(url, capsys):
    """It exited with 0 and a table without a figure."""
    command = ["bench", "serve", "--url", url, "--num-requests", "1"]
    assert run(command) == 0
    ASKED.extend([{}] * 2)  # the next is the fourth
    assert run(command) == 1
    assert "1 failed: status 500" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "0", "9:3", "a:b", "1:2:3"])
def test_bad_ranges(text):
    with pytest.raises(InvalidInputError, match="LOW:HIGH"):
        serving.Range.read("--prompt-tokens", text)
