"""The server's routes."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from hfax import __version__
from hfax.server.chat import structured_outputs_of
from hfax.server.failures import ApiError, as_api_error
from hfax.server.guard import Guard
from hfax.server.images import load_image
from hfax.server.protocol import (
    MAX_TEXTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from hfax.server.responses import ChatWriter, CompletionWriter, EventStream, Left, new_id, until_left
from hfax.server.served import Answer, Served

_ERROR = {
    "description": "An error",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 408, 413, 429, 431, 500, 503), _ERROR)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}}
}


def make_app(served: Served) -> Guard:
    """Build the server's ASGI application."""
    app = FastAPI(title="hfax", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS)
    app.state.served = served

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _json_error(_validation_error(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return _json_error(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return _json_error(as_api_error(error))

    @app.exception_handler(ApiError)
    async def failed(request: Request, error: ApiError) -> JSONResponse:
        return _json_error(error)

    _add_texts(app, served)
    _add_tokens(app, served)
    _add_state(app, served)
    paths = {getattr(route, "path", "") for route in app.routes}

    def count(method: str, path: str, status: int) -> None:
        known = path if path in paths else "other"
        served.metrics.answered(method if method in ("GET", "POST") else "other", known, status)

    guard = Guard(app, served.settings, count)
    guard.routes = app.routes  # type: ignore[attr-defined]
    return guard


def _add_texts(app: FastAPI, served: Served) -> None:
    @app.post("/v1/completions", responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Complete one or more prompts."""
        loaded, name = _begin(served, request, body.model, body.user), new_id("cmpl")
        engine = served.require_engine()
        prompts = _prompts(body.prompt)
        if len(prompts) * (body.n or 1) > MAX_TEXTS:
            raise ApiError(
                400, f"{len(prompts)} prompts with n={body.n or 1} exceed {MAX_TEXTS} completions.", param="n"
            )
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "stream does not support echo with logprobs.", param="stream")
        params = served.sampling_params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=(body.logprobs or 0)
            if body.echo and (body.logprobs is not None or body.max_tokens == 0)
            else None,
            structured_outputs=None if body.response_format is None else structured_outputs_of(body.response_format),
        )
        prepared = await served.in_thread(lambda: [engine.prepare(p, params) for p in prompts], what="Tokenization")
        request.state.request_id = name
        answer = Answer(served, prepared, request_id=name, priority=body.priority, cache_salt=request.state.key)
        writer = CompletionWriter(body, answer, name, loaded.token_text, prompts)
        return await _respond(request, writer, bool(body.stream), answer)

    @app.post("/v1/chat/completions", responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Any:
        """Generate the next message of a conversation."""
        loaded, name = _begin(served, request, body.model, body.user), new_id("chatcmpl")
        engine, template = served.require_engine(), loaded.template
        prompt = await served.in_thread(template.render, body, _fetch(served), what="Rendering the chat template")
        most = body.max_completion_tokens or body.max_tokens or loaded.max_new_tokens
        if body.max_completion_tokens is None and body.max_tokens is None and most is not None:
            most = min(most, max(engine.limits.max_model_len - len(prompt.token_ids), 1))
        more: dict[str, Any] = {}
        if template.keeps_special_tokens(body):
            more["skip_special_tokens"] = False
        params = served.sampling_params(
            body,
            max_tokens=most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=template.structured_outputs(body, prompt),
            **more,
        )
        prepared = await served.in_thread(
            lambda: engine.prepare(prompt.token_ids, params, inputs=prompt.inputs), what="Compiling the grammar"
        )
        request.state.request_id = name
        answer = Answer(
            served,
            [prepared],
            request_id=name,
            priority=body.priority,
            cache_salt=request.state.key,
        )
        writer = ChatWriter(body, answer, name, loaded.token_text, lambda: template.parser(body, prompt))
        return await _respond(request, writer, bool(body.stream), answer)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """Compute embeddings for one or more inputs."""
        loaded = _begin(served, request, body.model, body.user)
        if loaded.embedder is None:
            raise ApiError(400, "The model generates text and does not support embeddings.", param="model")
        embedder = loaded.embedder
        texts = _prompts(body.input)

        def ids_of(text: str | list[int]) -> list[int]:
            ids = list(loaded.tokenizer(text)["input_ids"]) if isinstance(text, str) else text
            if not ids:
                raise ApiError(400, "An input is empty.", param="input")
            return ids

        ids = await served.in_thread(lambda: [ids_of(t) for t in texts], what="Tokenization")
        vectors = await _in_background(embedder.embed, ids)
        data = [
            {"object": "embedding", "index": i, "embedding": _vector(v, body.encoding_format)}
            for i, v in enumerate(vectors)
        ]
        count = sum(len(i) for i in ids)
        return {
            "object": "list",
            "model": body.model,
            "data": data,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }


def _add_tokens(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Tokenize a text or a conversation."""
        loaded = _begin(served, request, body.model, None)
        if body.messages is not None:
            prompt = await served.in_thread(
                loaded.template.render_messages, body.messages, _fetch(served), what="Rendering the chat template"
            )
            ids = prompt.token_ids
        else:

            def encode() -> list[int]:
                return list(loaded.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])

            ids = await served.in_thread(encode, what="Tokenization")
        longest = loaded.engine.limits.max_model_len if loaded.engine is not None else None
        return {"tokens": ids, "count": len(ids), "max_model_len": longest}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """Decode token ids to text."""
        loaded = _begin(served, request, body.model, None)
        size = len(loaded.tokenizer)
        if bad := [token for token in body.tokens if token >= size]:
            raise ApiError(400, f"Token id {bad[0]} is outside the vocabulary of size {size}.", param="tokens")
        return {"prompt": await served.in_thread(lambda: loaded.tokenizer.decode(body.tokens), what="Detokenization")}


def _add_state(app: FastAPI, served: Served) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Health of the server: 503 while the model loads, or if the engine hangs or is dead."""
        return JSONResponse({"status": served.state}, status_code=200 if served.state in ("ready", "stopping") else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Readiness: 503 unless the server accepts requests."""
        return JSONResponse({"status": served.state}, status_code=200 if served.state == "ready" else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model, once it is ready."""
        return {"object": "list", "data": [_model(served, name) for name in served.settings.served_model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Look up the served model by name."""
        served.require_name(name)
        return _model(served, name)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

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


def _begin(served: Served, request: Request, model: str | None, user: str | None) -> Any:
    """Return the loaded model; raises `ApiError` if it is not ready or `model` is not its name."""
    loaded = served.loaded
    served.require_name(model)
    if user is not None:
        request.state.user = user[:128]
    return loaded


async def _respond(request: Request, writer: Any, is_stream: bool, answer: Answer) -> Any:
    if is_stream:
        return EventStream(writer.events())
    try:
        return JSONResponse(await until_left(request.receive, writer.whole()))
    except Left:
        return Response(status_code=499)
    except ApiError:
        raise
    except Exception as error:
        raise as_api_error(error) from error
    finally:
        answer.close()


async def _in_background(function: Any, *args: Any) -> Any:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(function, *args)


def _fetch(served: Served) -> Callable[[str], Any]:
    """Return a function that loads an image URL, if the server's settings allow it."""
    return lambda url: load_image(url, served.settings.image_hosts)


def _prompts(given: Any) -> list[Any]:
    """Normalize a field to a list of prompts, each a text or a list of token ids."""
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else list(given)


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


def _validation_error(error: RequestValidationError) -> ApiError:
    """Report the first validation error, without echoing the input."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    name = ".".join(part for part in place if part.isidentifier() or part.isdigit()) or None
    return ApiError(400, f"{name or 'The body'}: {first['msg']}", param=name)
