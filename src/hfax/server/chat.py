"""Renders messages to a prompt with the model's chat template; handles images, tool calls and structured outputs.

Templates come with the model, never with a request, and run in transformers' sandbox. Template kwargs in requests are limited in
size. Rendering runs in a worker process, whose processor time and memory are limited (`workers`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jinja2

from hfax.engine.grammar import COMPACT
from hfax.engine.sampling_params import StructuredOutputsParams
from hfax.server.failures import ApiError
from hfax.server.output_parser import END_OF_REASONING, OutputParser, ToolFormat, has_reasoning, tool_format_of
from hfax.server.protocol import ChatRequest, Message, NamedTool, ResponseFormat
from hfax.server.template_options import template_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A tokenized conversation, ready for the engine.

    Args:
        token_ids: the prompt's token ids.
        inputs: further model inputs, such as pixel values.
        ends_in_reasoning: the prompt ends with <think>, so the completion starts with reasoning.
    """

    token_ids: list[int]
    inputs: dict[str, Any]
    ends_in_reasoning: bool


class ChatTemplate:
    """A model's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        processor: a transformers processor for models with image input; None for others.
        template: a chat template that replaces the tokenizer's.
    """

    def __init__(self, tokenizer: Any, processor: Any = None, template: str | None = None) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        own = template or getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
        self._given = template
        self.text: str | None = own if isinstance(own, str) else (own or {}).get("default") if own else None
        self.tools: ToolFormat | None = tool_format_of(self.text)
        self.has_reasoning = has_reasoning(self.text)
        texts = [t for t in (own.values() if isinstance(own, dict) else [own]) if isinstance(t, str)]
        special = frozenset(getattr(tokenizer, "special_tokens_map", None) or ())
        self.options = template_options(texts, special)
        """Names that `chat_template_kwargs` may set."""

    def render(
        self, request: ChatRequest, load_image: Callable[[str], Any], check_length: Callable[[str], None]
    ) -> ChatPrompt:
        """Render a request to a prompt.

        Args:
            request: the request.
            load_image: loads an image from its URL.
            check_length: called with the rendered text before it is tokenized; raises if it is too long.

        Raises:
            ApiError: the model has no chat template, or the template rejects the conversation.
        """
        tools = None
        if request.tools and request.tool_choice != "none":
            if self.tools is None:
                raise ApiError(400, "The model's chat template does not support tools.", param="tools")
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        extra = dict(request.chat_template_kwargs or {})
        for name in extra:
            if name not in self.options:
                raise ApiError(
                    400, f"The model's chat template has no option {name[:64]!r}.", param="chat_template_kwargs"
                )
        extra = self._effort(request.reasoning_effort) | extra
        return self.render_messages(request.messages, load_image, check_length, tools=tools, **extra)

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """Template options for a reasoning effort; none where the model does not reason, or has no such option.

        Raises:
            ApiError: the effort is "none", and the model always reasons.
        """
        if effort is None:
            return {}
        if "reasoning_effort" in self.options:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.options:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and self.has_reasoning:
            raise ApiError(
                400, "The model always reasons; its chat template has no option for it.", param="reasoning_effort"
            )
        return {}

    def render_messages(
        self,
        messages: list[Message],
        load_image: Callable[[str], Any],
        check_length: Callable[[str], None],
        *,
        tools: Any = None,
        **extra: Any,
    ) -> ChatPrompt:
        """Render messages to a prompt, without a request's tools and template kwargs."""
        if self.text is None:
            raise ApiError(
                400, "The model has no chat template. Use /v1/completions, or start the server with --chat-template."
            )
        if self._processor is None and any(_has_images(message) for message in messages):
            raise ApiError(400, "The model does not support image input.", param="messages")
        images: list[Any] = []
        plain = [self._message(message, images, load_image) for message in messages]
        options: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, **extra}
        if self._given is not None:
            options["chat_template"] = self._given
        processor = self._processor if images else None
        try:
            text = (processor or self._tokenizer).apply_chat_template(plain, tokenize=False, **options)
            check_length(text)
            if processor is not None:
                encoded = dict(processor(text=[text], images=images, add_special_tokens=False))
                encoded.pop("attention_mask", None)
                ids = [int(i) for i in encoded.pop("input_ids")[0]]
            else:
                ids, encoded = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]), {}
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            shown = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise ApiError(
                400, f"The model's chat template rejected the conversation: {shown[:300]}", param="messages"
            ) from error
        return ChatPrompt(token_ids=ids, inputs=encoded, ends_in_reasoning=text.rstrip().endswith("<think>"))

    def _message(self, message: Message, images: list[Any], load_image: Callable[[str], Any]) -> dict[str, Any]:
        """Convert a message to the dictionary that chat templates expect."""
        plain: dict[str, Any] = {"role": message.role}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                plain[name] = value
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.content is None or isinstance(message.content, str):
            return plain | {"content": message.content or ""}
        parts = []
        for part in message.content:
            if part.image_url is not None:
                images.append(load_image(part.image_url.url))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part.text})
        if all(part["type"] == "text" for part in parts):
            return plain | {"content": "".join(part["text"] for part in parts)}
        return plain | {"content": parts}

    def parser(self, request: ChatRequest, *, ends_in_reasoning: bool) -> OutputParser:
        """Create the output parser for one completion.

        Args:
            request: the request.
            ends_in_reasoning: the prompt ends with <think>.
        """
        tools = self.tools if request.tools and request.tool_choice != "none" else None
        return OutputParser(
            tools,
            splits_reasoning=self.has_reasoning,
            starts_in_reasoning=self.has_reasoning and ends_in_reasoning,
            max_calls=1 if request.parallel_tool_calls is False else None,
        )

    def structured_outputs(self, request: ChatRequest, prompt: ChatPrompt) -> StructuredOutputsParams | None:
        """The constraint on the completion: a response format or a forced tool call; None if unconstrained.

        Where the prompt ends in reasoning, the constraint begins after it.
        """
        wanted = self._constraint(request)
        if wanted is None or not (self.has_reasoning and prompt.ends_in_reasoning):
            return wanted
        return dataclasses.replace(wanted, after=END_OF_REASONING)

    def _constraint(self, request: ChatRequest) -> StructuredOutputsParams | None:
        if request.response_format is not None:
            return structured_outputs_of(request.response_format)
        if not request.tools or request.tool_choice in (None, "auto", "none"):
            return None
        assert self.tools is not None
        wanted = [tool.function for tool in request.tools]
        if isinstance(request.tool_choice, NamedTool):
            wanted = [f for f in wanted if f.name == request.tool_choice.function.name]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": f.name}, self.tools.arguments: f.parameters or {"type": "object"}},
                "required": ["name", self.tools.arguments],
                "additionalProperties": False,
            }
            for f in wanted
        ]
        schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
        if self.tools.is_list:
            schema = {"type": "array", "items": schema, "minItems": 1}
            if request.parallel_tool_calls is False:
                schema["maxItems"] = 1
        schema["x-guidance"] = COMPACT
        begin, end = self._mark(self.tools.begin), self._mark(self.tools.end)
        space = r' "\n" ' if self.tools.end is not None else " "
        return StructuredOutputsParams(
            grammar=f"start: {begin}{space}call{space}{end}\ncall: %json {json.dumps(schema)}\n"
        )

    def _mark(self, mark: str | None) -> str:
        """A marker in grammar syntax: a token of its own by id, or its text."""
        if mark is None:
            return ""
        token = self._tokenizer.get_added_vocab().get(mark)
        return json.dumps(mark) if token is None else f"(<[{token}]> | {json.dumps(mark)})"

    def keeps_special_tokens(self, request: ChatRequest) -> bool:
        """Whether markers that the parser looks for are special tokens, which decoding would otherwise skip."""
        marks = [self.tools.begin] if self.tools is not None and request.tools else []
        if self.has_reasoning:
            marks.append(END_OF_REASONING)
        special = getattr(self._tokenizer, "all_special_tokens", None) or ()
        return any(mark in special for mark in marks)


def _has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(part.image_url is not None for part in message.content)


def structured_outputs_of(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    """Convert a response format to structured-output parameters; None for plain text."""
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type == "regex":
        return StructuredOutputsParams(regex=wanted.regex or "")
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        return StructuredOutputsParams(json=json.dumps(wanted.json_schema.schema_ or {}))
    return None


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The arguments of a tool call are not valid JSON.", param="messages") from error
