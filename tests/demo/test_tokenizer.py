"""The demo model's tokenizer and chat template, as plain transformers sees them."""

import pytest

TEXTS = [
    "Return a new list.",
    "def f(x):\n    return  x\n\n\n\tdone  ",
    "é ☃ 日本語 🙂 \x00 control",
    " leading and trailing ",
    "<b> & `code` \"quoted\" 'quoted'",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_text_begins_with_the_begin_token_and_nothing_is_added_at_its_end(tokenizer):
    token_ids = tokenizer.encode("Return")
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in token_ids


def test_special_tokens_are_single_tokens_within_the_vocabulary(tokenizer):
    for token in ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert len(tokenizer) == 4096


def test_chat_template_renders_turns_and_the_start_of_a_reply(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What does len do? "},
        {"role": "assistant", "content": "Return the number of items."},
        {"role": "user", "content": "And min?"},
    ]
    turns = (
        "<|begin|><|system|>Be brief.<|end|><|user|>What does len do?<|end|>"
        "<|assistant|>Return the number of items.<|end|><|user|>And min?<|end|>"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == turns
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == turns + "<|assistant|>"
    )


def test_chat_template_gives_one_begin_token(tokenizer):
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert token_ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_refuses_an_unknown_role(tokenizer):
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_unequal_prompts_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["Return", "Return a new list of the items"], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert batch["attention_mask"][0][-1] == 1
