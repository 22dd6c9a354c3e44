"""`hfax chat`, through a pipe and at a terminal."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from terminal import Terminal
from tiny_checkpoints import CONTEXT, make_tokenizer, save_language_model

from hfax.generation.generate import GenerationLoop

LENGTH = ("--max-new-tokens", "8", "--temperature", "0")


def reply_by_transformers(folder, messages: list[dict[str, str]], num_tokens: int = 8) -> str:
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    model = LlamaForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=num_tokens)[0, len(ids) :]
    return tokenizer.decode(out, skip_special_tokens=True)


def test_replies_follow_the_whole_history(hfax_here, checkpoint, tmp_path):
    talk = tmp_path / "talk.json"
    stdin = f'Hello\n"""\nHow are\nyou?\n"""\n/save {talk}\n'
    done = hfax_here("chat", checkpoint, *LENGTH, "--system", "Be brief.", stdin=stdin)
    assert done.code == 0, done.err
    messages = json.loads(talk.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["Be brief.", "Hello", "How are\nyou?"]
    for i in (2, 4):
        assert messages[i]["content"] == reply_by_transformers(checkpoint, messages[:i])
    assert messages[2]["content"] in done.out
    assert len(re.findall(r"8 tokens, [\d.]+ tokens/s", done.err)) == 2
    assert "tokens/s" not in done.out


def test_a_reply_reads_what_is_new_and_the_conversation_again_after_a_reset(hfax_here, checkpoint, monkeypatch):
    read, start = [], GenerationLoop.start

    def spy(loop, inputs):
        read.append(sorted(inputs)[-1])
        return start(loop, inputs)

    monkeypatch.setattr(GenerationLoop, "start", spy)
    stdin = "Hello, this is a first message\nB\nC\n/reset\nSomething else\n"
    assert hfax_here("chat", checkpoint, *LENGTH, stdin=stdin).code == 0
    assert read == ["input_ids", "new", "new", "input_ids"]


def test_reset_keeps_the_system_message_only(hfax_here, checkpoint, tmp_path):
    stdin = f"Hello\n/system Speak.\n/reset\nAgain\n/save {tmp_path / 'a'}\n/system\n/save {tmp_path / 'b'}\n"
    done = hfax_here("chat", checkpoint, *LENGTH, stdin=stdin)
    assert done.code == 0, done.err
    a = json.loads((tmp_path / "a").read_text())["messages"]
    assert [m["content"] for m in a[:2]] == ["Speak.", "Again"]
    assert a[2]["content"] == reply_by_transformers(checkpoint, a[:2])
    assert json.loads((tmp_path / "b").read_text())["messages"] == a[1:]


def test_saved_conversation_goes_on(hfax_here, checkpoint, tmp_path):
    talk = tmp_path / "talk.json"
    hfax_here("chat", checkpoint, *LENGTH, stdin=f"Hello\n/save {talk}\n")
    done = hfax_here("chat", checkpoint, *LENGTH, "--history", talk, stdin="And you?\n/save\n")
    assert done.code == 0, done.err
    messages = json.loads(talk.read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["Hello", "And you?"]
    assert messages[3]["content"] == reply_by_transformers(checkpoint, messages[:3])


def test_exit_ends_the_chat_before_the_input_does(hfax_here, checkpoint):
    done = hfax_here("chat", checkpoint, *LENGTH, stdin="/exit\nHello\n")
    assert (done.code, done.out) == (0, "")


def test_model_without_template_says_what_to_do_before_loading(hfax_here, base_checkpoint):
    done = hfax_here("chat", base_checkpoint, stdin="Hello\n")
    assert done.code == 1
    assert "has no chat template" in done.err
    assert "hfax generate" in done.err
    assert "load " not in done.err


def test_history_past_the_context_loses_nothing_and_says_how_to_go_on(hfax_here, checkpoint, tmp_path):
    talk = tmp_path / "talk.json"
    long = "Hello there " * CONTEXT
    done = hfax_here("chat", checkpoint, *LENGTH, stdin=f"Hello\n{long}\n/save {talk}\nStill there?\n")
    assert done.code == 1
    assert f"context holds {CONTEXT}" in done.err
    assert "/reset" in done.err
    assert [m["role"] for m in json.loads(talk.read_text())["messages"]] == ["user", "assistant"]
    assert len(re.findall(r"tokens/s", done.err)) == 2


def test_reply_is_cut_where_the_context_ends(hfax_here, checkpoint):
    done = hfax_here("chat", checkpoint, "--temperature", "0", stdin="Hello " * 60 + "\n")
    assert done.code == 0, done.err
    if "stop" not in done.err:
        assert f"context of {CONTEXT} tokens is full" in done.err
        assert "/reset" in done.err


def test_unknown_command_is_not_sent_to_the_model(hfax_here, checkpoint):
    done = hfax_here("chat", checkpoint, *LENGTH, stdin="/nonsense\n")
    assert (done.code, done.out) == (1, "")
    assert "/help" in done.err


def test_unreadable_history_is_found_before_the_model_is(hfax_here, tmp_path):
    done = hfax_here("chat", tmp_path / "nothing", "--history", tmp_path / "talk.json")
    assert done.code == 1
    assert "talk.json could not be read" in done.err


@pytest.mark.multiprocess
def test_at_a_terminal_ctrl_c_stops_the_reply_and_ctrl_d_leaves(tmp_path):
    talk = tmp_path / "talk.json"
    endless = save_language_model(tmp_path / "endless", context=1 << 15)
    with Terminal("chat", endless, "--temperature", "0", "--max-new-tokens", "30000", columns=60) as terminal:
        terminal.wait_for("Ctrl-D to exit")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        time.sleep(0.2)  # readline may miss a signal between its echo and its wait for the next key
        terminal.type("\x03")
        terminal.wait_for("exit to exit")
        terminal.type("Hello there\r")
        terminal.wait_for(r"are.{0,9}are.{0,9}are")
        terminal.wait_for(r"(\x1b\[K| )\r*\nare")  # lines are broken at spaces
        terminal.type("\x03")
        terminal.wait_for("tokens/s, stopped")
        terminal.wait_for("> ")
        terminal.type(f"/save {talk}\r")
        terminal.wait_for("Saved 2 messages")
        terminal.wait_for("> ")
        terminal.type("Hello\r")
        terminal.wait_for("Hello\r*\n")
        terminal.type("\x03")
        terminal.wait_for("was removed|stopped|exit to exit")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    messages = json.loads(talk.read_text())["messages"]
    assert messages[0] == {"role": "user", "content": "Hello there"}
    assert "are" in messages[1]["content"]


def test_at_a_terminal_ctrl_c_ends_generate_with_130_and_shows_the_cursor(checkpoint):
    with Terminal("generate", checkpoint, "Hello", "--max-new-tokens", "250") as terminal:
        terminal.wait_for("starting|load")
        terminal.type("\x03")
        assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.seen
    assert terminal.seen.rfind("\x1b[?25h") >= terminal.seen.rfind("\x1b[?25l")


_WAITING = r"(trace|compile) (prefill|decode)"
"""What the line at the bottom says while a program is made."""


def _wait_until_quiet(programs: Path) -> None:
    """Until the programs of the next reply are there, and five seconds pass without another one."""
    end, changed, seen = time.monotonic() + 240, time.monotonic(), 0
    while seen < 3 or time.monotonic() < changed + 5:  # prefill, decode, and prefill after a cache
        assert time.monotonic() < end
        if (found := len(list(programs.glob("*.program")))) != seen:
            changed, seen = time.monotonic(), found
        time.sleep(0.1)


@pytest.mark.multiprocess
def test_at_a_terminal_the_next_reply_compiles_while_the_person_reads(tmp_path, monkeypatch):
    """The second message finds its programs made, though it needs others than the first: it reads on after the cache."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    model = save_language_model(tmp_path / "model", context=1 << 12)
    programs = tmp_path / "home" / "programs"
    with Terminal("chat", model, "--temperature", "0", "--max-new-tokens", "20") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello there\r")
        assert re.search(_WAITING, terminal.wait_for("tokens/s"))
        terminal.wait_for("> ")
        _wait_until_quiet(programs)
        terminal.type("Hello again\r")
        assert not re.search(_WAITING, terminal.wait_for("tokens/s"))
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
