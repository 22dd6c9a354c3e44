"""The API as OpenAI's own client sees it."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

CHAT = [{"role": "user", "content": "What does list.append do?"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server, path: str, **body):
    with server.client() as client:
        return client.post(path, json={"model": "demo", **body})


def events(server, path: str, **body) -> list[str]:
    """The data of each event of a stream."""
    with (
        server.client() as client,
        client.stream("POST", path, json={"model": "demo", "stream": True, **body}) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_chat_is_what_generate_writes(server, client, demo):
    model, tokenizer = demo
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_completion_tokens=30)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="np", return_dict=True)[
        "input_ids"
    ]
    ids = np.asarray(model.generate(prompt, do_sample=False, max_new_tokens=30))[0, prompt.shape[1] :]
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
    assert choice.finish_reason == ("stop" if 2 in ids else "length")
    assert answer.usage.prompt_tokens == prompt.shape[1]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", "demo")


def test_a_streamed_chat_is_the_same_text(client):
    options = {"model": "demo", "messages": CHAT, "temperature": 0.7, "seed": 4, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_events_of_a_chat_stream(server):
    found = events(
        server, "/v1/chat/completions", messages=CHAT, max_completion_tokens=4, stream_options={"include_usage": True}
    )
    assert found[-1] == "[DONE]"
    chunks = [json.loads(data) for data in found[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-2])
    assert (chunks[-2]["choices"][0]["delta"], chunks[-2]["choices"][0]["finish_reason"]) == ({}, "length")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_several_texts_of_a_chat(client):
    answer = client.chat.completions.create(model="demo", messages=CHAT, n=3, seed=1, max_completion_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    chunks = list(
        client.chat.completions.create(model="demo", messages=CHAT, n=3, seed=1, max_completion_tokens=12, stream=True)
    )
    for choice in answer.choices:
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == choice.index)
        assert text == choice.message.content


def test_log_probabilities_of_a_chat(client):
    options = {
        "model": "demo",
        "messages": CHAT,
        "temperature": 0,
        "max_completion_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode() == entry.token
    chunks = client.chat.completions.create(**options, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole.logprobs.content])


def test_completions_of_text_and_of_ids(client, demo):
    _, tokenizer = demo
    text = "Return a new list"
    options = {"model": "demo", "temperature": 0, "max_tokens": 8}
    by_text = client.completions.create(prompt=text, **options)
    by_ids = client.completions.create(prompt=tokenizer(text)["input_ids"], **options)
    several = client.completions.create(prompt=["Raise an error", text], **options)
    lists = client.completions.create(
        prompt=[tokenizer("Raise an error")["input_ids"], tokenizer(text)["input_ids"]], **options
    )
    assert by_text.choices[0].text == by_ids.choices[0].text == several.choices[1].text == lists.choices[1].text
    assert [choice.index for choice in several.choices] == [0, 1]


def log_probs_of(model, ids: list[int]) -> np.ndarray:
    """[length, vocab] float64, by a call of the model."""
    logits = np.asarray(model(np.asarray([ids])).logits[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_echo_with_log_probabilities_as_lm_eval_asks_for_them(server, demo):
    """`local-completions` sends token ids, echo, logprobs=1 and max_tokens=1, and sums over the part that it wants."""
    model, tokenizer = demo
    context, whole = tokenizer("Return a new")["input_ids"], tokenizer("Return a new list of names")["input_ids"]
    body = {"prompt": [whole], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    choice = post(server, "/v1/completions", **body).json()["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(whole) + 1
    assert found["token_logprobs"][0] is None
    log_probs = log_probs_of(model, whole)
    places = range(len(context) - 1, len(whole) - 1)
    difference = [
        abs(logprob - log_probs[i, whole[i + 1]])
        for i, logprob in zip(places, found["token_logprobs"][len(context) : -1], strict=True)
    ]
    assert max(difference) < 1e-4
    greedy = [
        max(top, key=top.get) == token
        for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True)
    ]
    assert greedy == [*(log_probs[i].argmax() == whole[i + 1] for i in range(len(whole) - 1)), True]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_scores_what_the_model_says(server, demo):
    """lm-eval's own client of `local-completions`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model, _ = demo
    url = f"{server.url}/v1/completions"
    client = LocalCompletionsAPI(
        base_url=url, model="demo", tokenizer=str(model.folder), tokenizer_backend="huggingface", max_length=512
    )
    asked = [("Return a new", " list of names"), ("Raise an error if", " the name is unknown")]
    instances = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(asked)]
    for pair, (found, _) in zip(asked, client.loglikelihood(instances), strict=True):
        context, rest = client._encode_pair(*pair)
        logits = np.asarray(model(np.asarray([context + rest])).logits[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert found == pytest.approx(sum(log_probs[len(context) - 1 + i, t] for i, t in enumerate(rest)), abs=1e-3)


def test_echo_alone_scores_the_prompt(server):
    answer = post(server, "/v1/completions", prompt="Return a new list", max_tokens=0, echo=True, logprobs=0).json()
    assert answer["choices"][0]["text"] == "Return a new list"
    assert answer["usage"]["completion_tokens"] == 0


def test_stop_strings_end_a_text_before_them(client):
    options = {"model": "demo", "prompt": "Return a new", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**options).choices[0].text
    word = whole.split()[3]
    stopped = client.completions.create(**options, stop=[word, "never"]).choices[0]
    assert stopped.text == whole[: whole.index(word)]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == word
    streamed = list(client.completions.create(**options, stop=[word], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text


@pytest.mark.parametrize(
    ("response_format", "check"),
    [
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "place",
                    "schema": {
                        "type": "object",
                        "properties": {
                            "line": {"type": "integer", "maximum": 99},
                            "kind": {"enum": ["class", "function"]},
                        },
                        "required": ["line", "kind"],
                        "additionalProperties": False,
                    },
                },
            },
            lambda text: (
                set(json.loads(text)) == {"line", "kind"} and json.loads(text)["kind"] in ("class", "function")
            ),
        ),
        ({"type": "regex", "regex": r"[a-c]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
    ],
    ids=["schema", "regex"],
)
def test_texts_fit_their_grammar(client, response_format, check):
    for temperature in (0, 1.5):
        answer = client.chat.completions.create(
            model="demo",
            messages=CHAT,
            temperature=temperature,
            seed=3,
            max_completion_tokens=100,
            extra_body={"response_format": response_format},
        )
        assert check(answer.choices[0].message.content), answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"


def test_models_tokens_and_state(server, client, demo):
    _, tokenizer = demo
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with server.client() as http:
        ids = http.post("/tokenize", json={"prompt": "Return a new list"}).json()["tokens"]
        assert ids == tokenizer("Return a new list")["input_ids"]
        of_chat = http.post("/tokenize", json={"messages": CHAT}).json()
        assert of_chat["tokens"] == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text == tokenizer.decode(ids)
        for path in ("/health", "/ready", "/version"):
            assert http.get(path).status_code == 200


def test_unknown_models_and_routes_are_404(server):
    assert post(server, "/v1/completions", prompt="a", model="other").status_code == 404
    with server.client() as http:
        answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a name.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"enum": ["list", "dict"]}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    }
]
HERMES = """{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}<!-- </think> -->"""


def test_tools_are_called_alike_streamed_or_not(make_server):
    with make_server(HERMES) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        options = {"model": "demo", "messages": CHAT, "tools": TOOLS, "max_completion_tokens": 200, "temperature": 0}
        for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
            whole = client.chat.completions.create(**options, tool_choice=choice).choices[0]
            call = whole.message.tool_calls[0].function
            assert (whole.finish_reason, call.name) == ("tool_calls", "look_up")
            assert json.loads(call.arguments)["name"] in ("list", "dict")
            chunks = list(client.chat.completions.create(**options, tool_choice=choice, stream=True))
            streamed = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
            assert [(c.index, c.function.name, c.function.arguments) for c in streamed] == [
                (0, "look_up", call.arguments)
            ]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        answered = [
            *CHAT,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "list"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "found"},
        ]
        again = client.chat.completions.create(model="demo", messages=answered, tools=TOOLS, max_completion_tokens=3)
        assert again.choices[0].message.content is not None


def test_options_of_the_template(make_server):
    with make_server(HERMES) as running:
        plain = post(running, "/v1/chat/completions", messages=CHAT, max_completion_tokens=3).json()
        thinking = post(
            running,
            "/v1/chat/completions",
            messages=CHAT,
            max_completion_tokens=3,
            chat_template_kwargs={"enable_thinking": True},
        ).json()
        assert thinking["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        for name in ("nothing", "messages", "tools"):
            refused = post(running, "/v1/chat/completions", messages=CHAT, chat_template_kwargs={name: True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_tools_without_a_template_for_them_are_refused(server):
    answer = post(server, "/v1/chat/completions", messages=CHAT, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_metrics_count_what_was_done(make_server):
    with make_server(metrics_prefix="vllm:") as running:
        for _ in range(2):
            assert post(running, "/v1/completions", prompt="Return a new list " * 20, max_tokens=5).status_code == 200
        with running.client() as http:
            text = http.get("/metrics").text
        values = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }
        label = '{model_name="demo"}'
        assert values[f"vllm:num_requests_running{label}"] == 0
        assert values[f"vllm:num_requests_waiting{label}"] == 0
        assert values[f"vllm:kv_cache_usage_perc{label}"] == 0
        assert values[f"vllm:prefix_cache_hits_total{label}"] > 0
        assert values[f"vllm:prefix_cache_queries_total{label}"] > values[f"vllm:prefix_cache_hits_total{label}"]
        assert values[f"vllm:num_preemptions_total{label}"] == 0
        assert values[f"vllm:generation_tokens_total{label}"] <= 10
        assert values[f"vllm:time_to_first_token_seconds_count{label}"] == 2
        assert values[f"vllm:e2e_request_latency_seconds_count{label}"] == 2
        assert sum(v for name, v in values.items() if name.startswith("vllm:request_success_total")) == 2
        assert values['http_requests_total{method="POST",path="/v1/completions",status="200"}'] == 2
