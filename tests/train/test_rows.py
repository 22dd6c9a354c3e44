"""Texts and conversations into rows that are learned from."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from tiny_models import SIZES, random_model, tiny_llama_config
from transformers import AutoTokenizer, GPT2Config, Lfm2Config

from hfax import AutoModelForTPU, InvalidInputError, UnsupportedOptionError
from hfax.demo import demo_folder
from hfax.train.data import PaddingCollator, in_batches, pack
from hfax.train.examples import conversation, tokenize_rows
from hfax.train.packing import check_packing
from hfax.train.preference_rows import pair_rows, reward_rows, verdict_rows
from hfax.train.row_formats import standard_row
from hfax.train.streaming import StreamingDataset

MESSAGES = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a dict?"},
    {"role": "assistant", "content": "A mapping."},
]
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<a>\\n' }}[[{% if loop.index0 > ns.last %}"
    "{{ '<think>' + m['think'] | default('') + '</think>\\n' }}{% endif %}{{ m['content'] + '</a>' }}]]"
    "{% else %}{{ '<' + m['role'][0] + '>' + m['content'] + '</' + m['role'][0] + '>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<a>\\n' }}{% endif %}"
)
"""Like Qwen3's: thoughts are written after the last question only. [[ and ]] are where {% generation %} would be."""


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's, with its chat template."""
    return AutoTokenizer.from_pretrained(demo_folder())


def learned(tokenizer, ids, labels):
    """The text of the labels that count."""
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != -100], skip_special_tokens=False)


def test_only_the_assistants_turns_are_learned_each_to_its_end(tokenizer):
    [(ids, labels)] = conversation(MESSAGES, tokenizer)
    whole = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
    assert ids == list(whole)
    text = learned(tokenizer, ids, labels)
    assert "A sequence." in text
    assert "A mapping." in text
    assert "What is" not in text
    assert "And a" not in text
    # what begins a turn was asked for, and is not learned; what ends it is
    asked = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert all(label == -100 for label in labels[: len(asked)])
    assert labels[len(asked)] != -100
    through = tokenizer.apply_chat_template(MESSAGES[:2], return_dict=True)["input_ids"]
    assert labels[len(through) - 1] == ids[len(through) - 1]


def test_templates_that_mark_what_is_generated_say_it_themselves(tokenizer):
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = MARKED
    [(ids, labels)] = conversation(MESSAGES, marked)
    assert learned(marked, ids, labels).replace(" ", "") == "Asequence.Amapping."


USER, THINKING, PLAIN = "<u>{}</u>", "<a>\n<think>{}</think>\n{}</a>", "<a>\n{}</a>"
"""What `QWEN` writes for a user's turn, for an assistant's after the last user's, and for an earlier one."""


@pytest.mark.parametrize("marks", [False, True])
def test_each_turn_is_learned_after_the_past_that_it_is_generated_after(tokenizer, marks):
    """Templates like Qwen3's, which leave out the <think> blocks of earlier turns, were refused."""
    rewriting = copy.deepcopy(tokenizer)
    template = QWEN.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}") if marks else QWEN
    rewriting.chat_template = template.replace("[[", "").replace("]]", "")
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "think": "easy", "content": "call it"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "think": "seen", "content": "it is 3"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "think": "hm", "content": "yes"},
    ]
    first = USER.format("add") + THINKING.format("easy", "call it") + "<t>3</t>"
    second = THINKING.format("seen", "it is 3")
    rewritten = USER.format("add") + PLAIN.format("call it") + "<t>3</t>" + PLAIN.format("it is 3")
    third = rewritten + USER.format("sure?") + THINKING.format("hm", "yes")
    expected = [
        (first + second, "<think>easy</think>\ncall it</a><think>seen</think>\nit is 3</a>"),
        (third, "<think>hm</think>\nyes</a>"),
    ]
    found = conversation(messages, rewriting)
    assert [(rewriting.decode(ids), learned(rewriting, ids, labels)) for ids, labels in found] == expected
    assert len(tokenize_rows([{"messages": messages}], rewriting, max_length=512)) == 2
    # as generate() would be asked for the last turn
    asked = rewriting.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    ids, labels = found[1]
    assert (ids[: len(asked)], set(labels[: len(asked)])) == (list(asked), {-100})
    assert labels[len(asked) :] == ids[len(asked) :]


def test_a_turn_that_does_not_follow_its_generation_prompt_is_refused(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        QWEN.replace("[[", "").replace("]]", "").replace("'<a>\\n' }}{% endif %}", "'<a><think>' }}{% endif %}")
    )
    assert other.chat_template != QWEN
    with pytest.raises(InvalidInputError, match="message 2 not after its generation prompt"):
        conversation(MESSAGES, other)


def test_prompts_and_completions_and_texts(tokenizer):
    rows = [{"prompt": "one two", "completion": " three"}, {"text": "Return a new list"}, {"input_ids": [5, 6, 7]}]
    found = tokenize_rows(rows, tokenizer, max_length=64)
    end = tokenizer.eos_token
    assert learned(tokenizer, **{n.replace("input_", ""): v for n, v in found[0].items()}) == f" three{end}"
    assert tokenizer.decode(found[1]["labels"]).endswith(f"Return a new list{end}")
    assert found[2] == {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    assert found[0]["input_ids"][: len(tokenizer("one two").input_ids)] == tokenizer("one two").input_ids


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, "Row 2 has an unknown format"),
        ({"messages": MESSAGES[:1]}, "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": 1}, MESSAGES[1]]}, "conversation|rejected"),
    ],
)
def test_rows_of_no_known_form_are_named(row, words, tokenizer):
    with pytest.raises(InvalidInputError, match=words):
        tokenize_rows([{"text": "fine"}, row], tokenizer, max_length=64)


def test_what_cannot_be_learned_is_left_out_or_an_error(tokenizer):
    rows = [{"prompt": "one " * 100, "completion": " x"}, {"text": "Return a new list"}]
    assert len(tokenize_rows(rows, tokenizer, max_length=32)) == 1
    with pytest.raises(InvalidInputError, match="No row has labels"):
        tokenize_rows(rows[:1], tokenizer, max_length=32)
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(InvalidInputError, match="no chat template"):
        tokenize_rows([{"messages": MESSAGES}], without, max_length=32)


def test_batches_are_padded_to_few_lengths_and_padding_does_not_count():
    collate = PaddingCollator(pad_token_id=9, pad_to_multiple_of=8, max_length=20)
    batch = collate([{"input_ids": [1, 2, 3], "note": "x"}, {"input_ids": list(range(11)), "note": "y"}])
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 16)
    )
    np.testing.assert_array_equal(batch["input_ids"][0, 3:], 9)
    np.testing.assert_array_equal(batch["labels"][0], [1, 2, 3, *[-100] * 13])
    np.testing.assert_array_equal(batch["attention_mask"].sum(axis=1), [3, 11])
    assert collate([{"input_ids": list(range(40))}])["input_ids"].shape == (1, 20)
    images = collate(
        [{"pixel_values": np.zeros((3, 4, 4)), "label": 1}, {"pixel_values": np.ones((3, 4, 4)), "label": 0}]
    )
    assert images["pixel_values"].shape == (2, 3, 4, 4)
    assert images["label"].tolist() == [1, 0]
    assert [len(rows) for rows in in_batches(range(7), 3)] == [3, 3, 1]


def test_packing_fills_rows_and_keeps_every_token():
    rng = np.random.default_rng(0)
    texts = [{"input_ids": rng.integers(1, 90, n).tolist()} for n in rng.integers(2, 60, 100)]
    packed = pack(texts, 64)
    used = sum(len(text["input_ids"]) for text in texts)
    assert used / (64 * len(packed)) > 0.9
    found = []
    for row in packed:
        assert {len(column) for column in row.values()} == {64}
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0] + [64]
        for begin, end in itertools.pairwise(starts):
            if any(label != -100 for label in row["labels"][begin:end]):
                assert row["labels"][begin] == -100
                found.append(row["input_ids"][begin:end])
    assert sorted(found) == sorted(text["input_ids"] for text in texts)


LONG = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
OF_STRATEGIES = {
    "bfd": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 0, 0]],
    "bfd_split": [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11, 0]],
    "wrapped": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]],
}
"""What trl 1.16's `pack_dataset` makes of LONG in rows of 4, with hfax's padding."""


@pytest.mark.parametrize("strategy", OF_STRATEGIES)
def test_long_sequences_are_truncated_split_or_wrapped(strategy):
    packed = pack([{"input_ids": ids} for ids in LONG], 4, packing_strategy=strategy)
    assert [row["input_ids"] for row in packed] == OF_STRATEGIES[strategy]
    for row in packed:
        begins = zip(row["input_ids"], row["position_ids"], strict=True)
        assert row["labels"] == [token if token and position else -100 for token, position in begins]
    if strategy == "wrapped":
        assert [row["position_ids"] for row in packed] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 0]]


def test_labels_are_split_with_their_tokens():
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7], "labels": [-100, -100, 3, 4, 5, 6, 7]}
    first, second = pack([row], 4, packing_strategy="bfd_split")
    assert (first["labels"], second["labels"]) == ([-100, -100, 3, 4], [-100, 6, 7, -100])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"packing": True, "packing_strategy": "ffd"}, "Use one of bfd"),
        ({"packing_strategy": "wrapped"}, "without packing"),
    ],
)
def test_a_packing_strategy_is_known_and_used(given, message):
    with pytest.raises(InvalidInputError, match=message):
        StreamingDataset([{"input_ids": [1, 2]}], max_length=4, **given)


_GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
PACKED = {
    "llama": lambda scale: tiny_llama_config(initializer_range=scale),
    "gpt2": lambda scale: GPT2Config(**_GPT2, initializer_range=scale, architectures=["GPT2LMHeadModel"]),
    "lfm2": lambda scale: Lfm2Config(
        **{**SIZES, "initializer_range": scale},
        layer_types=["conv", "full_attention"],
        architectures=["Lfm2ForCausalLM"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "scale", "isolates"),
    [("llama", 0.02, True), ("gpt2", 0.2, True), ("lfm2", 0.2, False), ("lfm2", 0.02, False), ("lfm2", 1e-3, False)],
)
def test_whether_packed_texts_mix_does_not_depend_on_the_scale_of_weights(kind, scale, isolates):
    """Logits were compared with a tolerance, below which those of small weights stayed although LFM2's texts mix."""
    config = PACKED[kind](scale)
    plain = random_model(config, attn_implementation="eager").double()
    positions = torch.tensor([[*range(5), *range(7)]])
    ids = torch.arange(3, 15)[None]
    other = torch.cat([ids[:, :5] + 20, ids[:, 5:]], dim=1)
    with torch.no_grad():
        one, two = (plain(input_ids=i, position_ids=positions, use_cache=False).logits[:, 5:] for i in (ids, other))
    assert torch.equal(one, two) == isolates
    model = AutoModelForTPU.from_config(config)
    if isolates:
        check_packing(model)
    else:
        with pytest.raises(UnsupportedOptionError, match="Outputs of packed sequence 2 depend on sequence 1"):
            check_packing(model)


ANSWERS = {"chosen": " a sequence.", "rejected": " a number."}
QUESTION, SAID = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {
                "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}],
                "system": "Be.",
            },
            {"messages": [{"role": "system", "content": "Be."}, QUESTION, SAID]},
        ),
        (
            {
                "conversations": [{"from": "human", "value": "What?"}],
                "chosen": {"from": "gpt", "value": "That."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            {"prompt": [QUESTION], "chosen": [SAID], "rejected": [{"role": "assistant", "content": "No."}]},
        ),
        (
            {"instruction": "Add", "input": "1 2", "output": "3", "history": [["What?", "That."]]},
            {
                "prompt": [QUESTION, SAID, {"role": "user", "content": "Add\n1 2"}],
                "completion": [{"role": "assistant", "content": "3"}],
            },
        ),
        (
            {"prompt": [{"from": "user", "value": "What?"}], "completion": [{"from": "gpt", "value": "That."}]},
            {"prompt": [QUESTION], "completion": [SAID]},
        ),
        ({"text": "as it is"}, {"text": "as it is"}),
    ],
)
def test_rows_of_other_formats_are_those_of_trl(row, expected, tokenizer):
    assert standard_row(row) == expected
    if "chosen" not in row:
        assert tokenize_rows([row], tokenizer, max_length=None) == tokenize_rows([expected], tokenizer, max_length=None)


def test_an_unknown_role_is_named():
    with pytest.raises(InvalidInputError, match="from 'robot'"):
        standard_row({"conversations": [{"from": "robot", "value": "beep"}]})


def test_pairs_of_texts_are_tokenized_as_a_whole_and_end(tokenizer):
    """As in trl: prompt and completion are one text, and the completion begins where the ids differ from the prompt's."""
    implicit = {side: f"A list is{text}" for side, text in ANSWERS.items()}
    for row in ({"prompt": "A list is", **ANSWERS}, implicit):
        [found] = pair_rows([row], tokenizer, max_length=None)
        for side, text in ANSWERS.items():
            assert found[f"{side}_ids"] == tokenizer(f"A list is{text}{tokenizer.eos_token}").input_ids
            completion = text.removeprefix(" a") if row is implicit else text  # both begin with "A list is a"
            assert learned(tokenizer, found[f"{side}_ids"], found[f"{side}_labels"]) == completion + tokenizer.eos_token


def test_pairs_of_messages_are_rendered_by_the_template(tokenizer):
    row = {"prompt": [QUESTION], "chosen": [SAID], "rejected": [{"role": "assistant", "content": "No."}]}
    [found] = pair_rows([row], tokenizer, max_length=None)
    whole = tokenizer.apply_chat_template([QUESTION, SAID], return_dict=True)["input_ids"]
    asked = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found["chosen_ids"] == list(whole)
    assert found["chosen_labels"] == [-100] * len(asked) + list(whole[len(asked) :])
    implicit = {"chosen": [QUESTION, SAID], "rejected": [QUESTION, *row["rejected"]]}
    assert pair_rows([implicit], tokenizer, max_length=None) == [found]
    [rewarded] = reward_rows([row | {"margin": 1}], tokenizer, max_length=None)
    assert rewarded == {"chosen_ids": found["chosen_ids"], "rejected_ids": found["rejected_ids"], "margin": 1.0}


def test_long_pairs_are_cut_as_in_trl(tokenizer):
    row = {"prompt": "A list is", **ANSWERS}
    [whole] = pair_rows([row], tokenizer, max_length=None)
    length = len(whole["chosen_ids"]) - 2
    for mode, kept in (("keep_start", slice(length)), ("keep_end", slice(-length, None))):
        [found] = pair_rows([row], tokenizer, max_length=length, truncation_mode=mode)
        assert found["chosen_ids"] == whole["chosen_ids"][kept]
        assert found["chosen_labels"] == whole["chosen_labels"][kept]
    with pytest.raises(InvalidInputError, match="No row is left"):
        pair_rows([row], tokenizer, max_length=2)
    with pytest.raises(InvalidInputError, match="No row is left"):
        reward_rows([row], tokenizer, max_length=length)
    with pytest.raises(InvalidInputError, match="Row 1 has no prompt"):
        pair_rows([{"chosen": "a", "rejected": "b"}], tokenizer, max_length=None)
    with pytest.raises(InvalidInputError, match="all as texts or all as messages"):
        pair_rows([row | {"prompt": [QUESTION]}], tokenizer, max_length=None)


def test_verdicts_are_those_of_rows_or_pairs(tokenizer):
    pair = {"prompt": "A list is", **ANSWERS}
    singles = [{"prompt": "A list is", "completion": ANSWERS[s], "label": s == "chosen"} for s in ANSWERS]
    found = verdict_rows([pair], tokenizer, max_length=None)
    assert found == verdict_rows(singles, tokenizer, max_length=None)
    assert [row["label"] for row in found] == [True, False]
    with pytest.raises(InvalidInputError, match="Row 1 has no prompt, completion, label"):
        verdict_rows([{"prompt": "A", "completion": "b"}], tokenizer, max_length=None)
