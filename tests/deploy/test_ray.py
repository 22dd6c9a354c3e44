"""What deploy/ holds for Ray, on this machine: two replicas behind one address, and one model over two actors."""

import concurrent.futures
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU
from hfax.launch.ports import free_port

pytestmark = pytest.mark.multiprocess

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVER = """
import json, sys, time
import ray
from ray import serve
import ray_serve

ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
settings = ray_serve.Settings(min_replicas=2, max_replicas=2, max_new_tokens=16, batch_size=4, num_cpus=0.5)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(ray_serve.app(settings))
print("ready", flush=True)
sys.stdin.readline()
for actor in ray.util.list_named_actors(all_namespaces=True):
    if "SERVE_REPLICA" in actor["name"]:
        ray.kill(ray.get_actor(**actor), no_restart=True)
        break
print("killed", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""


def environment() -> dict[str, str]:
    paths = [str(DEPLOY), str(DEPLOY.parent / "src")]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    return {**settings, "RAY_USAGE_STATS_ENABLED": "0", "XLA_FLAGS": ""}


@pytest.mark.timeout(400)
def test_two_replicas(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "stderr"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        try:
            use_replicas(server, port, log)
        finally:
            server.kill()


def use_replicas(server: subprocess.Popen, port: int, log: Path) -> None:
    assert server.stdin is not None
    assert server.stdout is not None

    def post(body: dict) -> tuple[int, dict]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait_for(line: str) -> None:
        for written in server.stdout:  # pyright: ignore[reportOptionalIterable]
            if written.strip() == line:
                return
        raise AssertionError(log.read_text()[-3000:])

    wait_for("ready")
    model = AutoModelForTPU.from_pretrained("demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.folder)
    prompts = ["Return a new list", "Raise an error if", "The name of the", "Open a file and"]
    expected = {}
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="np")["input_ids"]
        tokens = np.asarray(model.generate(ids, max_new_tokens=8, do_sample=False))[0, ids.shape[1] :]
        expected[prompt] = tokenizer.decode(tokens, skip_special_tokens=True)

    def ask(index: int) -> tuple[str, tuple[int, dict]]:
        prompt = prompts[index % len(prompts)]
        return prompt, post({"prompt": prompt, "max_new_tokens": 8, "do_sample": False})

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    assert {status for _, (status, _) in answers} == {200}
    assert all(answer["text"] == expected[prompt] for prompt, (_, answer) in answers)
    assert len({answer["replica"] for _, (_, answer) in answers}) == 2

    assert post({"prompt": "a " * 2000})[0] == 400
    assert "context holds 512" in post({"prompt": "a " * 2000, "max_new_tokens": 4})[1]["detail"]
    assert post({"prompt": "x", "max_new_tokens": 17})[0] == 400
    assert post({"prompt": ""})[0] == post({"prompt": "x", "temprature": 1})[0] == 422
    assert post({"prompt": "x", "do_sample": True, "temperature": -1, "max_new_tokens": 2})[0] == 400

    server.stdin.write("\n")
    server.stdin.flush()
    wait_for("killed")
    # the other one takes what comes
    answers = [ask(index) for index in range(4)]
    assert all(answer["text"] == expected[prompt] for prompt, (_, answer) in answers)
    server.stdin.write("\n")
    server.stdin.flush()
    assert server.wait(60) == 0


def test_the_file_for_serve_deploy() -> None:
    code = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
import ray_serve
deployed = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1])))
print(ray_serve.app(ray_serve.Settings(**deployed.applications[0].args)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEPLOY / "ray_serve.yaml")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Application" in done.stdout


@pytest.mark.timeout(300)
def test_one_model_over_two_actors() -> None:
    model = AutoModelForTPU.from_pretrained("demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.folder)
    ids = tokenizer("Return a new list", return_tensors="np")["input_ids"]
    expected = tokenizer.decode(
        np.asarray(model.generate(ids, max_new_tokens=32, do_sample=False))[0], skip_special_tokens=True
    )
    command = [sys.executable, str(DEPLOY / "ray_slice.py"), "--hosts", "2", "--cpu-devices", "2"]
    done = subprocess.run(
        [*command, "--parallelism", "data=2,tensor=2"], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout
