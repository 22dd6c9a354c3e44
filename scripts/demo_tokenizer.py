"""Trains the demo model's tokenizer: byte-level BPE with the special tokens and the chat template of the demo model.

Turns text into a `PreTrainedTokenizerFast` that plain transformers loads, and samples into token ids. Any text can be
encoded and decodes back to itself, since unknown characters fall back to bytes. This module knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from demo_chats import Sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('The demo model knows the roles system, user and assistant, not ' + message.role + '.') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + (message.content | trim) + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` tokens (the six special ones and all bytes among them) from `texts`.

    Args:
        texts: whole documents.
        vocab_size: at least 262.
        context: tokens the model takes, kept as the tokenizer's `model_max_length`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[begin]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[int]:
    """Token ids of one sample, from its begin token to its last end token."""
    if isinstance(sample, str):
        text = f"{BEGIN}{sample}{END}"
    else:
        text = str(tokenizer.apply_chat_template(sample, tokenize=False))
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def special_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The special tokens that configurations name, by the names they have there."""
    vocabulary = tokenizer.get_vocab()
    return {"bos_token_id": vocabulary[BEGIN], "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}
