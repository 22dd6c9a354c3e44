"""The server's routes."""

from __future__ import annotations

import asyncio
import base64
import importlib.resources
import json
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from hfax import __version__
from hfax.server.failures import ApiError, as_api_error
from hfax.server.guard import Guard
from hfax.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from hfax.server.request_reader import ReadChat, ReadCompletion, ReadEmbedding
from hfax.server.responses import ChatWriter, CompletionWriter, EventStream, Left, new_id, until_left
from hfax.server.served import Answer, Served

_ERROR = {
    "description": "An error",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 408, 413, 429, 431, 500, 503), _ERROR)
_ALIVE = ("ready", "degraded", "stopping")
_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}}
}


def make_app(served: Served) -> Guard:
    """Build the server's ASGI application."""
    app = FastAPI(title="hfax", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS)
    app.state.served = served

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return _json_error(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return _json_error(as_api_error(error))

    @app.exception_handler(ApiError)
    async def failed(request: Request, error: ApiError) -> JSONResponse:
        return _json_error(error)

    @app.exception_handler(Left)
    async def left(request: Request, error: Left) -> Response:
        return Response(status_code=499)  # for the log: nobody reads it

    _add_texts(app, served)
    _add_tokens(app, served)
    _add_health(app, served)
    _add_state(app, served)
    _describe_bodies(app)
    paths = {getattr(route, "path", "") for route in app.routes}

    def count(method: str, path: str, status: int) -> None:
        known = path if path in paths else "other"
        served.metrics.answered(method if method in ("GET", "POST") else "other", known, status)

    guard = Guard(app, served.settings, count)
    guard.routes = app.routes  # type: ignore[attr-defined]
    return guard


def _add_texts(app: FastAPI, served: Served) -> None:
    @app.post("/v1/completions", responses=_STREAM, openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Any:
        """Complete one or more prompts."""
        read: ReadCompletion = await _read(served, request, "completion")
        body, loaded, name = read.body, served.loaded, new_id("cmpl")
        engine = served.require_engine()
        params = served.sampling_params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=(body.logprobs or 0)
            if body.echo and (body.logprobs is not None or body.max_tokens == 0)
            else None,
            structured_outputs=read.structured_outputs,
        )
        prepared = await asyncio.to_thread(lambda: [engine.prepare(p, params) for p in read.prompts])
        request.state.request_id = name
        answer = Answer(
            served,
            prepared,
            request_id=name,
            priority=body.priority,
            cache_salt=request.state.key,
            client=_client(request),
        )
        writer = CompletionWriter(body, answer, name, loaded.token_text, read.texts, were_texts=read.were_texts)
        return await _respond(request, writer, bool(body.stream), answer)

    @app.post("/v1/chat/completions", responses=_STREAM, openapi_extra=_takes(ChatRequest))
    async def chat(request: Request) -> Any:
        """Generate the next message of a conversation."""
        read: ReadChat = await _read(served, request, "chat")
        body, loaded, name = read.body, served.loaded, new_id("chatcmpl")
        engine, template = served.require_engine(), loaded.template
        most = body.max_completion_tokens or body.max_tokens or loaded.max_new_tokens
        if body.max_completion_tokens is None and body.max_tokens is None and most is not None:
            most = min(most, max(engine.limits.max_model_len - len(read.token_ids), 1))
        more: dict[str, Any] = {}
        if template.keeps_special_tokens(body):
            more["skip_special_tokens"] = False
        params = served.sampling_params(
            body,
            max_tokens=most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=read.structured_outputs,
            **more,
        )
        prepared = await asyncio.to_thread(engine.prepare, read.token_ids, params, inputs=read.inputs)
        request.state.request_id = name
        answer = Answer(
            served,
            [prepared],
            request_id=name,
            priority=body.priority,
            cache_salt=request.state.key,
            client=_client(request),
        )
        writer = ChatWriter(
            body,
            answer,
            name,
            loaded.token_text,
            lambda: template.parser(body, ends_in_reasoning=read.ends_in_reasoning),
        )
        return await _respond(request, writer, bool(body.stream), answer)

    @app.post("/v1/embeddings", openapi_extra=_takes(EmbeddingRequest))
    async def embeddings(request: Request) -> Any:
        """Compute embeddings for one or more inputs."""
        read: ReadEmbedding = await _read(served, request, "embedding")
        embedder = served.loaded.embedder
        if embedder is None:
            raise ApiError(400, "The model generates text and does not support embeddings.", param="model")
        vectors = await until_left(request.receive, served.embeddings.compute(embedder, read.inputs))
        return Response(await asyncio.to_thread(_embeddings_json, read, vectors), media_type="application/json")


def _add_tokens(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Tokenize a text or a conversation."""
        return Response(await _read(served, request, "tokenize"), media_type="application/json")

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Decode token ids to text."""
        return Response(await _read(served, request, "detokenize"), media_type="application/json")


def make_health_app(served: Served) -> FastAPI:
    """Build the application of `--health-port`."""
    app = FastAPI(title="hfax", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_health(app, served)
    return app


def _add_health(app: FastAPI, served: Served) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Health of the server: 503 while the model loads (and how far that is), or if the engine hangs or is dead. "degraded": too
        many wait."""
        found = served.health()
        return JSONResponse(found, status_code=200 if found["status"] in _ALIVE else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Readiness: 503 unless the server accepts requests."""
        found = served.health()
        return JSONResponse(found, status_code=200 if found["status"] == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_state(app: FastAPI, served: Served) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model, once it is ready."""
        return {"object": "list", "data": [_model(served, name) for name in served.settings.served_model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Look up the served model by name."""
        served.require_name(name)
        return _model(served, name)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of hfax."""
        return {"version": __version__}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        text = importlib.resources.files("hfax.server").joinpath("page.html").read_text()
        return HTMLResponse(
            text,
            headers={
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            },
        )


def _takes(schema: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a route's body."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the schemas of bodies to the OpenAPI description; FastAPI does not see them, since it does not read bodies."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = describe()
            _, definitions = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
            )
            found.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


async def _read(served: Served, request: Request, kind: str) -> Any:
    """Read the body in a worker process.

    Raises:
        ApiError: the body is invalid, or the server does not take it now.
        Left: the client disconnected; the body is not read then.
    """
    data = await request.body()
    read = await until_left(request.receive, served.read(kind, data, _client(request)))
    if (user := getattr(getattr(read, "body", None), "user", None)) is not None:
        request.state.user = user[:128]
    return read


async def _respond(request: Request, writer: Any, is_stream: bool, answer: Answer) -> Any:
    if is_stream:
        return EventStream(writer.events())
    try:
        return JSONResponse(await until_left(request.receive, writer.whole()))
    except (ApiError, Left):
        raise
    except Exception as error:
        raise as_api_error(error) from error
    finally:
        answer.close()


def _client(request: Request) -> str:
    """Whose request it is: the API key's, else the address's; clients are served in turns."""
    return request.state.key or (request.client.host if request.client is not None else "")


def _embeddings_json(read: ReadEmbedding, vectors: np.ndarray) -> bytes:
    count = sum(map(len, read.inputs))
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(v, read.body.encoding_format)}
        for i, v in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json.dumps({"object": "list", "model": read.body.model, "data": data, "usage": usage}).encode()


def _vector(vector: np.ndarray, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(float).tolist()


def _model(served: Served, name: str) -> dict[str, Any]:
    loaded = served.loaded
    longest = (
        loaded.engine.limits.max_model_len
        if loaded.engine is not None
        else loaded.embedder and loaded.embedder.max_tokens
    )
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "hfax",
        "root": served.settings.model,
        "max_model_len": longest,
    }


def _json_error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)
