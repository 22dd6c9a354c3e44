"""A stored tokenizer gives what transformers' gives: ids, texts, prompts of conversations, and errors."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfax.demo import demo_folder
from hfax.stored.chat_template import render
from hfax.stored.tokenizer import StoredTokenizer, find_tokenizer, store_tokenizer

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_TEXTS = [
    "Hello, world",
    "  two spaces, and a line\n",
    "ein Straßencafé, 東京, 🙂",
    "<s>not a start</s> <|mark|> x",
    "'s and n't , ! don 't",
    "\t0123456789 1e-5",
]


def _byte_level() -> Tokenizer:
    """As GPT-2's and Llama 3's."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
    made.decoder = decoders.ByteLevel()  # type: ignore[attr-defined]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(_TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def _sentencepiece() -> Tokenizer:
    """As Llama 2's and T5's: a space is a mark that begins a word."""
    made = Tokenizer(Unigram())
    made.normalizer = normalizers.NFKC()  # type: ignore[attr-defined]
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[attr-defined]
    made.decoder = decoders.Metaspace()  # type: ignore[attr-defined]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    made.train_from_iterator(
        _TEXTS, trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return made


_KINDS: dict[str, Callable[[], Tokenizer]] = {"byte-level": _byte_level, "sentencepiece": _sentencepiece}
_CHAT_ML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEMPLATES = {
    "chatml": _CHAT_ML,
    "default system": "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou are a helpful assistant.' }}\n{%- endif %}" + _CHAT_ML,
    "headers": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    "alternating": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
    "turns": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "lines": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] +"
    " eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "namespace": "{%- set ns = namespace(found=false, last=-1) %}{%- for m in messages[::-1] %}{%- set i = (messages|length - 1)"
    " - loop.index0 %}{%- if not ns.found and m.role == 'user' %}{%- set ns.found = true %}{%- set ns.last = i %}{%- endif %}"
    "{%- endfor %}{%- for m in messages %}{%- if m.role == 'assistant' and '</think>' in m.content %}"
    "{{- m.content.split('</think>')[-1].lstrip('\\n') }}{%- else %}{{- m.role ~ ': ' ~ m.content }}{%- endif %}"
    "{%- if loop.index0 == ns.last %}{{- '*' }}{%- endif %}{%- endfor %}",
    "tools": "{%- if tools %}{{- 'Tools: ' + tools | tojson }}{%- endif %}{% if documents is defined and documents %}D{% endif %}"
    "{%- for m in messages %}{{- m | tojson }}{{- m.content | upper }}{%- endfor %}{{ dict(a=1)['a'] }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "date": "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% macro tail(x) %}[{{ x }}]{% endmacro %}{{ tail('end') }}",
    "instruction": "{% for m in messages %}{% if m['role'] == 'user' %}{{ '### Instruction:\n' ~ m['content'].strip() ~ '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ '### Response:\n' ~ m['content'] ~ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "names": "{%- set names = {'user': 'USER', 'assistant': 'ASSISTANT', 'system': 'SYSTEM'} -%}{%- for m in messages -%}"
    "{{ names.get(m.role, m.role | title) + ': ' + m.content | replace('\n', ' ') }}{{ eos_token if m.role =="
    " 'assistant' else ' ' }}"
    "{%- endfor -%}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "filtered": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' | ') }}"
    "{{ messages | rejectattr('role', 'in', ['user']) | list | length }}{{ messages | groupby('role') | length }}",
    "slices": "{% if messages and messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set"
    " rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if loop.first and system %}"
    "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}{{ m['content'] }}{% if not loop.last %}{{ '\n' }}{%"
    " endif %}{% endfor %}",
    "calls": "{%- for m in messages %}{%- if m.tool_calls is defined and m.tool_calls %}{%- for call in m.tool_calls %}"
    '{{- \'<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ (call.function.arguments |'
    " tojson) ~ '}\n</tool_call>' }}"
    "{%- endfor %}{%- elif m.role == 'tool' %}{{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}{%- else"
    " %}{{- m.content }}"
    "{%- endif %}{%- endfor %}",
    "described tools": "{%- macro described(t) -%}{{ t.function.name }}({%- for k, v in t.function.parameters.items()"
    " -%}{{ k }}={{ v }}"
    "{{ ', ' if not loop.last }}{%- endfor -%}): {{ t.function.description | default('none', true) }}{%- endmacro -%}"
    "{%- for t in tools or [] -%}{{ described(t) }}{%- endfor -%}{%- for m in messages -%}{{ m.content }}{%- endfor -%}",
    "thinking": "{%- for m in messages %}{%- set text = m.content if m.content is string else '' %}{%- if m.reasoning"
    " is defined %}"
    "{{- '<think>' + m.reasoning + '</think>' }}{%- elif '</think>' in text %}{{- text.split('</think>')[0].rstrip('\n"
    "').split('<think>')[-1] }}"
    "{%- endif %}{{- text }}{%- endfor %}{%- if enable_thinking is defined and enable_thinking is false %}{{-"
    " '<think>\n\n</think>\n\n' }}{%- endif %}",
    "joined": "{{ bos_token if bos_token is defined else '' }}{% for a, b in messages | map(attribute='role') | list"
    " | batch(2, '-') %}"
    "{{ a }}/{{ b }};{% endfor %}{{ (messages | last).content if messages else none }}",
    "indented": "{{ messages | tojson(indent=2) }}{{ '%s has %d' | format('chat', messages | length) }}{{ [1, 2] +"
    " [3] }}{{ 7 // 2 }}{{ 2 ** 5 }}",
    "loops": "{% for m in messages recursive %}{{ loop.depth }}{{ loop.cycle('a', 'b') }}{{ m.role[:1] | upper }}{%"
    " if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ loop.revindex }}{% else %}nobody{% endfor %}{% set x %}kept{% endset %}{{ x | trim | length }}",
}
"""In the manner of published templates: each uses something else of what transformers gives them."""
_CONVERSATIONS = [
    [{"role": "user", "content": 'Hi <b>"you"</b> & me\n'}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "ü"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>hm</think>\n\ntwo"},
        {"role": "user", "content": "three"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "second"}],
    [
        {"role": "user", "content": "call", "name": None},
        {
            **{"role": "assistant", "content": "", "reasoning": "why"},
            "tool_calls": [
                {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
    [],
]


_TOOLS = [{"type": "function", "function": {"name": "f", "description": "ü", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, StoredTokenizer]]:
    """transformers' tokenizers, and what is stored of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFAX_HOME", str(tmp_path_factory.mktemp("home")))
        found: dict[str, tuple[Any, StoredTokenizer]] = {}
        folders = {"demo": Path(demo_folder())}
        for name, make in _KINDS.items():
            folders[name] = tmp_path_factory.mktemp(name)
            plain = PreTrainedTokenizerFast(tokenizer_object=make(), **_SPECIAL, additional_special_tokens=["<|mark|>"])
            plain.add_tokens(["0123"])
            plain.save_pretrained(folders[name])
        for name, folder in folders.items():
            theirs = AutoTokenizer.from_pretrained(folder)
            assert find_tokenizer(folder) is None
            store_tokenizer(folder, theirs)
            ours = find_tokenizer(folder)
            assert ours is not None
            found[name] = theirs, ours
        return found


@pytest.mark.parametrize("name", ["demo", *_KINDS])
@settings(max_examples=60, deadline=None)
@given(st.one_of(st.sampled_from(_TEXTS), st.text(max_size=60)))
def test_ids_and_texts_are_those_of_transformers(pairs: Any, name: str, text: str) -> None:
    theirs, ours = pairs[name]
    ids = theirs(text)["input_ids"]
    assert ours(text)["input_ids"] == ids
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
        streamed = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
        assert ours.decode(ids[-3:], **streamed) == theirs.decode(ids[-3:], **streamed)


@pytest.mark.parametrize("template", _TEMPLATES)
@pytest.mark.parametrize("messages", _CONVERSATIONS, ids=range(len(_CONVERSATIONS)))
def test_conversations_are_rendered_as_by_transformers(pairs: Any, template: str, messages: Any) -> None:
    theirs = pairs["byte-level"][0]
    theirs.chat_template = _TEMPLATES[template]

    def result(render_it: Callable[[], str]) -> str:
        try:
            return render_it()
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error if messages else 'no message'}"

    for options in ({}, {"tools": _TOOLS, "enable_thinking": False}):
        given = {"add_generation_prompt": True, **options}
        plain = result(lambda: theirs.apply_chat_template(messages, tokenize=False, **given))  # noqa: B023
        variables = {**theirs.special_tokens_map, **given}
        assert result(lambda: render(_TEMPLATES[template], messages, variables)) == plain  # noqa: B023


@pytest.mark.parametrize("name", ["demo", *_KINDS])
def test_what_else_is_asked_of_a_tokenizer_is_that_of_transformers(pairs: Any, name: str) -> None:
    """By the server and its readers, which get a pickled copy; the last two are transformers' own."""
    theirs, ours = pairs[name]
    for copy in (ours, pickle.loads(pickle.dumps(ours))):
        assert copy.get_vocab() == theirs.get_vocab()
        assert copy.get_added_vocab() == theirs.get_added_vocab()
        assert copy.added_tokens_decoder.keys() == theirs.added_tokens_decoder.keys()
        assert (copy.all_special_tokens, copy.all_special_ids) == (theirs.all_special_tokens, theirs.all_special_ids)
        assert (copy.special_tokens_map, len(copy)) == (theirs.special_tokens_map, len(theirs))
        assert [copy.convert_ids_to_tokens(i) for i in range(99)] == [
            theirs.convert_ids_to_tokens(i) for i in range(99)
        ]
        assert (copy.eos_token_id, copy.padding_side) == (theirs.eos_token_id, theirs.padding_side)
        with pytest.raises(AttributeError):
            copy.nothing_of_that_name  # noqa: B018


def test_the_demo_reads_a_conversation_as_transformers(pairs: Any) -> None:
    theirs, ours = pairs["demo"]
    assert ours.apply_chat_template(_CONVERSATIONS[2], tokenize=False) == theirs.apply_chat_template(
        _CONVERSATIONS[2], tokenize=False
    )
    continued = {"continue_final_message": True, "tokenize": False}
    assert ours.apply_chat_template(_CONVERSATIONS[3], **continued) == theirs.apply_chat_template(
        _CONVERSATIONS[3], **continued
    )
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    for messages in _CONVERSATIONS[:4]:
        assert (
            ours.apply_chat_template(messages, **how)["input_ids"]
            == theirs.apply_chat_template(messages, **how)["input_ids"]
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append('x') }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for m in messages %}",
    ],
)
def test_a_hostile_template_is_refused_by_both(pairs: Any, template: str) -> None:
    theirs = pairs["byte-level"][0]
    theirs.chat_template = template
    with pytest.raises(jinja2.TemplateError):
        theirs.apply_chat_template(_CONVERSATIONS[0], tokenize=False)
    with pytest.raises(jinja2.TemplateError):
        render(template, _CONVERSATIONS[0], {})


def test_other_files_or_a_tokenizer_with_code_of_its_own_are_not_taken_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    folder = Path(shutil.copytree(demo_folder(), tmp_path / "demo"))
    store_tokenizer(folder, AutoTokenizer.from_pretrained(folder))
    assert find_tokenizer(folder) is not None
    (folder / "runs").mkdir()
    (folder / "runs/config.json").write_text("{}")
    assert find_tokenizer(folder) is not None  # what is further down belongs to another checkpoint
    (folder / "chat_template.jinja").write_text(_CHAT_ML)
    assert find_tokenizer(folder) is None

    pieces = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, ",": 2}, unk_token="[UNK]"))
    cleaning = PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=True)

    class Own(PreTrainedTokenizerFast):
        pass

    for number, plain in enumerate([cleaning, Own(tokenizer_object=_byte_level())]):
        plain.save_pretrained(tmp_path / str(number))
        store_tokenizer(tmp_path / str(number), plain)
        assert find_tokenizer(tmp_path / str(number)) is None
