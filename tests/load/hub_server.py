"""A Hub on loopback: the routes that huggingface_hub uses to look a model up, to download its files and to upload others, over
real HTTP.

Behaves as huggingface.co does where it matters here: ETag and commit headers, ranges, error codes in `X-Error-Code`;
redirects are left out. What it can be told to do: gate a repository, break connections, fail.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_granted"


@dataclasses.dataclass(kw_only=True)
class Repository:
    """One model: file name to content, at one commit."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    is_gated: bool = False
    is_private: bool = False


@dataclasses.dataclass(kw_only=True)
class Hub:
    """The server's state, and the requests it saw as (method, path, Range header or None)."""

    repositories: dict[str, Repository]
    url: str = ""
    status: int = 200
    breaks_after: int | None = None
    """Break the connection after so many bytes of a weight file, once for each download."""
    always_breaks: bool = False
    requests: list[tuple[str, str, str | None]] = dataclasses.field(default_factory=list)

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serve_hub(**repositories: Repository) -> Iterator[Hub]:
    """Serve repositories, given as owner__name=Repository(...)."""
    hub = Hub(repositories={name.replace("__", "/"): repository for name, repository in repositories.items()})

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            answer(self, hub)

        def do_GET(self) -> None:
            answer(self, hub)

        def do_POST(self) -> None:
            take(self, hub)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def answer(handler: http.server.BaseHTTPRequestHandler, hub: Hub) -> None:
    path = unquote(urlsplit(handler.path).path)
    if path.startswith("/api/models/") or "/resolve/" in path:  # huggingface_hub asks for other things by the way
        hub.requests.append((handler.command, path, handler.headers.get("Range")))
    if hub.status != 200:
        return send(handler, hub.status)
    parts = path.strip("/").split("/")
    is_api = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if is_api else parts[:2])
    repository = hub.repositories.get(name)
    authorization = handler.headers.get("Authorization")
    if authorization and authorization != f"Bearer {TOKEN}" and authorization != "Bearer hf_other":
        return send(handler, 401, message="Invalid credentials in Authorization header")
    granted = authorization == f"Bearer {TOKEN}"
    if repository is None or (repository.is_private and not granted):
        return send(handler, 404 if authorization else 401, code="RepoNotFound", message="Repository not found")
    revision = (parts[5] if len(parts) > 5 else "main") if is_api else parts[3]
    if revision not in ("main", repository.commit):
        return send(handler, 404, code="RevisionNotFound", message="Invalid rev id")
    if is_api and len(parts) > 4 and parts[4] == "tree":
        return send(handler, 200, tree_of(repository))
    if is_api:
        return send(handler, 200, model_info(name, repository))
    if repository.is_gated and not granted:
        return send(handler, 403 if authorization else 401, code="GatedRepo", message="Access is restricted")
    return send_file(handler, hub, repository, "/".join(parts[4:]))


def take(handler: http.server.BaseHTTPRequestHandler, hub: Hub) -> None:
    """What an upload asks: to make the repository, how to send each file (inside of the commit), and the commit."""
    path = unquote(urlsplit(handler.path).path)
    body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
        return send(handler, 401, message="Invalid credentials in Authorization header")
    if path == "/api/repos/create":
        given = json.loads(body)
        name = f"{given['organization']}/{given['name']}"
        hub.repositories.setdefault(name, Repository(files={}, is_private=given.get("visibility") == "private"))
        return send(handler, 200, json.dumps({"url": f"{hub.url}/{name}", "name": name, "id": "1"}).encode())
    name = "/".join(path.split("/")[3:5])
    if "/preupload/" in path:
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        return send(handler, 200, json.dumps({"files": modes}).encode())
    for line in map(json.loads, body.splitlines()):
        if line["key"] == "file":
            hub.repositories[name].files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    made = {"commitUrl": f"{hub.url}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40, "success": True}
    return send(handler, 200, json.dumps(made).encode())


def model_info(name: str, repository: Repository) -> bytes:
    siblings = [{"rfilename": file, "size": len(content)} for file, content in repository.files.items()]
    return json.dumps({"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}).encode()


def tree_of(repository: Repository) -> bytes:
    oids = {file: hashlib.sha1(content).hexdigest() for file, content in repository.files.items()}
    files = repository.files.items()
    return json.dumps(
        [{"type": "file", "oid": oids[file], "size": len(content), "path": file} for file, content in files]
    ).encode()


def send_file(handler: http.server.BaseHTTPRequestHandler, hub: Hub, repository: Repository, file: str) -> None:
    headers = {"X-Repo-Commit": repository.commit}
    if file not in repository.files:
        return send(handler, 404, code="EntryNotFound", headers=headers)
    content = repository.files[file]
    headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
    start = 0
    if wanted := handler.headers.get("Range"):
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    is_weights = file.endswith((".safetensors", ".bin"))
    if handler.command == "GET" and is_weights and hub.breaks_after is not None and (hub.always_breaks or start == 0):
        send(handler, 206 if start else 200, content[start : start + hub.breaks_after], len(content) - start, headers)
        handler.wfile.flush()
        handler.close_connection = True
        return None
    return send(handler, 206 if start else 200, content[start:], headers=headers)


def send(
    handler: http.server.BaseHTTPRequestHandler,
    status: int,
    body: bytes = b"",
    length: int | None = None,
    headers: dict[str, str] | None = None,
    code: str | None = None,
    message: str | None = None,
) -> None:
    handler.send_response(status)
    extra = {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": str(length or len(body))}
    for key, value in {**(headers or {}), **extra}.items():
        if value is not None:
            handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
