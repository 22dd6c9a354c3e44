"""What clients send back and send along: assistant messages as they came, options of OpenAI's that change nothing."""

from __future__ import annotations

import json

import openai
import pytest
from transformers import AutoTokenizer

from hfax.demo import demo_folder
from hfax.server.chat import ChatPrompt, ChatTemplate
from hfax.server.output_parser import OutputParser, tool_format_of
from hfax.server.protocol import ChatRequest

CHAT = [{"role": "user", "content": "What does list.append do?"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
HERMES = """{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")


def post(server, **body):
    with server.client() as client:
        return client.post(
            "/v1/chat/completions", json={"model": "demo", "messages": CHAT, "max_completion_tokens": 2, **body}
        )


# ----------------------------------------------------------------------------------------------------------------- messages


def test_an_answer_of_openai_s_client_can_be_sent_back(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=5)
        sent = answer.choices[0].message.model_dump()
        assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= set(sent)
        more = [*CHAT, sent, {"role": "user", "content": "And then?"}]
        assert client.chat.completions.create(model="demo", messages=more, max_completion_tokens=5).choices


@pytest.mark.parametrize(
    "field",
    [
        {"refusal": None},
        {"annotations": []},
        {"annotations": None},
        {"audio": None},
        {"function_call": None},
        {"tool_calls": None},
        {"tool_calls": []},
        {"name": None, "tool_call_id": None, "reasoning_content": None},
    ],
    ids=str,
)
def test_empty_fields_of_an_assistant_s_message_change_nothing(server, field):
    plain = [*CHAT, {"role": "assistant", "content": "It adds."}, *CHAT]
    sent = [*CHAT, {"role": "assistant", "content": "It adds.", **field}, *CHAT]
    answers = [post(server, messages=messages, temperature=0).json() for messages in (plain, sent)]
    assert answers[0]["usage"] == answers[1]["usage"]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("assistant", {"refusal": "No."}),
        ("assistant", {"audio": {"id": "a"}}),
        ("assistant", {"annotations": [{"type": "url_citation"}]}),
        ("assistant", {"function_call": {"name": "f", "arguments": ""}}),
        ("user", {"content": None}),
        ("assistant", {"content": None}),
    ],
    ids=str,
)
def test_fields_with_a_content_of_their_own_are_refused(server, role, field):
    answer = post(server, messages=[{"role": role, "content": "a", **field}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


def test_a_call_s_message_has_null_as_content():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    assert ChatRequest.model_validate({"model": "demo", "messages": [message]}).messages[0].content is None


# ------------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
        {"metadata": {"session": "7"}},
        {"metadata": {}},
        {"store": False},
        *({"reasoning_effort": value} for value in ("none", "minimal", "low", "medium", "high", None)),
    ],
    ids=str,
)
def test_options_that_change_nothing_are_accepted(server, options):
    answers = [post(server, temperature=0, **more).json() for more in ({}, options)]
    assert answers[1]["choices"] == answers[0]["choices"]


@pytest.mark.parametrize(
    "options",
    [
        {"store": True},
        {"metadata": {"a": 1}},
        {"metadata": {"a" * 65: "b"}},
        {"metadata": {"a": "b" * 513}},
        {"metadata": {str(i): "b" for i in range(17)}},
        {"reasoning_effort": "much"},
        {"parallel_tool_calls": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_values_that_cannot_be_honoured_are_refused(server, options):
    answer = post(server, **options)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(options)))


def rendered(template: str, **options) -> str:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    request = ChatRequest.model_validate({"model": "demo", "messages": CHAT, **options})
    prompt = ChatTemplate(tokenizer, template=template).render(request, lambda url: None, lambda text: None)
    return tokenizer.decode(prompt.token_ids)


def test_the_reasoning_effort_goes_to_the_template():
    effort = "{{ reasoning_effort or 'no' }} effort"
    assert rendered(effort, reasoning_effort="low") == "low effort"
    assert rendered(effort, reasoning_effort="none") == "none effort"
    assert rendered(effort) == "no effort"
    assert rendered(effort, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "high effort"
    switch = "{{ 'off' if enable_thinking is defined and enable_thinking is false else 'on' }}</think>"
    assert rendered(switch, reasoning_effort="none") == "off</think>"
    assert rendered(switch, reasoning_effort="high") == "on</think>"
    always = "<think></think>"
    assert rendered(always, reasoning_effort="high") == always
    with pytest.raises(Exception, match="always reasons") as refused:
        rendered(always, reasoning_effort="none")
    assert (refused.value.status, refused.value.param) == (400, "reasoning_effort")


@pytest.mark.parametrize("template", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_no_parallel_calls_means_one_call(make_server, template):
    with make_server(template) as running:
        for stream in (False, True):
            body = {
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "max_completion_tokens": 300,
                "temperature": 0.8,
            }
            for seed in range(3):
                answer = post(running, **body, seed=seed, stream=stream)
                if stream:
                    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
                else:
                    calls = answer.json()["choices"][0]["message"].get("tool_calls", ())
                assert len(calls) <= 1


def test_the_grammar_of_no_parallel_calls_allows_one():
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    template = ChatTemplate(tokenizer, template=MISTRAL)
    body = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": "required"}
    for value, most in ((False, 1), (True, None), (None, None)):
        request = ChatRequest.model_validate({**body, "parallel_tool_calls": value})
        prompt = ChatPrompt(token_ids=[1], inputs={}, ends_in_reasoning=False)
        grammar = template.structured_outputs(request, prompt).grammar
        schema = json.loads(grammar.partition("%json ")[2])
        assert schema.get("maxItems") == most


def test_only_the_first_call_is_given_where_one_is_wanted():
    tools = tool_format_of(HERMES)
    text = "Well. " + "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>\n' for i in range(3))
    for pieces in ([text], list(text)):
        parser = OutputParser(tools, max_calls=1)
        found = [one for i, piece in enumerate(pieces) for one in parser.feed(piece, is_last=i == len(pieces) - 1)]
        assert [one.name for one in found if one.kind == "call"] == ["f0"]
        assert "".join(one.text for one in found) == "Well."
        assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("template", "name", "is_option"),
    [
        ("{# enable_thinking #}{{ messages }}", "enable_thinking", False),
        ("{{ 'enable_thinking' }}", "enable_thinking", False),
        ("{% set thinking = true %}{{ thinking }}", "thinking", False),
        ("{{ messages[0].content }}", "content", False),
        ("{{ messages[0].content }}", "message", False),
        ("{{ messages }} or", "or", False),
        ("{{ raise_exception('a') }}", "raise_exception", False),
        ("{{ strftime_now('%d') }}", "strftime_now", False),
        ("{{ range(3) }}{{ namespace() }}", "range", False),
        ("{{ bos_token }}", "bos_token", False),
        ("{{ pad_token }}", "pad_token", False),
        ("{% if enable_thinking is defined and enable_thinking %}a{% endif %}", "enable_thinking", True),
        ("{% macro m(x) %}{{ x }}{{ depth }}{% endmacro %}{{ m(1) }}", "depth", True),
        ("{% macro m(x) %}{{ x }}{{ depth }}{% endmacro %}{{ m(1) }}", "x", False),
        ("{% for a in messages %}{% generation %}{{ style }}{% endgeneration %}{% break %}{% endfor %}", "style", True),
    ],
)
def test_template_options_are_the_template_s_own_variables(template, name, is_option):
    """The test was whether the name occurs anywhere in the template's text."""
    if is_option:
        rendered(template, chat_template_kwargs={name: True})
        return
    with pytest.raises(Exception, match="no option") as refused:
        rendered(template, chat_template_kwargs={name: True})
    assert refused.value.param == "chat_template_kwargs"
