"""Request schemas.

Every accepted field takes effect; unknown fields and unsupported values are errors. OpenAI fields without a counterpart here are
accepted only with their no-op value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from hfax.engine.sampling_params import MAX_BIASES, MAX_LOGPROBS, MAX_STOPS

MAX_TEXTS = 64
"""Maximum completions per request: prompts times `n`."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]


def _few(most: int) -> BeforeValidator:
    """Check the number of a dict's items before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} items are allowed")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """A model that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    """Options of streamed responses."""

    include_usage: StrictBool = False


class Sampling(Strict):
    """Sampling options; None selects the model's default."""

    model: StrictStr
    n: Annotated[StrictInt, Field(ge=1, le=MAX_TEXTS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=1 << 24)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), _few(MAX_BIASES)]
        | None
    ) = None
    seed: Seed | None = None
    stop: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[Annotated[StrictInt, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True, max_length=MAX_STOPS)]
        | None
    ) = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    priority: Annotated[StrictInt, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    """Recorded in the access log."""

    @model_validator(mode="after")
    def _check_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        return self


class JsonSchema(Strict):
    """A named JSON schema."""

    name: StrictStr
    description: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """Required format of the completion."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: StrictStr | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema") or (self.regex is not None) != (
            self.type == "regex"
        ):
            raise ValueError("json_schema requires type json_schema, and regex requires type regex")
        return self


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: (
        StrictStr
        | Annotated[list[StrictInt], Field(fail_fast=True, min_length=1)]
        | Annotated[list[StrictStr], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
        | Annotated[
            list[Annotated[list[StrictInt], Field(min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS),
        ]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 31)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    suffix: None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_TEXTS)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 requires echo")
        if self.max_tokens == 0 and self.stream:
            raise ValueError("max_tokens=0 cannot be combined with stream")
        return self


class ImageUrl(Strict):
    """An image's location: a data: URL, or an https: URL on an allowed host."""

    url: StrictStr
    detail: Literal["auto"] | None = None


class ContentPart(Strict):
    """A part of a message."""

    type: Literal["text", "image_url"]
    text: StrictStr | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check(self) -> ContentPart:
        if (self.type == "text") != (self.text is not None) or (self.type == "image_url") != (
            self.image_url is not None
        ):
            raise ValueError("type text requires the field text, type image_url the field image_url")
        return self


class FunctionCall(Strict):
    """A function's name and its arguments, as JSON."""

    name: StrictStr
    arguments: StrictStr


class ToolCall(Strict):
    """A tool call made by the model."""

    id: StrictStr
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[ContentPart], Field(fail_fast=True, min_length=1, max_length=256)] | None = None
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """OpenAI's clients send an answer back with these fields, empty."""

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except in assistant messages with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls requires role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id is required with role tool, and not allowed with other roles")
        return self


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """A function by name."""

    name: StrictStr


class NamedTool(Strict):
    """A tool by name."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=2048)]
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    """False: at most one call is returned."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    """For chat templates that have an option of this name; "none" also where one can switch reasoning off."""
    chat_template_kwargs: (
        Annotated[
            dict[str, StrictBool | StrictInt | Annotated[StrictStr, Field(max_length=256)] | None], Field(max_length=16)
        ]
        | None
    ) = None
    add_generation_prompt: Literal[True] = True
    store: Literal[False] | None = None
    metadata: (
        Annotated[
            dict[Annotated[StrictStr, Field(max_length=64)], Annotated[StrictStr, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    """Labels of stored answers; none is stored."""
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; pass only max_completion_tokens")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice requires tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or []]
            if self.tool_choice.function.name not in names:
                raise ValueError("tool_choice names a function that is not in tools")
        if self.tools and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format and tools cannot be combined")
        return self


class EmbeddingRequest(Strict):
    """Body of /v1/embeddings."""

    model: StrictStr
    input: (
        StrictStr
        | Annotated[list[StrictInt], Field(fail_fast=True, min_length=1)]
        | Annotated[list[StrictStr], Field(fail_fast=True, min_length=1, max_length=2048)]
        | Annotated[
            list[Annotated[list[StrictInt], Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=2048)
        ]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: StrictStr | None = None


class TokenizeRequest(Strict):
    """Body of /tokenize: a prompt, or messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=2048)] | None = None
    add_special_tokens: StrictBool = True

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("pass either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True, max_length=1 << 20)]
