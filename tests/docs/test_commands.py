"""Every command line in the shell blocks of the README and the docs: parsed, and run where a machine without network can.

They run in a folder that has the files they name (`conftest.py`), on small models in place of the Hub's. What differs between a
page and what runs here is in the tables below. Each is run once, whatever the number of pages that show it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import servers
import typer.main
from code_blocks import ROOT, command_lines, hfax_commands, pages_of_docs

from hfax.cli.app import make_app
from hfax.launch.ports import free_port

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    *pages_of_docs(),
]
NOT_HERE = {
    "pip install -e '.[cpu]'": "needs the network",
    "pip install -e '.[cpu,serve]'": "needs the network",
    "pip install -e '.[cpu,train]'": "needs the network",
    "pip install -e '.[cpu,eval]'": "needs the network",
    "pip install 'hfax[cpu]'": "needs the network",
    ".venv/bin/pip install jupyterlab": "needs the network",
    ".venv/bin/jupytext --to ipynb docs/tutorial/*.py": "writes into the checkout; the site's build converts the same files",
    ".venv/bin/jupyter lab docs/tutorial": "waits for a browser",
    "pip install 'hfax[tpu]'": "needs the network",
    "pip install 'hfax[cuda]'": "needs the network",
    "pip install 'hfax[plan-gpu]'": "needs the network",
    "python3 -m venv env && . env/bin/activate": "the tests run in an environment",
    "gcloud compute tpus tpu-vm create hfax --zone us-west4-a --accelerator-type v5litepod-8 --version v2-alpha-tpuv5-lite": (
        "needs Google Cloud"
    ),
    "gcloud compute tpus tpu-vm ssh hfax --zone us-west4-a": "needs Google Cloud",
    "gcloud compute tpus tpu-vm delete hfax --zone us-west4-a": "needs Google Cloud",
    'gcloud compute tpus tpu-vm ssh hfax --zone us-west4-a --worker all --command "hfax launch script.py"': (
        "needs Google Cloud"
    ),
    "docker build -f deploy/Dockerfile --build-arg EXTRA=cpu -t hfax .": "needs Docker; tests/deploy reads the file",
    "docker run -p 8000:8000 -e HFAX_API_KEY=secret -v hfax:/cache hfax serve Qwen/Qwen3-0.6B --host 0.0.0.0": (
        "needs Docker"
    ),
    "kubectl apply -f deploy/kubernetes.yaml": "needs a cluster; tests/deploy reads the file",
    "git clone https://github.com/hfax/hfax && cd hfax": "needs the network",
    "hfax launch script.py": "needs the hosts of a TPU slice, or srun",
    'gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker all --command "hfax launch script.py"': "needs Google Cloud",
    "xpk workload create --cluster CLUSTER --workload NAME --tpu-type v5litepod-16 --docker-image IMAGE "
    '--command "hfax launch script.py"': "needs Google Cloud",
    "serve run ray_serve:app model=demo max_replicas=2": "tests/deploy/test_ray.py runs the same application",
    "serve deploy ray_serve.yaml": "tests/deploy/test_ray.py reads the same file",
    """curl -s localhost:8000/generate -d '{"prompt": "Return a new list", "max_new_tokens": 20}'""": (
        "tests/deploy/test_ray.py asks the same application"
    ),
    'hfax generate bundle "Hello"': "its bundle holds programs for a TPU",
    "hfax lm-eval --model hfax --model_args pretrained=demo --tasks lambada_openai": "needs a data set of the Hub",
    "hfax lm-eval --model hfax --model_args pretrained=Qwen/Qwen3-0.6B --tasks lambada_openai": "needs a data set of the Hub",
    "hfax lm-eval --model hfax --model_args pretrained=Qwen/Qwen3-0.6B,dtype=bfloat16 --tasks lambada_openai --batch_size 16": (
        "needs a data set of the Hub"
    ),
    "hfax matrix --train --json-file build/support.json --markdown docs/support.md": "hours; tests/matrix runs a sample",
    "python benchmarks/cpu.py --shape qwen3-0.6b --json-file benchmarks/results/cpu-qwen3-0.6b.json": "measures for minutes",
    "python benchmarks/cpu.py --shape llama-3.2-1b --json-file benchmarks/results/cpu-llama-3.2-1b.json": "measures for minutes",
    "python benchmarks/other_libraries.py --json-file benchmarks/results/other-libraries.json": (
        "installs ONNX Runtime and measures for minutes"
    ),
    "python benchmarks/peers_cpu.py --layers 12 --vocabulary 32000 --json-file benchmarks/results/peers-cpu-avx2.json": (
        "builds llama.cpp and measures for minutes"
    ),
    "python benchmarks/peers_cpu.py --layers 12 --vocabulary 32000 --json-file benchmarks/results/peers-cpu-amx.json": (
        "builds llama.cpp and measures for minutes"
    ),
    "python benchmarks/published_formats.py --rounds 5 --json-file benchmarks/results/published-formats-amx.json": (
        "builds llama.cpp and measures for minutes"
    ),
    "python benchmarks/start.py --json-file benchmarks/results/start.json": "measures for minutes; tests/stored runs such starts",
}
"""Command lines that are not run, and why."""
STAND_INS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-30B-A3B": "qwen3-moe",
    "meta-llama/Meta-Llama-3-8B": "./my-model/config.json",
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "./my-classifier",
    "sentence-transformers/all-MiniLM-L6-v2": "encoder",
    "owner/flax-model": "./flax-model",
    "pretrained=./model": "pretrained=./my-model",
    "--port 8000": "--port 0",
    "--port 80 ": "--port 0 ",
    "--max-new-tokens 200": "--max-new-tokens 4",
    "--num-requests 200": "--num-requests 20",
    "--rate 4 ": "--rate 20 ",
    "--draws 20": "--draws 1 --only llama",
    "--each 20": "--each 1",
}
"""Words of command lines, and what stands for them here: small models, free ports, fewer repetitions."""
SMALLER = {
    "generate": "--max-new-tokens 4",
    "chat": "--max-new-tokens 4",
    "verify": "--max-new-tokens 4",
    "quantize": "--num-samples 4 --max-length 16",
    "bench": "--rounds 1 --tokens 2",
    "bench serve": "--num-requests 10 --json",
    "bench attack": "--each 1 --slow-s 1 --flood 10",
}
"""By verb, options that are added."""
LONG = {"train", "bench", "bench serve", "bench attack", "lm-eval", "matrix"}
"""Verbs that take long with any options."""
BEFORE = {
    "hfax doctor xglm/config.json --check": next(
        text for _, text in command_lines("CONTRIBUTING.md") if text.startswith("mkdir xglm")
    ),
    "hfax train sft.yaml --resume": "hfax train sft.yaml",
    "hfax train sft.yaml --resume --accept-change learning_rate": "hfax train sft.yaml",
    "hfax convert ./model ./for-flax --to flax": "hfax convert owner/flax-model ./model",
    "hfax convert ./model ./parts --to orbax": "hfax convert owner/flax-model ./model",
    "hfax convert ./demo-int4 ./demo-plain --dtype bfloat16": (
        "hfax convert demo ./demo-int4 --to compressed-tensors --quantization int4"
    ),
    "hfax serve bundle --max-model-len 512": "hfax export demo --out bundle --for-server --max-model-len 512",
    'hfax generate bundle "Return a new list"': "hfax export demo --out bundle",
    'hfax generate demo-gptq "Return a new list"': (
        "hfax quantize demo --data README.md --out demo-gptq --num-samples 8 --max-length 128"
    ),
    "hfax chat Qwen/Qwen3-0.6B --history talk.json": r"printf 'Hello\n/save talk.json\n' | hfax chat demo",
}
"""Command lines that need what another one leaves behind."""
FOUND = {text: (page, line) for page in reversed(PAGES) for line, text in reversed(command_lines(page))}
"""By command line: the first place that has it."""
LINES = sorted(FOUND, key=lambda text: (PAGES.index(FOUND[text][0]), FOUND[text][1]))


def _without_variables(line: str) -> str:
    return re.sub(r"^([A-Z_]+=\S+ )+", "", line)


def _verb(command: str) -> str:
    words = command.split()[1:3]
    return " ".join(words) if words in (["bench", "serve"], ["bench", "attack"]) else words[0]


def _lines(*programs: str) -> list[str]:
    """Command lines that begin with one of these programs and are run."""
    return [text for text in LINES if text not in NOT_HERE and _without_variables(text).split()[0] in programs]


HFAX = _lines("hfax", "printf")
SHELL = _lines("mkdir", "export")
MAKE = _lines("make")
PYTEST = _lines(".venv/bin/python", ".venv-torch_xla/bin/python")


def test_every_command_line_is_run_or_has_a_reason() -> None:
    assert set(LINES) == {*HFAX, *SHELL, *MAKE, *PYTEST, *NOT_HERE}
    assert all(line in LINES for line in BEFORE)
    assert not [words for words in STAND_INS if not any(words in line for line in HFAX)]


def _parse(command: str) -> None:
    """Parse as far as the verb's own function, with the types of all values."""
    verb = _verb(command)
    words = shlex.split(command)[1 + len(verb.split()) :]
    verbs: Any = typer.main.get_command(make_app())
    assert verb in verbs.commands, f"no verb {verb!r}"
    verbs.commands[verb].make_context(verb, words)


@pytest.mark.parametrize("command", sorted({command for line in LINES for command in hfax_commands(line)}))
def test_a_command_exists_with_its_options(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text("port: 8000\n")
    _parse(command)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("hfax generat demo Hi", "no verb 'generat'"),
        ("hfax generate demo Hi --max-tokens 3", "No such option"),
        ("hfax generate demo Hi --seed x", "valid int"),
    ],
)
def test_parsing_finds_what_is_not_there(command: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        _parse(command)


@pytest.mark.parametrize("line", MAKE)
def test_make_knows_the_target(line: str) -> None:
    done = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", PYTEST)
def test_the_tests_that_a_page_starts_exist(line: str, pytestconfig: pytest.Config) -> None:
    python, *words = shlex.split(_without_variables(line))
    assert python in ((ROOT / "Makefile").read_text())
    assert words[:2] == ["-m", "pytest"]
    for option, word in itertools.pairwise(words[1:]):
        if option == "-m":
            assert any(marker.startswith(f"{word}:") for marker in pytestconfig.getini("markers"))
        elif option != "-k" and not word.startswith("-"):
            assert (ROOT / word).exists()


@pytest.mark.parametrize("line", SHELL)
def test_a_line_of_the_shell_s_own_commands_works(line: str, tmp_path: Path) -> None:
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------------- hfax's own commands


def _arguments(command: str) -> list[str]:
    """The words after `hfax`, on small models."""
    for words, stand_in in STAND_INS.items():
        command = command.replace(words, stand_in)
    verb = _verb(command)
    return [*shlex.split(command)[1:], *SMALLER.get(verb, "").split()]


def _run(command: str, text: str, more: tuple[str, ...] = ()) -> str:
    """What an `hfax` command writes, given a text on stdin."""
    done = processes.run(["-m", "hfax", *_arguments(command), *more], text=text, timeout_s=500)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).strip()
    return done.stdout


def _run_pipeline(line: str, more: tuple[str, ...] = ()) -> str:
    """What the last command of `printf … | hfax … < file | jq .field` writes."""
    text = "Hello\n"
    for command in line.split(" | "):
        command, _, file = command.partition(" < ")
        if command.startswith("printf "):
            text = shlex.split(command)[1].encode().decode("unicode_escape")
        elif command.startswith("jq ."):
            text = str(json.loads(text)[command.removeprefix("jq .")])
        else:
            text = _run(command, Path(file.strip()).read_text() if file else text, more)
    return text


def _run_line(line: str) -> str:
    """What a command line writes, after those that it needs."""
    if before := BEFORE.get(line):
        _run_line(before)
    if line.startswith("mkdir "):
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    return [_run_pipeline(pipeline) for pipeline in line.split(" && ")][-1]


def _mark(line: str, seen: set[str]) -> Any:
    """In `make test`: the first line of each verb, unless it takes long or a compiler of its own."""
    verb = _verb(hfax_commands(line)[0])
    if verb == "launch":
        return pytest.mark.multiprocess
    if "--topology" in line or (verb == "plan" and "--no-compile" not in line):
        return pytest.mark.tpu_compile
    is_first = verb not in seen
    seen.add(verb)
    return () if is_first and verb not in LONG else pytest.mark.sweep


def _marked(*verbs: str, but: bool = False) -> list[Any]:
    """Parameters: the lines of these verbs, or of all others."""
    seen: set[str] = set()
    return [
        pytest.param(line, marks=_mark(line, seen)) for line in HFAX if (_verb(hfax_commands(line)[0]) in verbs) != but
    ]


@pytest.fixture
def needs_tpu_compiler(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("tpu_compile") is not None:
        pytest.importorskip("libtpu")


@pytest.mark.usefixtures("workplace", "needs_tpu_compiler")
@pytest.mark.parametrize("line", _marked("serve", "bench serve", "bench attack", "launch", but=True), ids=str)
def test_a_command_line_works(line: str) -> None:
    _run_line(line)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("line", _marked("serve"), ids=str)
def test_a_server_starts_and_answers(line: str) -> None:
    if before := BEFORE.get(line):
        _run_line(before)
    arguments = _arguments(line)[1:]
    with servers.started(*arguments) as (_, client, _lines):
        keys = re.findall(r"--api-key (\S+)", line)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        (model,) = client.get("/v1/models", headers=headers).json()["data"]
        if "encoder" in arguments:
            body = {"model": model["id"], "input": ["A text.", "Another one."]}
            assert len(client.post("/v1/embeddings", headers=headers, json=body).json()["data"]) == 2
            return
        body = {"model": model["id"], "prompt": "Return a new", "max_tokens": 3}
        answer = client.post("/v1/completions", headers=headers, json=body).json()
    assert answer["usage"]["completion_tokens"] == 3


@contextlib.contextmanager
def _served(line: str) -> Iterator[tuple[str, str]]:
    """URL and process id of a server for a command line that measures or attacks one: the demo where its page starts that."""
    page, _ = FOUND[line]
    model = (
        ["demo", "--max-model-len", "512"]
        if page in ("docs/tour.md", "docs/serving.md")
        else ["qwen3", "--max-model-len", "2048"]
    )
    keys = [f"--api-key={key}" for key in re.findall(r"-key (\S+)", line)]
    with servers.started(*model, *keys) as (process, client, _lines):
        yield str(client.base_url).rstrip("/"), str(process.pid)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("line", _marked("bench serve", "bench attack"), ids=str)
def test_a_server_is_measured_and_attacked(line: str) -> None:
    with _served(line) as (url, pid):
        here = re.sub(r"http://\S+:8000", url, line).replace("--pid 4321", f"--pid {pid}")
        out = _run(here, "", ("--url", url) if "http://" not in line else ())
    if "bench serve" in line:
        assert [report["errors"] for report in json.loads(out)] == [{}]


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("line", _marked("launch"), ids=str)
def test_a_program_is_launched(line: str) -> None:
    """With an address of a coordinator, both of the processes are started here."""
    here = line.replace("10.0.0.1:8476", f"127.0.0.1:{free_port(2)}")
    both = [here, here.replace("--process-id 0", "--process-id 1")] if here != line else [here]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outs = list(pool.map(lambda command: _run(command, ""), both))
    if "script.py" in line:
        assert set(re.findall(r"process \d of \d", "".join(outs))) == {"process 0 of 2", "process 1 of 2"}
