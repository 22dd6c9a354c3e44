"""`hfax serve` as a process: its options, its end, its chat page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import processes
import pytest
import transformers
from servers import SOURCE, started
from tiny_models import save, tiny_llama, tiny_llama_config


@pytest.mark.multiprocess
def test_sigterm_under_load_completes_streams_and_exits_0():
    options = ("--max-model-len", "512", "--json-logs", "--health-port", "0")
    with started("demo", *options) as (process, client, lines):
        health = next(line.split()[-1] for line in lines if "Health and metrics on" in line)
        texts: list[list[str]] = []

        def ask() -> None:
            body = {
                "model": "demo",
                "prompt": "Return a new",
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": True,
                "user": "me",
            }
            with client.stream("POST", "/v1/completions", json=body) as answer:
                texts.append([line for line in answer.iter_lines() if line.startswith("data: ")])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while b'num_requests_running{model_name="demo"} 4.0' not in client.get("/metrics").content:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{client.base_url}/health", timeout=2)
        assert httpx.get(f"{health}/health", timeout=60).json() == {"status": "stopping"}
        for thread in threads:
            thread.join()
        assert process.wait(30) == 0
    assert len(texts) == 4
    for data in texts:
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(one["path"], one["status"], one["user"]) for one in logged if one["path"] == "/v1/completions"] == [
        ("/v1/completions", 200, "me")
    ] * 4


def test_the_command_line_wins_over_variables_and_those_over_the_file(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("max-model-len: 64\nserved_model_name: [from-file]\nmax_num_seqs: 2\n")
    variables = {"HFAX_MAX_MODEL_LEN": "96", "HFAX_SERVED_MODEL_NAME": "from-variable", "HFAX_API_KEY": "secret"}
    with started("demo", "--config", str(file), "--served-model-name", "from-line", **variables) as (_, client, _lines):
        assert client.get("/v1/models").status_code == 401
        found = client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in found] == [("from-line", 96)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["demo", "--max-model-len", "100000"], "context"),
        (["demo", "--api-key", ""], "empty"),
        (["demo", "--config", "nothing.yaml"], "nothing.yaml"),
        (["demo", "--metrics-prefix", "other"], "hfax or vllm"),
        (["demo", "--kv-cache-dtype", "int3"], "int3 is not a dtype"),
        (["demo", "--chat-template", "nothing.jinja"], "cannot be read"),
    ],
)  # fmt: skip
def test_wrong_options_end_with_one_message(arguments, message):
    done = processes.run(["-m", "hfax", "serve", *arguments, "--port", "0"])
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.replace("│", " ").split())  # a box breaks its lines where the terminal ends
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error():
    with started("demo", waits=False) as (_, client, _lines):
        done = processes.run(["-m", "hfax", "serve", "demo", "--port", client.base_url.port])
    assert done.returncode == 1
    assert "another --port" in " ".join(done.stderr.split())


@pytest.mark.multiprocess
def test_an_engine_that_dies_ends_the_process_with_an_error(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\n"
        "def break_it():\n"
        "    import hfax.engine.scheduler as s\n"
        "    def fails(self): raise RuntimeError('injected')\n"
        "    s.Scheduler.schedule = fails\n"
        "import os\n"
        "if os.environ.get('BREAK'):\n"
        "    threading.Timer(0, break_it).start()\n"
    )
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}", "BREAK": "1"}
    with started("demo", "--max-model-len", "512", **variables) as (process, client, lines):
        answer = client.post("/v1/completions", json={"model": "demo", "prompt": "a"})
        assert answer.status_code in (500, 503)
        assert process.wait(20) == 1
    assert "The server failed" in "".join(lines)


@pytest.mark.sweep
def test_it_serves_alike_without_assertions():
    with started("demo", "--max-model-len", "128", flags=("-O",)) as (_, client, _lines):
        assert client.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 3}).status_code == 200
        rest = (
            '"prompt": [[]]', '"prompt": null', '"prompt": -1', '"prompt": [-1]', '"prompt": ["a", 1]',
            '"prompt": "a", "n": 1000000',
            '"prompt": "a", "temperature": NaN', '"prompt": "a", "temperature": "hot"', '"prompt": "a", "max_tokens": -1',
            '"prompt": "a", "logprobs": 99', '"prompt": "a", "made_up": 1', '"prompt": "a", "logit_bias": {"x": 1}',
            '"prompt": "a", "response_format": {"type": "regex", "regex": "("}', '"prompt": "\\ud800"',
        )  # fmt: skip
        bodies = [f'{{"model": "demo", {one}}}'.encode() for one in rest]
        for body in (*bodies, b"[]", b"null", b"", b"\xff", b'{"a":' * 5000):
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400
            assert "error" in answer.json()


def test_an_encoder_is_served_as_embeddings(tmp_path):
    import numpy as np
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(SOURCE / "hfax" / "demo")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    reference = transformers.BertModel(config).eval()
    reference.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["Return a new list", "Raise an error if the name is not a class", "a"]
    with started(str(tmp_path), "--served-model-name", "bert") as (_, client, _lines):
        answer = client.post("/v1/embeddings", json={"model": "bert", "input": texts}).json()
        base64 = client.post(
            "/v1/embeddings", json={"model": "bert", "input": texts[0], "encoding_format": "base64"}
        ).json()
        assert client.post("/v1/completions", json={"model": "bert", "prompt": "a"}).status_code == 400
        assert client.post("/v1/embeddings", json={"model": "bert", "input": ["a " * 300]}).status_code == 400
        assert client.post("/v1/embeddings", json={"model": "bert", "input": "a", "dimensions": 3}).status_code == 400
    for index, text in enumerate(texts):
        with torch.no_grad():
            hidden = reference(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(answer["data"][index]["embedding"], hidden / np.linalg.norm(hidden), atol=1e-5)
    import base64 as codec

    decoded = np.frombuffer(codec.b64decode(base64["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, answer["data"][0]["embedding"], atol=1e-6)


_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_reads_images_is_asked_with_one(tmp_path):
    import base64
    import io

    import numpy as np
    from PIL import Image

    from hfax.matrix.case import draw_weights

    tokenizer = transformers.AutoTokenizer.from_pretrained(SOURCE / "hfax" / "demo")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
    }
    config = transformers.LlavaConfig(
        text_config=tiny_llama_config(vocab_size=len(tokenizer), eos_token_id=2).to_dict(),
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=14).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    plain = transformers.LlavaForConditionalGeneration(config).eval()
    draw_weights(plain)
    plain.save_pretrained(tmp_path)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 112, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    inputs = processor(text=["user: <image>what?"], images=[picture], return_tensors="pt", add_special_tokens=False)
    written = plain.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    with started(str(tmp_path), "--served-model-name", "llava", "--max-num-seqs", "4") as (_, client, _lines):
        body = {"model": "llava", "temperature": 0, "max_tokens": 8}
        answer = client.post(
            "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": content}]}
        ).json()
        assert (
            client.post(
                "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "what?"}]}
            ).status_code
            == 200
        )
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(written, skip_special_tokens=True)
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]


def test_checkpoints_that_carry_code_run_none_of_it(tmp_path):
    """auto_map in several places, and weights that only a pickle holds."""
    canary = tmp_path / "canary"
    folder = save(
        tmp_path / "model", tiny_llama(), transformers.AutoTokenizer.from_pretrained(SOURCE / "hfax" / "demo")
    )
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer, "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}})
    )
    done = processes.run(["-m", "hfax", "serve", folder, "--port", "0"])
    assert done.returncode == 1
    assert "trust" in done.stderr
    assert not canary.exists()


@pytest.fixture(scope="module")
def chromium():
    """A browser without a window; Debian's chromium, driven by playwright."""
    import shutil

    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "the chat page is tested in Chromium: apt-get install chromium"
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=[*quiet, "--disable-component-update", "--disable-sync"]
        )
        yield browser
        browser.close()


def until(page, condition: str) -> None:
    """Wait for an expression to be true; the page's own policy forbids playwright's way to do so."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


@pytest.mark.browser
def test_the_chat_page_writes_stops_and_loads_nothing_from_elsewhere(chromium):
    with started("demo", "--max-model-len", "512") as (_, client, _lines):
        page = chromium.new_page()
        asked, problems = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(str(client.base_url))
        until(page, "document.getElementById('model').textContent === 'demo'")
        page.click("#toggle")
        page.fill("#temperature", "0")
        page.fill("#max_completion_tokens", "12")
        page.fill("#input", "What does list.append do?")
        page.press("#input", "Enter")
        until(
            page,
            "/tokens\\/s/.test(document.querySelector('.note').textContent) && !document.getElementById('send').hidden",
        )
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "What does list.append do?"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert page.text_content(".assistant") == expected
        page.click("#clear")
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "again"}],
            "temperature": 1.9,
            "max_tokens": 450,
            "seed": 1,
        }
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        page.fill("#max_completion_tokens", "450")
        page.fill("#temperature", "1.9")
        page.fill("#seed", "1")
        page.fill("#input", "again")
        # 450 tokens take a fraction of a second: the page itself presses the button as text appears
        page.evaluate(
            """new MutationObserver((_, observer) => {
                if (!document.querySelector('.assistant')?.textContent) return;
                observer.disconnect();
                document.getElementById('stop').click();
            }).observe(document.getElementById('messages'), {childList: true, subtree: true, characterData: true})"""
        )
        page.click("#send")
        until(page, "/stopped/.test(document.querySelector('.note')?.textContent)")
        page.wait_for_selector("#send:not([hidden])")
        written = page.text_content(".assistant")
        assert whole.startswith(written)
        assert 0 < len(written) < len(whole)
        deadline = time.monotonic() + 60
        while b'num_requests_running{model_name="demo"} 0.0' not in client.get("/metrics").content:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        page.click("#clear")
        assert page.text_content("#messages") == ""
        assert problems == []
        assert all(url.startswith(str(client.base_url)) for url in asked)
        page.close()


@pytest.mark.browser
def test_the_chat_page_behind_a_key(chromium):
    with started("demo", "--max-model-len", "128", HFAX_API_KEY="secret") as (_, client, _lines):
        context = chromium.new_context(http_credentials={"username": "", "password": "secret"})
        page = context.new_page()
        page.goto(str(client.base_url))
        until(page, "document.getElementById('model').textContent === 'demo'")
        context.close()


@pytest.mark.browser
def test_the_chat_page_opened_with_the_key_in_its_address(chromium):
    """fetch refuses addresses with credentials in them, and relative ones took over the page's."""
    with started("demo", "--max-model-len", "128", HFAX_API_KEY="secret") as (_, client, _lines):
        page = chromium.new_page()
        page.goto(str(client.base_url).replace("http://", "http://me:secret@"))
        until(page, "document.getElementById('model').textContent === 'demo'")
        page.fill("#input", "What does list.append do?")
        page.press("#input", "Enter")
        until(page, "document.querySelector('.note')?.textContent.includes('tokens')")
        assert page.query_selector(".error") is None
        page.close()


@pytest.mark.browser
def test_errors_and_left_answers_are_no_part_of_the_next_chat(chromium):
    """An error's text became the assistant's message, and an aborted answer the first message of a new chat."""
    with started("demo", "--max-model-len", "512") as (_, client, _lines):
        page = chromium.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.post_data) if request.method == "POST" else None)
        page.goto(str(client.base_url))
        until(page, "document.getElementById('model').textContent === 'demo'")
        page.click("#toggle")
        page.fill("#max_completion_tokens", "100000")
        page.fill("#input", "first")
        page.press("#input", "Enter")
        until(page, "document.querySelector('.error') !== null && !document.getElementById('send').hidden")
        assert page.input_value("#input") == "first"
        page.fill("#max_completion_tokens", "450")
        page.fill("#temperature", "1.9")
        page.fill("#seed", "1")
        page.fill("#input", "second")
        page.evaluate(
            """new MutationObserver((_, observer) => {
                const boxes = document.querySelectorAll('.assistant');
                if (boxes.length < 2 || !boxes[1].textContent) return;
                observer.disconnect();
                document.getElementById('clear').click();
            }).observe(document.getElementById('messages'), {childList: true, subtree: true, characterData: true})"""
        )
        page.press("#input", "Enter")
        until(page, "document.getElementById('messages').textContent === ''")
        page.fill("#max_completion_tokens", "4")
        page.fill("#input", "third")
        page.press("#input", "Enter")
        until(page, "document.querySelector('.note')?.textContent.includes('tokens')")
        until(page, "!document.getElementById('send').hidden")
        page.fill("#input", "fourth")
        page.press("#input", "Enter")
        until(page, "document.querySelectorAll('.note').length === 2 && !document.getElementById('send').hidden")
        page.close()
    contents = [[message["content"] for message in json.loads(body)["messages"]] for body in asked]
    assert contents[:3] == [["first"], ["second"], ["third"]]
    assert [contents[3][0], contents[3][2]] == ["third", "fourth"]


@pytest.mark.sweep
def test_random_requests_from_its_own_description_give_no_server_error(tmp_path):
    """schemathesis: every route of /openapi.json."""
    with started("demo", "--max-model-len", "128") as (_, client, _lines):
        url = str(client.base_url).rstrip("/")
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
            "--max-examples", "25",
            "--phases", "examples,fuzzing", "--generation-deterministic", "--no-color", "--request-timeout", "30",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert client.get("/health").status_code == 200
