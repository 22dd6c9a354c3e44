"""A tokenizer as transformers had set it up, run by the library tokenizers alone: text to ids, ids to text, chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfax.stored.records import is_enabled, key_of, read_record, record_file, texts_digest, write_record

if TYPE_CHECKING:
    import tokenizers

_KIND = "tokenizer"


class StoredTokenizer:
    """The part of transformers' tokenizer that generating text needs, with the same results.

    Args:
        backend: the tokenizer of the library tokenizers.
        chat_template: None if there is none.
        special_tokens: by name, for the template.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._backend, self._special_tokens = backend, dict(special_tokens)
        self.chat_template = chat_template

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, as `input_ids`."""
        return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids. Spaces are never cleaned up: a tokenizer that does so by default is not stored."""
        assert not clean_up_tokenization_spaces, "only transformers cleans up spaces"
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> dict[str, list[int]]:
        """The ids of the prompt for the next reply, as `input_ids`.

        Raises:
            jinja2.TemplateError: the template rejects the messages.
        """
        assert self.chat_template is not None, "the caller checks it"
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, True), "no other form is used"
        from hfax.stored.chat_template import render

        return self(render(self.chat_template, messages, self._special_tokens), add_special_tokens=False)


def find_tokenizer(folder: Path) -> StoredTokenizer | None:
    """The stored tokenizer of a checkpoint's folder; None if there is none for its present files."""
    if (found := read_record(record_file(_KIND, _key(folder)))) is None:
        return None
    import tokenizers

    content, data = found
    backend = tokenizers.Tokenizer.from_buffer(data)
    return StoredTokenizer(backend, content["chat_template"], content["special_tokens"])


def store_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Store a tokenizer that transformers has loaded from a folder, if it is one that the library tokenizers runs alone."""
    if not is_enabled() or (record := record_file(_KIND, _key(folder))).is_file() or not _is_plain(tokenizer):
        return
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    if len(special) != len(tokenizer.special_tokens_map):
        return
    content = {"chat_template": tokenizer.chat_template, "special_tokens": special}
    write_record(record, content, backend.to_str().encode())


def _is_plain(tokenizer: Any) -> bool:
    """Whether a tokenizer's calls only hand their arguments to the library tokenizers."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    cls: Any = type(tokenizer)
    if not issubclass(cls, PreTrainedTokenizerFast) or not cls.__module__.startswith("transformers."):
        return False
    of_fast = ("_decode", "_encode_plus", "set_truncation_and_padding")
    of_base = ("__call__", "decode", "apply_chat_template")
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


def _key(folder: Path) -> str:
    return key_of(_KIND, [texts_digest(folder)])
