"""Responses in the OpenAI API's format: complete, or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response

from hfax.engine.outputs import OutputDelta
from hfax.engine.sequence import TokenLogprob
from hfax.server.failures import as_api_error
from hfax.server.output_parser import OutputParser, Piece
from hfax.server.protocol import ChatRequest, CompletionRequest
from hfax.server.served import Answer
from hfax.server.token_text import TextPlaces, TokenText

Json = dict[str, Any]


class EventStream(Response):
    """A server-sent events response that closes its generator as soon as the client disconnects.

    Args:
        events: JSON objects; None sends a keep-alive comment.
    """

    def __init__(self, events: AsyncIterator[Json | None]) -> None:
        super().__init__(media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response over ASGI."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with contextlib.suppress(Left):
            await until_left(receive, self._write(send))

    async def _write(self, send: Any) -> None:
        async def say(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async with contextlib.aclosing(self._events) as events:  # pyright: ignore[reportArgumentType]
            try:
                async for event in events:
                    await say(": keep-alive\n\n" if event is None else f"data: {json.dumps(event)}\n\n")
            except Exception as error:
                await say(f"data: {json.dumps(as_api_error(error).body)}\n\n")
        await say("data: [DONE]\n\n", more=False)


class Left(Exception):
    """The client disconnected."""


async def until_left(receive: Any, work: Any) -> Any:
    """Return the result of `work`; cancel it if the client disconnects first.

    Raises:
        Left: the client disconnected.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(leave())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            return tasks[0].result()
        raise Left
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(kind: str) -> str:
    """A unique id for a response."""
    return f"{kind}-{uuid.uuid4().hex}"


def _usage_event(head: Json, answer: Answer) -> Json:
    return {**head, "choices": [], "usage": answer.usage}


# ------------------------------------------------------------------------------------------------------------- completions


class CompletionWriter:
    """Formats a response of /v1/completions.

    Args:
        body: the request.
        answer: its completions.
        request_id: the response's id.
        tokens: the texts and bytes of tokens.
        prompt_texts: each prompt as text, if the body asks for `echo`.
        were_texts: the prompts were sent as texts, not as token ids.
    """

    def __init__(
        self,
        body: CompletionRequest,
        answer: Answer,
        request_id: str,
        tokens: TokenText,
        prompt_texts: list[str],
        *,
        were_texts: bool,
    ) -> None:
        self._body, self._answer, self._texts = body, answer, tokens
        self._prompt_texts, self._were_texts = prompt_texts, were_texts
        self._head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": body.model}
        self._n = body.n or 1

    async def whole(self) -> Json:
        """The complete response."""
        async for _ in self._answer.deltas():
            pass
        choices = []
        for index, request in enumerate(self._answer.requests):
            for output in request.output.outputs:
                text, logprobs = output.text, output.logprobs
                prefix = self._prompt_texts[index] if self._body.echo else ""
                found = None
                if self._body.logprobs is not None:
                    places = TextPlaces(self._texts, len(prefix))
                    found = self._logprobs(logprobs or [], places)
                    if self._body.echo:
                        ids, scored = request.output.prompt_token_ids, request.output.prompt_logprobs or []
                        found = _joined(self._prompt_logprobs(ids, scored, prefix), found)
                choices.append(
                    {
                        "index": index * self._n + output.index,
                        "text": prefix + text,
                        "logprobs": found,
                        "finish_reason": output.finish_reason,
                        "stop_reason": output.stop_reason,
                    }
                )
        return {**self._head, "choices": choices, "usage": self._answer.usage}

    async def events(self) -> AsyncIterator[Json | None]:
        """The response as a stream of chunks."""
        echoed: set[int] = set()
        places: dict[int, TextPlaces] = {}
        async for found in self._answer.deltas():
            if found is None:
                yield None
                continue
            place, delta = found
            prefix = ""
            if self._body.echo and place not in echoed:
                echoed.add(place)
                prefix = self._prompt_texts[place // self._n]
            logprobs = None
            if self._body.logprobs is not None and delta.logprobs:
                own = places.setdefault(place, TextPlaces(self._texts))
                logprobs = self._logprobs(list(delta.logprobs), own)
            if not (prefix or delta.text or delta.finish_reason or logprobs):
                continue
            choice = {
                "index": place,
                "text": prefix + delta.text,
                "logprobs": logprobs,
                "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
                "stop_reason": delta.stop_reason,
            }
            yield {**self._head, "choices": [choice], **_null_usage(self._body)}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield _usage_event(self._head, self._answer)

    def _prompt_logprobs(self, ids: tuple[int, ...], scored: list[TokenLogprob], text: str) -> Json:
        """Of the echoed prompt; its first token has none. Special tokens that the tokenizer added are not in its text."""
        found: Json = {"tokens": [self._texts.name_of(token) for token in ids]}
        found["token_logprobs"] = [None, *(entry.logprob for entry in scored)]
        found["top_logprobs"] = [None, *(self._top(entry) for entry in scored)]
        places, offsets = TextPlaces(self._texts), []
        for token in ids:
            is_left_out = (
                self._were_texts
                and self._texts.is_special(token)
                and not text.startswith(self._texts.text_of(token), places.next_place)
            )
            offsets.append(places.add(token, is_in_text=not is_left_out))
            begins = not offsets[-1] and places.next_place
            if begins and self._texts.text_of(token).startswith(" ") and not text.startswith(" "):
                places.next_place -= 1  # SentencePiece's space before a text
        return found | {"text_offset": offsets}

    def _logprobs(self, entries: list[TokenLogprob], places: TextPlaces) -> Json:
        skips = self._body.skip_special_tokens
        return {
            "tokens": [self._texts.name_of(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [
                places.add(e.token_id, is_in_text=not (skips and self._texts.is_special(e.token_id))) for e in entries
            ],
        }

    def _top(self, entry: TokenLogprob) -> Json:
        top = {self._texts.name_of(token): value for token, value in reversed(entry.top)}
        top.setdefault(self._texts.name_of(entry.token_id), entry.logprob)
        return top


def _joined(first: Json, second: Json) -> Json:
    return {name: [*first[name], *second[name]] for name in first}


def _null_usage(body: Any) -> Json:
    """With include_usage, every chunk except the last has a null usage."""
    return {"usage": None} if body.stream_options is not None and body.stream_options.include_usage else {}


# -------------------------------------------------------------------------------------------------------------------- chat


class ChatWriter:
    """Formats a response of /v1/chat/completions.

    Args:
        body: the request.
        answer: its completions.
        request_id: the response's id.
        texts: the texts and bytes of tokens.
        make_parser: creates an output parser for one completion.
    """

    def __init__(
        self,
        body: ChatRequest,
        answer: Answer,
        request_id: str,
        texts: TokenText,
        make_parser: Callable[[], OutputParser],
    ) -> None:
        self._body, self._answer, self._texts, self._make_parser = body, answer, texts, make_parser
        self._head = {"id": request_id, "created": int(time.time()), "model": body.model}

    async def whole(self) -> Json:
        """The complete response."""
        async for _ in self._answer.deltas():
            pass
        choices = []
        for output in self._answer.requests[0].output.outputs:
            parser = self._make_parser()
            pieces = parser.feed(output.text, is_last=True)
            message = _message(pieces)
            reason = "tool_calls" if parser.num_calls and output.finish_reason == "stop" else output.finish_reason
            logprobs = None
            if self._body.logprobs:
                logprobs = {"content": self._logprobs(output.logprobs or []), "refusal": None}
            choices.append(
                {
                    "index": output.index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": reason,
                    "stop_reason": output.stop_reason,
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._answer.usage}

    async def events(self) -> AsyncIterator[Json | None]:
        """The response as a stream of chunks: the role, deltas, and the finish reason."""
        parsers = [self._make_parser() for _ in range(self._body.n or 1)]
        waiting: list[list[Json]] = [[] for _ in parsers]
        for index in range(len(parsers)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for found in self._answer.deltas():
            if found is None:
                yield None
                continue
            index, delta = found
            if self._body.logprobs:
                waiting[index] += self._logprobs(list(delta.logprobs))
            is_last = delta.finish_reason is not None
            first = parsers[index].num_calls
            for piece in parsers[index].feed(delta.text, is_last=is_last):
                logprobs = None
                if waiting[index]:
                    logprobs = {"content": waiting[index], "refusal": None}
                    waiting[index] = []
                yield self._chunk(index, _delta(piece, first), logprobs=logprobs)
                first += piece.kind == "call"
            if is_last:
                yield self._last_chunk(index, delta, parsers[index], waiting[index])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield _usage_event({**self._head, "object": "chat.completion.chunk"}, self._answer)

    def _last_chunk(self, index: int, delta: OutputDelta, parser: OutputParser, logprobs: list[Json]) -> Json:
        assert delta.finish_reason is not None
        reason = delta.finish_reason.value
        if parser.num_calls and reason == "stop":
            reason = "tool_calls"
        left = {"content": logprobs, "refusal": None} if logprobs else None
        return self._chunk(index, {}, reason, left, stop_reason=delta.stop_reason)

    def _chunk(
        self, index: int, delta: Json, reason: str | None = None, logprobs: Json | None = None, **more: Any
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **more}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **_null_usage(self._body)}

    def _logprobs(self, found: list[TokenLogprob]) -> list[Json]:
        def entry(token: int, value: float) -> Json:
            return {
                "token": self._texts.text_of(token),
                "logprob": value,
                "bytes": list(self._texts.bytes_of(token)),
            }

        return [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(token, value) for token, value in one.top]}
            for one in found
        ]


def _call(piece: Piece) -> Json:
    return {"id": new_id("call"), "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


def _delta(piece: Piece, index: int) -> Json:
    if piece.kind == "call":
        return {"tool_calls": [{"index": index, **_call(piece)}]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def _message(pieces: list[Piece]) -> Json:
    """Assemble a message from parsed pieces."""
    texts = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("content", "reasoning")}
    calls = [_call(piece) for piece in pieces if piece.kind == "call"]
    message: Json = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message
