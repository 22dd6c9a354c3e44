"""Grammars and reasoning: what is thought is free, what is answered fits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import pytest
from transformers import AutoTokenizer

CHAT = [{"role": "user", "content": "What does list.append do?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"enum": ["list", "dict"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look_up", "look_down")
]
THINKING = """{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}<think>
{# the answer follows </think> #}"""
MARK = 3
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}


def post(server, **body):
    with server.client() as client:
        options = {"model": "demo", "messages": CHAT, "temperature": 0, "max_completion_tokens": 60}
        return client.post("/v1/chat/completions", json=options | body)


def thinking(make_server, tokenizer):
    """A server whose model may write </think>, which the demo's generation config suppresses."""
    manager = make_server(THINKING, tokenizer=tokenizer)

    @contextlib.contextmanager
    def opened():
        with manager as running:
            running.served._loaded = dataclasses.replace(running.served._loaded, defaults={})
            yield running

    return opened()


@pytest.fixture(scope="module", params=[False, True], ids=["ordinary token", "special token"])
def tokenizer(demo, tmp_path_factory, request):
    """The demo's, with </think> in place of a token that the demo never writes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo[1].save_pretrained(folder)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace("<|system|>", "</think>"))
    settings = json.loads((folder / "tokenizer.json").read_text())
    next(one for one in settings["added_tokens"] if one["id"] == MARK)["special"] = request.param
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    if not request.param:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("extra_special_tokens", None)
        config.pop("additional_special_tokens", None)
        path.write_text(json.dumps(config))
    made = AutoTokenizer.from_pretrained(folder)
    assert made.convert_tokens_to_ids("</think>") == MARK
    assert ("</think>" in made.all_special_tokens) == request.param
    return made


@pytest.mark.parametrize(
    ("options", "is_call"),
    [
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": SCHEMA}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_down"}}}, True),
    ],
    ids=["object", "schema", "required", "named"],
)
def test_a_grammar_begins_after_the_reasoning(make_server, tokenizer, options, is_call):
    """It began at the first token: the JSON or the call came as reasoning, and the answer was empty."""
    with thinking(make_server, tokenizer) as running:
        for bias, seed in ((100, 1), (9, 2)):  # at once, and after some tokens
            body = {**options, "logit_bias": {str(MARK): bias}, "temperature": 1.0, "seed": seed}
            choice = post(running, **body, max_completion_tokens=250).json()["choices"][0]
            message = choice["message"]
            assert bool(message.get("reasoning_content")) == (bias < 100), message
            if is_call:
                (call,) = message["tool_calls"]
                assert json.loads(call["function"]["arguments"])["name"] in ("list", "dict")
                assert choice["finish_reason"] == "tool_calls"
                assert call["function"]["name"].startswith("look_")
            elif options["response_format"] is SCHEMA:
                assert json.loads(message["content"])["name"] in ("list", "dict")
                assert choice["finish_reason"] == "stop"
            else:  # an object of any length
                assert message["content"].startswith("{")
        reasoning_alone = post(running, **options, max_completion_tokens=8).json()["choices"][0]
        assert reasoning_alone["finish_reason"] == "length"
        assert reasoning_alone["message"]["content"] == ""
        assert reasoning_alone["message"]["reasoning_content"]


def test_plain_answers_of_a_special_marker_are_taken_apart(make_server, tokenizer):
    """A special token's text was left out of the output, so all of it was reasoning."""
    with thinking(make_server, tokenizer) as running:
        answer = post(running, logit_bias={str(MARK): 10}, temperature=1.0, seed=1, n=16, max_completion_tokens=40)
        messages = [choice["message"] for choice in answer.json()["choices"]]
    assert any(message.get("reasoning_content") and message["content"] for message in messages)


def test_a_prepared_grammar_is_not_compiled_again_on_the_event_loop(make_server, monkeypatch):
    """A grammar that fell out of the cache of 64 between its preparation and its submission."""
    with make_server() as running:
        grammars, made = running.engine.grammars, []
        make, submit = grammars._make, running.engine.submit

        def watched(wanted):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            made.append(wanted)
            return make(wanted)

        def forgetful(*args, **kwargs):
            grammars._made.clear()
            return submit(*args, **kwargs)

        monkeypatch.setattr(grammars, "_make", watched)
        monkeypatch.setattr(running.engine, "submit", forgetful)
        for _ in range(2):
            assert post(running, response_format={"type": "regex", "regex": "ab"}, n=2).status_code == 200
        assert len(made) == 2
