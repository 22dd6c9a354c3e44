"""Runs of several processes on this machine: they agree, they read their own slices, they end together."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.launch.cluster import checked_address, detected
from hfax.launch.ports import free_port

CONFIG = transformers.Qwen2Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    initializer_range=0.2,
    tie_word_embeddings=False,
    eos_token_id=None,
    pad_token_id=0,
)
IDS = np.random.default_rng(0).integers(3, 120, (8, 12))
SCRIPT = """
import json, os, sys, time
import numpy as np
from hfax.load import safetensors_file

read = {"bytes": 0}
own = safetensors_file.SafetensorsFile._allocate
def counted(self, shape, dtype):
    read["bytes"] += int(np.prod(shape)) * dtype.itemsize
    return own(self, shape, dtype)
safetensors_file.SafetensorsFile._allocate = counted

from hfax import AutoModelForTPU
import jax

folder, sizes, what, out = sys.argv[1:]
model = AutoModelForTPU.from_pretrained(folder, parallelism=json.loads(sizes))
loaded = read["bytes"]
ids = np.random.default_rng(0).integers(3, 120, (8, 12))
tokens = np.asarray(model.generate(ids, max_new_tokens=6, do_sample=False)).tolist()
index = jax.process_index()
open(f"{out}.{index}", "w").write(json.dumps({"tokens": tokens, "bytes": loaded, "devices": jax.device_count()}))
if what == "wait":
    while True:
        model.generate(ids, max_new_tokens=6, do_sample=False)
if what == "fail" and index == 1:
    raise SystemExit(3)
if what == "fail":
    time.sleep(120)
if what == "save":
    model.save_pretrained(out + "-saved")
"""


DRIVEN = """
import json, sys
import jax, numpy as np
from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError

folder, out = sys.argv[1:]
model = AutoModelForTPU.from_pretrained(folder, parallelism={"data": 2, "tensor": 4})
ids = np.random.default_rng(0).integers(3, 120, (8, 12))

class Streamer:
    def __init__(self, breaks_at):
        self.got, self.breaks_at = [], breaks_at
    def put(self, value):
        self.got.append(value.reshape(-1).tolist())
        if len(self.got) == self.breaks_at:
            raise ConnectionError("the listener left")
    def end(self):
        self.got.append("end")

def main(model):
    found = {"process": jax.process_index()}
    found["greedy"] = np.asarray(model.generate(ids, max_new_tokens=6, do_sample=False)).tolist()
    for bad in (lambda: model.generate(ids, max_new_tokens=0), lambda: model.generate(ids + 1000)):
        try:
            bad()
        except InvalidInputError:
            found["bad"] = found.get("bad", 0) + 1
    try:
        model.generate(ids[:1], max_new_tokens=30, streamer=Streamer(4))
    except ConnectionError as error:
        found["left"] = str(error)
    streamer = Streamer(None)
    tokens = np.asarray(model.generate(ids[:1], max_new_tokens=30, do_sample=False, streamer=streamer))[0, 12:].tolist()
    found["streamed"] = [tokens, streamer.got[1:]]
    # no seed is given: process 0 draws one for all
    first, again = (np.asarray(model.generate(ids, max_new_tokens=6, do_sample=True, seed=s)).tolist() for s in (None, 5))
    found["sampled"] = first
    found["mapped"] = model.map(ids.tolist(), batch_size=4, max_new_tokens=3, do_sample=False, progress=False)
    found["logits"] = np.asarray(jax.jit(lambda: 0)()).tolist()
    model.save_pretrained(out + "-saved", format="orbax")
    return found

found = model.drive(main)
assert (found is None) == (jax.process_index() != 0)
if found is not None:
    json.dump(found, open(out, "w"))
again = AutoModelForTPU.from_pretrained(out + "-saved", parallelism={"tensor": 8})
tokens = np.asarray(again.generate(ids, max_new_tokens=6, do_sample=False)).tolist()
json.dump(tokens, open(f"{out}.{jax.process_index()}", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Written by transformers: nothing in it can be mapped, so what is read is what is allocated."""
    path = tmp_path_factory.mktemp("checkpoint")
    import torch

    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(CONFIG).save_pretrained(path)
    return path


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", "from hfax.cli.app import main; main()", "launch", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"data": 2, "tensor": 4}])
def test_two_processes_write_what_one_does(folder, script, tmp_path, sizes):
    out = tmp_path / "out"
    run = start("--local", 2, "--cpu-devices", 4, script, folder, json.dumps(sizes), "save", out)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    plain = AutoModelForTPU.from_pretrained(folder)
    expected = np.asarray(plain.generate(IDS, max_new_tokens=6, do_sample=False)).tolist()
    results = [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(2)]
    assert [r["devices"] for r in results] == [8, 8]
    assert [r["tokens"] for r in results] == [expected] * 2
    if sizes == {"tensor": 8}:
        total = sum(p.nbytes for p in plain.params.values())
        small = sum(p.nbytes for n, p in plain.params.items() if p.ndim < 2 or "k_proj" in n or "v_proj" in n)
        # each reads its half, and what is on every device
        assert all(r["bytes"] <= total / 2 + small for r in results)
        assert sum(r["bytes"] for r in results) >= total
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{out}-saved").state_dict()
    for name, array in plain.params.items():
        np.testing.assert_array_equal(saved[name].numpy(), np.asarray(array))


@pytest.mark.multiprocess
def test_process_0_drives(folder, tmp_path):
    """And weights saved by two processes are read by two, onto another mesh."""
    script, out = tmp_path / "driven.py", tmp_path / "out"
    script.write_text(DRIVEN)
    run = start("--local", 2, "--cpu-devices", 4, script, folder, out)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    found = json.loads(out.read_text())
    plain = AutoModelForTPU.from_pretrained(folder)
    expected = np.asarray(plain.generate(IDS, max_new_tokens=6, do_sample=False)).tolist()
    assert found["greedy"] == expected
    assert (found["process"], found["bad"], found["left"]) == (0, 2, "the listener left")
    tokens, streamed = found["streamed"]
    assert [*[[token] for token in tokens], "end"] == streamed
    assert tokens == np.asarray(plain.generate(IDS[:1], max_new_tokens=30, do_sample=False))[0, 12:].tolist()
    assert np.shape(found["sampled"]) == (8, 18)
    assert found["mapped"] == [{"tokens": row[12:15]} for row in expected]
    assert [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(2)] == [expected] * 2


OWN = """
import json, sys
import jax, numpy as np
from hfax import AutoModelForTPU

folder, out = sys.argv[1:]
model = AutoModelForTPU.from_pretrained(folder)  # on a device of its own
index = jax.process_index()
ids = np.random.default_rng(0).integers(3, 120, (8, 12))[index : index + 1]
texts = [np.asarray(model.generate(ids, max_new_tokens=6 + 9 * index, do_sample=False)).tolist() for _ in range(1 + 2 * index)]
json.dump(texts, open(f"{out}.{index}", "w"))
"""


@pytest.mark.multiprocess
def test_processes_with_models_of_their_own(folder, tmp_path):
    """They write what they like, as often as they like, and wait for nobody."""
    script, out = tmp_path / "own.py", tmp_path / "out"
    script.write_text(OWN)
    run = start("--local", 2, "--cpu-devices", 1, script, folder, out)
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    plain = AutoModelForTPU.from_pretrained(folder)
    for index in range(2):
        wanted = np.asarray(
            plain.generate(IDS[index : index + 1], max_new_tokens=6 + 9 * index, do_sample=False)
        ).tolist()
        assert json.loads((tmp_path / f"out.{index}").read_text()) == [wanted] * (1 + 2 * index)


@pytest.mark.multiprocess
def test_launchers_of_two_machines_end_together(folder, script, tmp_path):
    address = f"127.0.0.1:{free_port(2)}"
    runs = [
        start(
            *("--coordinator", address, "--processes", 2, "--process-id", i, "--cpu-devices", 4),
            *(script, folder, '{"tensor": 8}', "wait", tmp_path / "out"),
        )
        for i in range(2)
    ]
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"out.{i}").exists() for i in range(2)):
        assert time.monotonic() < deadline
        assert all(run.poll() is None for run in runs)
        time.sleep(0.5)
    child = subprocess.run(
        ["pgrep", "-P", str(runs[1].pid), "-f", "hfax.launch.child"], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(child[0]), signal.SIGKILL)
    started = time.monotonic()
    outputs = [run.communicate(timeout=60) for run in runs]
    assert time.monotonic() - started < 30
    for run, (_, errors) in zip(runs, outputs, strict=True):
        assert run.returncode == 1
        messages = [line for line in errors.splitlines() if line.startswith("hfax launch:")]
        assert len(messages) == 1
        assert "Process 1 of 2" in messages[0]
        assert "SIGKILL" in messages[0]
        assert "Traceback" not in errors


@pytest.mark.multiprocess
def test_an_exit_code_ends_the_run(folder, script, tmp_path):
    run = start("--local", 2, "--cpu-devices", 1, script, folder, '{"tensor": 2}', "fail", tmp_path / "out")
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "Process 1 of 2" in errors
    assert "exit code 3" in errors


@pytest.mark.multiprocess
def test_processes_that_do_not_come(script, tmp_path):
    address = f"127.0.0.1:{free_port(2)}"
    run = start("--coordinator", address, "--processes", 3, "--process-id", 0, "--start-timeout", 3, script)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "Of 3 processes, 1, 2 did not connect within 3 s" in errors
    run = start("--coordinator", address, "--processes", 3, "--process-id", 2, "--start-timeout", 3, script)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "did not reach process 0" in errors


@pytest.mark.multiprocess
def test_ctrl_c_ends_every_process(folder, script, tmp_path):
    run = start("--local", 2, "--cpu-devices", 1, script, folder, '{"tensor": 2}', "wait", tmp_path / "out")
    deadline = time.monotonic() + 200
    while not all((tmp_path / f"out.{i}").exists() for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    assert subprocess.run(["pgrep", "-f", str(script)], capture_output=True, check=False).returncode == 1


@pytest.mark.multiprocess
def test_verbs_of_hfax():
    run = start(
        *("--local", 2, "--cpu-devices", 1, "hfax", "generate", "demo", "Return a new"),
        *("--parallelism", "tensor=2", "--max-new-tokens", 4),
    )
    written, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert (
        len([line for line in written.splitlines() if line.strip() and "Gloo" not in line]) <= 2
    )  # one process speaks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.py",), "Script not found: none.py"),
        (("hfax", "env"), "No multi-process run"),
        (("--local", 2, "--processes", 2, "hfax", "env"), "cannot be combined with --coordinator"),
        (("--processes", 2, "hfax", "env"), "not a valid run"),
        (("--coordinator", "here", "--processes", 2, "--process-id", 0, "hfax", "env"), "coordinator address"),
    ],
)
def test_what_is_no_run(arguments, words):
    run = start(*arguments)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert words in errors


def test_clusters_that_jax_knows():
    assert detected({}) is None
    assert detected({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) is None
    assert detected({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) == "Slurm"
    assert detected({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert detected({"TPU_WORKER_HOSTNAMES": "a,b"}) == "a TPU pod slice"
    assert checked_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:0", ":80", "host:65535"):
        with pytest.raises(InvalidInputError):
            checked_address(text)
