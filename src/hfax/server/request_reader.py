"""Reads request bodies: everything that takes time or memory of the sender's choice, before the engine sees a request.

Turns the bytes of a body into token ids and model inputs: parses and validates the JSON, renders the chat template, tokenizes,
decodes images, and compiles the grammar on trial. Runs in worker processes with limits (`worker_process`), which the server may
kill at any time. Imports neither jax nor hfax's models.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from hfax.engine.grammar import GrammarCompiler
from hfax.engine.sampling_params import StructuredOutputsParams
from hfax.server.chat import ChatTemplate, structured_outputs_of
from hfax.server.failures import ApiError, unknown_model
from hfax.server.images import ImageLoader
from hfax.server.memory import allocated_bytes
from hfax.server.protocol import (
    MAX_TEXTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

Body = TypeVar("Body", bound=BaseModel)

_MAX_GRAMMAR_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadCompletion:
    """A body of /v1/completions.

    Args:
        body: the validated body, without its prompts.
        prompts: token ids of each prompt.
        texts: each prompt as text, if the body asks for `echo`; else empty.
        were_texts: the prompts were sent as texts, not as token ids.
        structured_outputs: constraint on the completions.
    """

    body: CompletionRequest
    prompts: list[list[int]]
    texts: list[str]
    were_texts: bool
    structured_outputs: StructuredOutputsParams | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadChat:
    """A body of /v1/chat/completions.

    Args:
        body: the validated body, without its messages.
        token_ids: the prompt.
        inputs: further model inputs, such as pixel values, as numpy arrays.
        ends_in_reasoning: the prompt ends with <think>, so the completion starts with reasoning.
        structured_outputs: constraint on the completion.
    """

    body: ChatRequest
    token_ids: list[int]
    inputs: dict[str, Any]
    ends_in_reasoning: bool
    structured_outputs: StructuredOutputsParams | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadEmbedding:
    """A body of /v1/embeddings: the validated body without its inputs, and their token ids."""

    body: EmbeddingRequest
    inputs: list[list[int]]


class RequestReader:
    """Reads bodies for one model. Picklable: worker processes get a copy.

    Args:
        tokenizer: a transformers tokenizer.
        template: the chat template.
        vocab_size: size of the logits' last axis.
        eos_token_ids: tokens that end a sequence.
        max_model_len: maximum number of tokens of a prompt; None: not known.
        model_names: model names accepted in requests.
        image_hosts: host names that images may be fetched from.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int | None,
        model_names: tuple[str, ...],
        image_hosts: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._grammar_of = vocab_size, eos_token_ids
        self._max_model_len, self._model_names, self._image_hosts = max_model_len, model_names, image_hosts
        self._grammars: GrammarCompiler | None = None
        self._longest_token = 0

    def warm_up(self) -> None:
        """Compute what all requests share; a process forked afterwards has it."""
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._grammars = GrammarCompiler(self._tokenizer, *self._grammar_of)
        self._grammars.warm_up()

    def completion(self, data: bytes) -> ReadCompletion:
        """Read a body of /v1/completions.

        Raises:
            ApiError: 400, the body is invalid; 404, it names another model.
        """
        body = self._parse(CompletionRequest, data)
        given = _prompts_of(body.prompt)
        if len(given) * (body.n or 1) > MAX_TEXTS:
            raise ApiError(400, f"{len(given)} prompts with n={body.n or 1} exceed {MAX_TEXTS} completions.", param="n")
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "stream does not support echo with logprobs.", param="stream")
        prompts = [self._encode(prompt, "prompt") for prompt in given]
        texts = [p if isinstance(p, str) else self._tokenizer.decode(p) for p in given] if body.echo else []
        wanted = None if body.response_format is None else structured_outputs_of(body.response_format)
        wanted = self._tried(wanted)
        return ReadCompletion(
            body=body.model_copy(update={"prompt": "", "response_format": None}),
            prompts=prompts,
            texts=texts,
            were_texts=isinstance(given[0], str),
            structured_outputs=wanted,
        )

    def chat(self, data: bytes) -> ReadChat:
        """Read a body of /v1/chat/completions.

        Raises:
            ApiError: 400, the body is invalid, or the template rejects the conversation; 404, it names another model.
        """
        body = self._parse(ChatRequest, data)
        prompt = self._template.render(body, ImageLoader(self._image_hosts), self._check_length)
        wanted = self._tried(self._template.structured_outputs(body, prompt))
        return ReadChat(
            body=body.model_copy(update={"messages": [], "response_format": None}),
            token_ids=prompt.token_ids,
            inputs=prompt.inputs,
            ends_in_reasoning=prompt.ends_in_reasoning,
            structured_outputs=wanted,
        )

    def embedding(self, data: bytes) -> ReadEmbedding:
        """Read a body of /v1/embeddings.

        Raises:
            ApiError: 400, the body is invalid, or an input is empty or too long; 404, it names another model.
        """
        body = self._parse(EmbeddingRequest, data)
        inputs = [self._encode(text, "input") for text in _prompts_of(body.input)]
        if not all(inputs):
            raise ApiError(400, "An input is empty.", param="input")
        return ReadEmbedding(body=body.model_copy(update={"input": ""}), inputs=inputs)

    def tokenize(self, data: bytes) -> bytes:
        """Answer a body of /tokenize, as JSON.

        Raises:
            ApiError: 400, the body is invalid; 404, it names another model.
        """
        body = self._parse(TokenizeRequest, data)
        if body.messages is not None:
            images = ImageLoader(self._image_hosts)
            ids = self._template.render_messages(body.messages, images, lambda text: None).token_ids
        else:
            ids = list(self._tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])
        return json.dumps({"tokens": ids, "count": len(ids), "max_model_len": self._max_model_len}).encode()

    def detokenize(self, data: bytes) -> bytes:
        """Answer a body of /detokenize, as JSON.

        Raises:
            ApiError: 400, the body is invalid, or a token is outside the vocabulary; 404, it names another model.
        """
        body = self._parse(DetokenizeRequest, data)
        size = len(self._tokenizer)
        if bad := [token for token in body.tokens if token >= size]:
            raise ApiError(400, f"Token id {bad[0]} is outside the vocabulary of size {size}.", param="tokens")
        return json.dumps({"prompt": self._tokenizer.decode(body.tokens)}).encode()

    def _parse(self, schema: type[Body], data: bytes) -> Body:
        """Parse and validate; stops at the first error of a list."""
        try:
            found = pydantic_core.from_json(data, allow_inf_nan=False)  # its depth is limited
        except ValueError:
            raise ApiError(400, "The body is not valid JSON, or is nested too deeply.", code="invalid_json") from None
        if not isinstance(found, dict):
            raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
        try:
            body = schema.model_validate(found)
        except ValidationError as error:
            raise _first_error(error) from None
        name = getattr(body, "model", None)
        if name is not None and name not in self._model_names:
            raise unknown_model(name, self._model_names)
        return body

    def _encode(self, prompt: str | list[int], param: str) -> list[int]:
        if not isinstance(prompt, str):
            if self._max_model_len is not None and len(prompt) > self._max_model_len:
                raise self._too_long(f"{len(prompt)} tokens", param)
            return prompt
        self._check_length(prompt, param)
        return list(self._tokenizer(prompt)["input_ids"])

    def _check_length(self, text: str, param: str = "messages") -> None:
        """Refuse a text whose tokens cannot fit, however it is tokenized."""
        if self._max_model_len is not None and len(text) > self._max_model_len * self._longest_token:
            raise self._too_long(f"{len(text)} characters", param)

    def _too_long(self, size: str, param: str) -> ApiError:
        limit = f"{self._max_model_len} tokens, including at least one new token"
        return ApiError(400, f"The prompt has {size}; the limit is {limit}. Shorten the prompt.", param=param)

    def _tried(self, wanted: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Compile a grammar and its first mask within this process's limits, and measure it; what was compiled is dropped."""
        if wanted is None:
            return None
        assert self._grammars is not None
        before = allocated_bytes()
        compiled = self._grammars.try_out(wanted)
        num_bytes = max(allocated_bytes() - before, 0)
        del compiled
        if num_bytes > _MAX_GRAMMAR_BYTES:
            raise ApiError(
                400,
                f"The schema, regex or grammar needs {num_bytes >> 20} MB once compiled; simplify it.",
                param="response_format",
            )
        return dataclasses.replace(wanted, num_bytes=num_bytes)


def _prompts_of(given: Any) -> list[Any]:
    """Normalize a field to a list of prompts, each a text or a list of token ids."""
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else list(given)


def _first_error(error: ValidationError) -> ApiError:
    """Report the first validation error, without echoing the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [str(part) for part in first["loc"]]
    name = ".".join(part for part in place if part.isidentifier() or part.isdigit()) or None
    return ApiError(400, f"{name or 'The body'}: {first['msg']}", param=name)
