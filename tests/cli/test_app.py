"""The command as a whole: help, version, exit codes, errors, start-up, the reference page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from command_line import COMMAND, process_environment, run_process

from hfax import __version__
from hfax.cli.reference import render_reference

VERBS = ("generate", "chat", "classify", "env")


def test_bare_command_prints_help_and_succeeds(hfax_here):
    done = hfax_here()
    assert done.code == 0
    assert all(verb in done.out for verb in VERBS)
    assert done.err == ""


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_examples(hfax_here, verb):
    done = hfax_here(verb, "--help")
    assert done.code == 0
    assert "Examples" in done.out
    assert f"hfax {verb} " in done.out


def test_version(hfax_here):
    assert hfax_here("--version").out == f"hfax {__version__}\n"


def test_help_imports_no_heavy_library():
    """Help once took seconds in such tools because a verb's file imported torch."""
    code = (
        "import sys; from hfax.cli.app import run; assert run(['generate', '--help']) == 0; "
        "bad = {'torch', 'jax', 'transformers', 'torchax', 'numpy', 'huggingface_hub'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=process_environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "demo"],
        ["generate", "demo", "x", "--no-such-option"],
        ["generate", "demo", "x", "--max-new-tokens", "0"],
        ["generate", "demo", "x", "--max-new-tokens", "many"],
        ["generate", "demo", "x", "--temperature", "-1"],
        ["generate", "demo", "x", "--temperature", "nan"],
        ["generate", "demo", "x", "--top-k", "0"],
        ["generate", "demo", "x", "--top-p", "1.5"],
        ["generate", "demo", "x", "--min-p", "-0.1"],
        ["generate", "demo", "x", "--seed", "-1"],
        ["generate", "demo", "x", "--stop", ""],
        ["generate", "demo", "x", "--dtype", "int3"],
        ["generate", "demo", "x", "--system", "be brief"],
        ["classify", "demo", "x", "--labels", "ONE"],
        ["classify", "demo", "x", "--labels", "A,A"],
        ["classify", "demo", "x", "--labels", "A,"],
        ["classify", "demo", "x", "--labels", "A,B", "--template", "{text}"],
        ["classify", "demo", "x", "--labels", "A,B", "--template", "{label} {text}"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_before_anything_is_loaded(hfax_here, arguments):
    done = hfax_here(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "load" not in done.err
    assert "Usage: hfax" in done.err


def test_wrong_values_say_what_would_be_right(hfax_here):
    assert "Pass 1 or more" in hfax_here("generate", "demo", "x", "--max-new-tokens", "0").err
    assert "Pass 0 for greedy" in hfax_here("generate", "demo", "x", "--temperature", "-1").err


@pytest.mark.parametrize("verb", [["generate"], ["classify"], ["chat"]], ids=" ".join)
def test_missing_folder_is_an_error_in_three_parts_without_traceback(hfax_here, tmp_path, verb):
    text = [] if verb == ["chat"] else ["text"]
    done = hfax_here(*verb, tmp_path / "nothing", *text)
    assert done.code == 1
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("Error: ")
    assert "nothing" in lines[0]
    assert lines[1].startswith("  Why: ")
    assert lines[2].startswith("  Fix: ")
    assert len(lines) == 3


def test_traceback_on_request(tmp_path):
    for flags, environment in (["-v"], {}), ([], {"HFAX_DEBUG": "1"}):
        done = run_process("generate", tmp_path / "nothing", "x", *flags, **environment)
        assert done.code == 1
        assert "Traceback" in done.err
        assert "Fix: " in done.err


def test_verbosity_of_one_run_does_not_leak_into_the_next(hfax_here, tmp_path):
    from hfax.errors import HfaxError

    with pytest.raises(HfaxError):
        hfax_here("generate", tmp_path / "nothing", "x", "-v")
    assert "Traceback" not in hfax_here("generate", tmp_path / "nothing", "x").err


def test_shell_completion_is_offered():
    environment = process_environment(_HFAX_COMPLETE="complete_bash", COMP_WORDS="hfax gen", COMP_CWORD="1")
    done = subprocess.run(
        [sys.executable, "-c", "from hfax.cli.app import main; main()"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.split() == ["generate"]


def test_reference_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == render_reference(), "run: python -m hfax.cli.reference > docs/cli.md"


def test_env_shows_versions_devices_and_settings_but_no_secret(hfax_here, monkeypatch, shared_home):
    jax.devices()  # XLA reads its flags once in a process: those below are not for the tests that follow
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:password@proxy")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    (shared_home / "one").mkdir(exist_ok=True)
    (shared_home / "one" / "program").write_bytes(bytes(2000))
    text = hfax_here("env")
    assert text.code == 0
    assert f"hfax: {__version__}" in text.out
    assert "HF_TOKEN=set" in text.out
    assert "XLA_FLAGS=--xla_dump_to=/tmp/x" in text.out
    assert "jax backend: cpu" in text.out
    assert str(shared_home) in text.out
    assert "libtpu: " in text.out
    report = json.loads(hfax_here("env", "--json").out)
    assert report["packages"]["jax"] is not None
    assert report["jax"]["devices"][0].startswith("cpu:0")
    assert report["caches"]["hfax"]["bytes"] >= 2000
    for output in (text.out, text.err, json.dumps(report)):
        assert "verysecret" not in output
        assert "password" not in output


def test_env_reports_a_backend_that_does_not_come_up():
    environment = process_environment() | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run([*COMMAND, "env", "--json"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert json.loads(done.stdout)["jax"]["error"]
