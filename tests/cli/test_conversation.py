"""Saved conversations and chat templates."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoints import make_tokenizer

from hfax.cli.conversation import encode_messages, load_messages, save_messages
from hfax.errors import InvalidInputError, UnsupportedModelError

TALK = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "yes"}]


def test_saved_conversation_loads_back(tmp_path):
    save_messages(tmp_path / "talk.json", TALK, "demo")
    save_messages(tmp_path / "talk.json", [*TALK, *TALK], "demo")
    assert load_messages(tmp_path / "talk.json") == [*TALK, *TALK]
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


def test_bare_list_of_messages_is_read(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(TALK))
    assert load_messages(tmp_path / "list.json") == TALK


def test_file_of_another_kind_is_not_overwritten(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    with pytest.raises(InvalidInputError, match="not a saved conversation"):
        save_messages(notes, TALK, "demo")
    assert notes.read_text() == "precious"


def test_binary_file_is_not_overwritten(tmp_path):
    (tmp_path / "blob").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="not a saved conversation"):
        save_messages(tmp_path / "blob", TALK, "demo")


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    save_messages(tmp_path / "talk.json", TALK, "demo")
    with pytest.raises(UnicodeEncodeError):
        save_messages(tmp_path / "talk.json", [{"role": "user", "content": "\ud800"}], "demo")
    assert load_messages(tmp_path / "talk.json") == TALK
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


def test_save_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(InvalidInputError, match="could not be saved"):
        save_messages(tmp_path / "no" / "talk.json", TALK, "demo")


@pytest.mark.parametrize(
    "content", ["", "no json", '{"messages": 3}', '[{"role": "bot", "content": "x"}]', '[{"role": "user"}]', "3"]
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        load_messages(tmp_path / "bad.json")
    assert "/save" in caught.value.fix


def test_messages_become_tokens_by_the_models_own_template():
    tokenizer = make_tokenizer()
    ids = encode_messages(tokenizer, TALK, "tiny")
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
    )


def test_missing_template_says_what_to_do():
    with pytest.raises(UnsupportedModelError, match="no chat template") as caught:
        encode_messages(make_tokenizer(None), TALK, "tiny")
    assert "hfax generate tiny" in caught.value.fix


def test_refusal_of_the_template_is_shown_in_its_own_words():
    with pytest.raises(InvalidInputError) as caught:
        encode_messages(make_tokenizer(), TALK[1:], "tiny")
    assert caught.value.why == "the user speaks first"
