"""Hub repositories, served over real HTTP on loopback.

Each call runs in a process of its own, since huggingface_hub reads its endpoint and its cache folder once, on import.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from safetensors.numpy import save as save_bytes

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import TOKEN, Hub, Repository, serve_hub

SMALL = save_bytes({"w": np.arange(4, dtype=np.float32)})
LARGE = save_bytes({"w": np.arange(6 << 20, dtype=np.float32)})
CHUNK_BYTES = 10 << 20
"""huggingface_hub hands a download on in such pieces; what follows the last whole one is lost with its connection."""
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
COMPANIONS = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "tokenizer.model": b"spm",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
}
LEFT_OUT = {
    **dict.fromkeys(("README.md", "LICENSE.txt", ".gitattributes", "trainer_state.json", "training_args.bin"), b"x"),
    **dict.fromkeys(
        ("flax_model.msgpack", "tf_model.h5", "model.gguf", "onnx/model.onnx", "original/config.json"), b"x"
    ),
    **dict.fromkeys(("consolidated.safetensors", "original/consolidated.00.pth", "model.fp16.safetensors"), b"x"),
}

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("error")
from hfax.errors import HfaxError
from hfax.load.source import resolve_checkpoint
from hfax.phases import listen
events = []
name, options = json.loads(sys.argv[1])
try:
    with listen(lambda event: events.append((event.name, event.detail, event.seconds is not None))):
        source = resolve_checkpoint(name, **options)
    found = {"folder": str(source.folder), "revision": source.revision, "format": source.format,
             "weights": [path.name for path in source.weight_files], "events": events,
             "files": sorted(p.relative_to(source.folder).as_posix() for p in source.folder.rglob("*") if p.is_file())}
except HfaxError as error:
    found = {"error": type(error).__name__, "text": str(error), "events": events}
unwanted = sorted({"jax", "torch", "transformers"} & set(sys.modules))
print(json.dumps({**found, "unwanted": unwanted}))
"""


class Client:
    """Calls `resolve_checkpoint` in a fresh process with a cache of its own."""

    def __init__(self, endpoint: str, home: Path) -> None:
        hf = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = {**hf, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        self.cache = home / "hub"

    def command(self, name: str, options: dict[str, Any]) -> list[str]:
        return [sys.executable, "-c", SCRIPT, json.dumps([name, options])]

    def resolve(self, name: str, *, environment: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        done = subprocess.run(
            self.command(name, options),
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["unwanted"] == [] or result.get("format") == "gguf"  # whose config transformers writes
        return {**result, "stderr": done.stderr}

    def leftovers(self) -> list[str]:
        return [path.name for path in self.cache.rglob("*") if path.name.endswith(".incomplete")]


@pytest.fixture
def hub() -> Iterator[Hub]:
    sharded = {**INDEX["weight_map"]}
    with serve_hub(
        acme__small=Repository(files={**COMPANIONS, **LEFT_OUT, "model.safetensors": SMALL, "pytorch_model.bin": b"x"}),
        acme__sharded=Repository(
            files={
                **COMPANIONS,
                **dict.fromkeys(sharded.values(), SMALL),
                "model-00003-of-00002.safetensors": b"not in the index",
                "model.safetensors.index.json": json.dumps(INDEX).encode(),
                "pytorch_model.bin.index.json": b"{}",
            }
        ),
        acme__torn=Repository(
            files={**COMPANIONS, "model.safetensors.index.json": json.dumps(INDEX).encode(), sharded["a"]: SMALL}
        ),
        acme__pickle=Repository(files={**COMPANIONS, "pytorch_model.bin": b"x", "tf_model.h5": b"x"}),
        acme__code=Repository(files={**COMPANIONS, "model.safetensors": SMALL, "modeling_acme.py": b"x = 1"}),
        acme__large=Repository(files={**COMPANIONS, "model.safetensors": LARGE}),
        acme__tensorflow=Repository(files={**COMPANIONS, "tf_model.h5": b"x"}),
        acme__raw=Repository(files={"consolidated.00.pth": b"x", "params.json": b"{}"}),
        acme__gated=Repository(files={**COMPANIONS, "model.safetensors": SMALL}, is_gated=True),
        acme__private=Repository(files={**COMPANIONS, "model.safetensors": SMALL}, is_private=True),
    ) as hub:
        yield hub


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub.url, tmp_path / "home")


def test_only_the_model_in_one_format_is_downloaded(hub: Hub, client: Client) -> None:
    found = client.resolve("acme/small")
    assert found["files"] == sorted([*COMPANIONS, "model.safetensors"])
    assert (found["revision"], found["format"], found["weights"]) == ("c" * 40, "safetensors", ["model.safetensors"])
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == SMALL
    assert found["events"] == [["download", "acme/small", False], ["download", "acme/small", True]]


@pytest.mark.parametrize("name", ["acme/gguf:Q4_K_M", "acme/gguf:q4_k_m", "acme/gguf/quants/m-Q4_K_M.gguf"])
def test_one_of_several_gguf_files_is_downloaded_and_found_again(
    hub: Hub, client: Client, tmp_path: Path, name: str
) -> None:
    sizes = {"vocab_size": 8, "context_length": 8, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8}
    metadata = {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2, "rope.dimension_count": 4}
    named = {f".{key}": value for key, value in metadata.items()} | {".attention.layer_norm_rms_epsilon": 1e-6}
    file = write_gguf(tmp_path / "m.gguf", "llama", named, {"token_embd.weight": np.zeros((8, 8), np.float32)})
    others = dict.fromkeys(("README.md", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "quants/m-Q4_K_S.gguf"), b"x")
    hub.repositories["acme/gguf"] = Repository(files={**others, "quants/m-Q4_K_M.gguf": file.read_bytes()})
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        found = client.resolve(name, environment={"HFAX_HOME": str(tmp_path), **environment})
        assert found.get("text") is None
        assert (found["format"], found["weights"]) == ("gguf", ["m-Q4_K_M.gguf"])
    assert sorted(path.name for path in client.cache.rglob("*.gguf")) == ["m-Q4_K_M.gguf"]
    wrong = client.resolve("acme/gguf:Q2_K", environment={"HFAX_HOME": str(tmp_path)})
    assert wrong["error"] == "CheckpointNotFoundError"
    assert "m-Q8_0" in wrong["text"]


UPLOAD = """
import sys, warnings
import transformers
from hfax import AutoModelForTPU
from hfax.errors import HfaxError
config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForTPU.from_config(config, dtype="float32")
try:
    print(model.push_to_hub("acme/new", token=sys.argv[1], private=True, commit_message="First"))
    again = AutoModelForTPU.from_pretrained("acme/new", token=sys.argv[1])
    assert all((again.params[name] == array).all() for name, array in model.params.items())
except HfaxError as error:
    print(type(error).__name__, error.fix)
"""


def test_a_model_is_uploaded_and_loaded_again(hub: Hub, client: Client) -> None:
    environment = {**client.environment, "JAX_PLATFORMS": "cpu"}

    def upload(token: str) -> str:
        command = [sys.executable, "-c", UPLOAD, token]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "CheckpointAccessError Check that the token has write access" in upload("hf_other")
    assert "acme/new" not in hub.repositories
    assert upload(TOKEN).strip() == f"{hub.url}/acme/new/commit/{'c' * 40}"
    made = hub.repositories["acme/new"]
    assert made.is_private
    assert sorted(made.files) == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_terminal_sees_progress_bars(hub: Hub, client: Client) -> None:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with subprocess.Popen(
        client.command("acme/small", {}), env=client.environment, stdout=subprocess.DEVNULL, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end was closed
            while piece := os.read(ours, 4096):
                shown += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"model.safetensors: 100%" in shown


def test_a_cached_model_is_not_downloaded_again_and_needs_no_network(hub: Hub, client: Client) -> None:
    first = client.resolve("acme/small")
    hub.requests.clear()
    again = client.resolve("acme/small")
    assert again["folder"] == first["folder"]
    assert [path for _, path, _ in hub.requests] == ["/api/models/acme/small"]
    hub.requests.clear()
    by_option = client.resolve("acme/small", local_files_only=True)
    by_environment = client.resolve("acme/small", environment={"HF_HUB_OFFLINE": "1"})
    by_commit = client.resolve("acme/small", revision="c" * 40, local_files_only=True)
    assert hub.requests == []
    for found in (again, by_option, by_environment, by_commit):
        assert found["folder"] == first["folder"]
        assert found["events"] == []


def test_unreachable_or_failing_hub_falls_back_to_the_cache_with_a_warning(hub: Hub, client: Client) -> None:
    first = client.resolve("acme/small")
    hub.status = 503
    failing = client.resolve("acme/small")
    unreachable = client.resolve("acme/small", environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    for found in (failing, unreachable):
        assert found["folder"] == first["folder"]
        assert "using the cached commit" in found["stderr"]


def test_sharded_models_fetch_what_the_index_names(hub: Hub, client: Client) -> None:
    found = client.resolve("acme/sharded")
    assert found["weights"] == sorted(INDEX["weight_map"].values())
    assert found["files"] == sorted([*COMPANIONS, *found["weights"], "model.safetensors.index.json"])


def test_a_pickle_is_fetched_where_there_is_nothing_better(hub: Hub, client: Client) -> None:
    found = client.resolve("acme/pickle")
    assert (found["format"], found["weights"]) == ("pytorch_bin", ["pytorch_model.bin"])


def test_code_is_fetched_only_when_allowed(hub: Hub, client: Client) -> None:
    assert "modeling_acme.py" not in client.resolve("acme/code")["files"]
    found = client.resolve("acme/code", allow_code=True)
    assert "modeling_acme.py" in found["files"]
    assert hub.downloads().count("model.safetensors") == 1


def test_a_broken_connection_is_resumed_where_it_broke(hub: Hub, client: Client) -> None:
    hub.breaks_after = CHUNK_BYTES + 1_000_000
    found = client.resolve("acme/large")
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == LARGE
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={CHUNK_BYTES}-"]


def test_ctrl_c_while_downloading_leaves_a_cache_that_the_next_call_completes(hub: Hub, client: Client) -> None:
    hub.breaks_after, hub.always_breaks = 1_000, True
    with subprocess.Popen(
        client.command("acme/large", {}), env=client.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 30
        while "model.safetensors" not in hub.downloads() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in stderr
    assert client.leftovers() == []
    partial = client.resolve("acme/large", local_files_only=True)
    assert partial["error"] == "CheckpointNotFoundError"
    assert "only partly in the cache" in partial["text"]
    hub.breaks_after = None
    hub.requests.clear()
    assert client.resolve("acme/large")["weights"] == ["model.safetensors"]
    assert hub.downloads() == ["model.safetensors"]


# As in test_save: a limit on the size of files stands for a full disk.
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n" + SCRIPT


def test_full_disk_is_an_error_and_leaves_no_half_file(hub: Hub, client: Client) -> None:
    command = [sys.executable, "-c", FULL_DISK, json.dumps(["acme/large", {}])]
    done = subprocess.run(command, env=client.environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["error"] == "HfaxError"
    assert "does not fit on the disk" in result["text"]
    assert client.leftovers() == []


ERRORS = {
    "no such repository": (("acme/nothing", {}), "CheckpointNotFoundError", "nor a repository on the Hub (HTTP 401)"),
    "no such repository, with a token": (("acme/nothing", {"token": TOKEN}), "CheckpointNotFoundError", "HTTP 404"),
    "private": (("acme/private", {}), "CheckpointNotFoundError", "it is private and no token was sent"),
    "no such revision": (("acme/small", {"revision": "v9"}), "CheckpointNotFoundError", "has no revision 'v9'"),
    "gated, no token": (("acme/gated", {}), "CheckpointAccessError", "is gated (HTTP 401)"),
    "gated, no token, why": (("acme/gated", {"token": False}), "CheckpointAccessError", "No token was sent"),
    "gated, no licence": (("acme/gated", {"token": "hf_other"}), "CheckpointAccessError", "not been granted access"),
    "bad token": (("acme/small", {"token": "hf_bad"}), "CheckpointAccessError", "refused access to 'acme/small'"),
    "only tensorflow": (("acme/tensorflow", {}), "CheckpointNotFoundError", "it has tf_model.h5"),
    "no config": (("acme/raw", {}), "CheckpointNotFoundError", "'acme/raw' has no config.json"),
    "missing shard": (("acme/torn", {}), "CheckpointCorruptError", "1 of 2 shards that the index names are missing"),
    "not cached": (("acme/small", {"local_files_only": True}), "CheckpointNotFoundError", "local_files_only=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_refusals_are_errors_that_say_what_to_do(hub: Hub, client: Client, case: str) -> None:
    (name, options), kind, text = ERRORS[case]
    found = client.resolve(name, **options)
    assert found["error"] == kind
    assert text in found["text"]
    assert len(found["text"].splitlines()) == 3
    assert not [name for name in hub.downloads() if name.endswith((".safetensors", ".bin"))]
    assert client.leftovers() == []


def test_offline_and_unreachable_without_a_cache_say_why(hub: Hub, client: Client) -> None:
    offline = client.resolve("acme/small", environment={"HF_HUB_OFFLINE": "1"})
    unreachable = client.resolve("acme/small", environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert offline["error"] == unreachable["error"] == "CheckpointNotFoundError"
    assert "HF_HUB_OFFLINE is set" in offline["text"]
    assert "the Hub could not be reached" in unreachable["text"]


def test_gated_and_private_models_open_with_the_right_token(hub: Hub, client: Client) -> None:
    for name in ("acme/gated", "acme/private"):
        assert client.resolve(name, token=TOKEN)["weights"] == ["model.safetensors"]
        assert client.resolve(name, environment={"HF_TOKEN": TOKEN})["events"] == []
