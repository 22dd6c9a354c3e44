"""A tokenizer as transformers had set it up, run by the library tokenizers alone: text to ids, ids to text, chat templates."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.programs.bundle_file import TOKENIZER
from hfax.programs.program_files import is_enabled
from hfax.stored.records import key_of, read_record, record_file, renew, texts_digest, write_record

if TYPE_CHECKING:
    import tokenizers

_KIND = "tokenizer"


class StoredTokenizer:
    """transformers' tokenizer, with the same results; what is not here is done by transformers, which is then imported.

    Args:
        backend: the tokenizer of the library tokenizers.
        chat_template: None if there is none.
        special_tokens: by name, such as "bos_token".
        all_special_tokens: these and further ones.
        model_input_names: the inputs that a call returns for a model.
        folder: the checkpoint's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        all_special_tokens: Sequence[str],
        model_input_names: Sequence[str],
        folder: Path,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(special_tokens)
        self.all_special_tokens = list(all_special_tokens)
        self.model_input_names = list(model_input_names)
        self._folder = folder

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> dict[str, Any]:
        """The ids of a text, as `input_ids`; with `return_tensors="np"` all that the model takes, [1, length] int64."""
        found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if return_tensors is None:
            return {"input_ids": found.ids}
        if return_tensors != "np":
            return self._full(text, add_special_tokens=add_special_tokens, return_tensors=return_tensors)
        made = {"input_ids": found.ids, "token_type_ids": found.type_ids, "attention_mask": found.attention_mask}
        return {name: np.array([ids]) for name, ids in made.items() if name in {"input_ids", *self.model_input_names}}

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids. Spaces are not cleaned up by default: a tokenizer that does so is not stored."""
        if clean_up_tokenization_spaces:
            return self._full.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            )
        return self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's entry of an id; None if there is none."""
        return self.backend_tokenizer.id_to_token(ids)

    def get_vocab(self) -> dict[str, int]:
        """The vocabulary, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of the added tokens."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    @property
    def all_special_ids(self) -> list[int | None]:
        """The ids of the special tokens."""
        return [self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """The prompt for the next reply: its ids, as `input_ids`, or its text.

        Raises:
            jinja2.TemplateError: the template rejects the messages.
            ValueError: there is no message, or no template.
        """
        template = chat_template or self.chat_template
        if template is None or not all(map(_is_plain_data, (conversation, tools, options))) or not return_dict:
            return self._full.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=return_dict,
                **options,
            )
        from hfax.stored.chat_template import render

        given = {**self.special_tokens_map, **options, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = render(template, conversation, given)
        return self(text, add_special_tokens=False) if tokenize else text

    @functools.cached_property
    def _full(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._full, name)


_FOR_TRANSFORMERS = frozenset({"continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens"})
"""Options of `apply_chat_template` that are not its template's."""


def _is_plain_data(value: Any) -> bool:
    """Whether a value consists of JSON's types alone, which templates see as they are, and names no option of transformers."""
    if isinstance(value, dict):
        return _FOR_TRANSFORMERS.isdisjoint(value) and all(
            type(key) is str and _is_plain_data(item) for key, item in value.items()
        )
    if type(value) in (list, tuple):
        return all(map(_is_plain_data, value))
    return value is None or type(value) in (str, int, float, bool)


def find_tokenizer(folder: Path) -> StoredTokenizer | None:
    """The stored tokenizer of a checkpoint's folder; None if there is none for its present files."""
    found = read_record(folder / TOKENIZER, is_of_cache=False)
    if found is None and (not is_enabled() or (found := read_record(_record(folder))) is None):
        return None
    import tokenizers

    content, data = found
    return StoredTokenizer(tokenizers.Tokenizer.from_buffer(data), folder=folder, **content)


def store_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Store a tokenizer that transformers has loaded from a folder, if it is one that the library tokenizers runs alone."""
    if not is_enabled() or renew(record := _record(folder)):
        return
    if (described := describe_tokenizer(tokenizer)) is not None:
        write_record(record, *described)


def describe_tokenizer(tokenizer: Any) -> tuple[dict[str, Any], bytes] | None:
    """The record of one of transformers' tokenizers; None if the library tokenizers does not run it alone."""
    if not _is_plain(tokenizer):
        return None
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    if len(special) != len(tokenizer.special_tokens_map):
        return None
    content = {
        "chat_template": tokenizer.chat_template,
        "special_tokens": special,
        "all_special_tokens": list(tokenizer.all_special_tokens),
        "model_input_names": list(tokenizer.model_input_names),
    }
    return content, backend.to_str().encode()


def _is_plain(tokenizer: Any) -> bool:
    """Whether a tokenizer's calls only hand their arguments to the library tokenizers."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    cls: Any = type(tokenizer)
    if not issubclass(cls, PreTrainedTokenizerFast) or not cls.__module__.startswith("transformers."):
        return False
    of_fast = ("_decode", "_encode_plus", "set_truncation_and_padding", "convert_ids_to_tokens", "get_vocab")
    of_base = ("__call__", "decode", "apply_chat_template", "all_special_tokens")
    return (
        all(getattr(cls, name) is getattr(PreTrainedTokenizerFast, name) for name in of_fast)
        and all(getattr(cls, name) is getattr(PreTrainedTokenizerBase, name) for name in of_base)
        and isinstance(tokenizer.chat_template, (str, type(None)))
        and not tokenizer.split_special_tokens
        and not _cleans_up(tokenizer)
    )


def _cleans_up(tokenizer: Any) -> bool:
    """Whether spaces are cleaned up by default; transformers ignores the setting for BPE."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    despite = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces) and (not is_bpe or bool(despite))


def _record(folder: Path) -> Path:
    digest = texts_digest(folder)
    return record_file(_KIND, digest, key_of(_KIND, [digest]))
