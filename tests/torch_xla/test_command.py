"""`--backend torch_xla` on the command line, and pipelines; without JAX."""

import json
import subprocess
import sys

import pytest
import transformers

import hfax
from hfax.backends.torch_xla import runtime
from hfax.backends.torch_xla.diagnosis import diagnose
from hfax.errors import BackendNotAvailableError


def command(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "hfax", *arguments], input=text, capture_output=True, text=True, check=False
    )


def test_verbs() -> None:
    options = ("--backend", "torch_xla")
    done = command("generate", "demo", "Return a new list", *options, "--max-new-tokens", "8", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    done = command("classify", "demo", "Nice", "--labels", "POSITIVE,NEGATIVE", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert "POSITIVE" in done.stdout
    done = command("chat", "demo", *options, "--max-new-tokens", "4", text="hello\n")
    assert done.returncode == 0, done.stderr


def test_no_jax_is_imported() -> None:
    code = """
import sys
import hfax
model = hfax.AutoModelForTPU.from_pretrained("demo", backend="torch_xla")
model.generate([[5, 6]], max_new_tokens=2)
assert not {"jax", "jaxlib", "torchax"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pipelines() -> None:
    write = hfax.pipeline("text-generation", "demo", backend="torch_xla")
    assert write("Return a new", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("Return a new")


def test_the_doctor_counts() -> None:
    done = command("doctor", "demo", "--backend", "torch_xla", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["first_call"]["compilations"] == 2
    assert "compilations" not in found["second_call"]
    assert found["problems"] == []
    assert "masks-from-positions" in found["patches"]
    # a model whose code looks at values is said to do so
    seen = diagnose(transformers.LongformerConfig(attention_window=[4, 4]), task="fill-mask")
    assert seen.problems or seen.first_call["transfers_to_host"] > 1
    assert command("doctor", "demo", "--backend", "mlx").returncode == 1


def test_the_wrong_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def broken(name: str, *rest: object, **options: object) -> object:
        if name == "torch_xla":
            raise ImportError("_XLAC.so: undefined symbol: _ZN5torch4lazy")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(BackendNotAvailableError, match=r"is not compatible with torch 2\.9\.0"):
        runtime.require()
