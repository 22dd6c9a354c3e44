"""Summaries, translations and other texts from encoder-decoders, with the options and results of transformers 4's pipelines."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.pipelines.base import Pipeline

from hfax.errors import InvalidInputError


class TextToTextPipeline(Pipeline):
    """Writes a text for each text. Call it with a string or a list of strings.

    Pipeline or call options: `truncation` (False: texts longer than the tokenizer's maximum stay whole),
    `return_tensors` (False; True returns token ids instead of text), `return_text` (its opposite), `clean_up_tokenization_spaces`
    (False), `src_lang` and `tgt_lang` for tokenizers of many languages (NLLB, M2M100, mBART), `batch_size`, and any option of
    `generate`. Defaults of `generate` come from the config's `task_specific_params`, the checkpoint's generation config, and then
    256 new tokens and 4 beams. A `prefix` in the config, such as T5's "summarize: ", precedes every text.

    Returns a list of `{"generated_text"}`, one for each text, or, with `num_return_sequences` above 1, a list of them for each
    text; "summary_text" and "translation_text" for these tasks, and "…_token_ids" with `return_tensors`.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)

    def __init__(self, *args: Any, task: str = "text2text-generation", **kwargs: Any) -> None:
        super().__init__(*args, task=task, **kwargs)
        of_task = (getattr(self.model.config, "task_specific_params", None) or {}).get(task) or {}
        self._prefix = of_task.get("prefix") or getattr(self.model.config, "prefix", None) or ""
        names = vars(GenerationConfig())
        self._generate_kwargs = {n: v for n, v in of_task.items() if n in names} | self._generate_kwargs

    @property
    def _result(self) -> str:
        kind = self.task.partition("_")[0]
        return {"summarization": "summary", "translation": "translation"}.get(kind, "generated")

    def _sanitize_parameters(
        self,
        *,
        truncation: bool | str | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_options: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        if src_lang is None and tgt_lang is None and len(items := self.task.split("_")) == 4:
            languages = {"src_lang": items[1], "tgt_lang": items[3]}
        if return_tensors is None and return_text is not None:
            return_tensors = not return_text
        before = {**languages, "truncation": truncation}
        after = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        given: Any = ({n: v for n, v in options.items() if v is not None} for options in (before, after))
        return next(given), generate_options, next(given)

    def __call__(self, inputs: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write a text for each text.

        Args:
            inputs: a string, or a list or generator of strings.
            **options: see `TextToTextPipeline`.

        Returns:
            See `TextToTextPipeline`.

        Raises:
            InvalidInputError: an input is not a string, or a language is missing or unknown.
        """
        results: Any = super().__call__(inputs, **options)
        is_list = isinstance(inputs, list) and all(isinstance(text, str) for text in inputs)
        return [one for [one] in results] if is_list and all(len(r) == 1 for r in results) else results

    def preprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        text: str,
        *,
        truncation: bool | str = False,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> dict[str, Any]:
        """The token ids of a text, with its prefix, and the first token of a translation into a language."""
        if not isinstance(text, str):
            raise InvalidInputError(
                f"{self.task} got {type(text).__name__}.", "It reads texts.", "Pass a string or a list of strings."
            )
        tokenizer: Any = self.tokenizer
        text = self._prefix + text
        if self._result == "translation" and hasattr(tokenizer, "_build_translation_inputs"):
            encoded = _with_languages(tokenizer, text, truncation, src_lang, tgt_lang)
        else:
            encoded = dict(tokenizer(text, return_tensors="pt", truncation=truncation))
        encoded.pop("token_type_ids", None)  # which tokenizers return, and generate() does not take
        return encoded

    def _forward(self, input_tensors: dict[str, Any], **generate_options: Any) -> Any:
        first = input_tensors.pop("forced_bos_token_id", None)
        of_language = {} if first is None else {"forced_bos_token_id": first[0] if isinstance(first, list) else first}
        options = self._prepare_generate_kwargs(generate_options, **of_language)
        ids = self.model.generate(**input_tensors, **options)  # pyright: ignore[reportCallIssue]
        rows = len(input_tensors["input_ids"])
        return {"output_ids": ids.reshape(rows, len(ids) // rows, -1)}

    def postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model_outputs: Any, *, return_tensors: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> Any:
        """The texts, or token ids, of an input."""
        texts = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self._result}_token_ids": ids} for ids in texts]
        tokenizer: Any = self.tokenizer
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return [{f"{self._result}_text": tokenizer.decode(ids, **options)} for ids in texts]


def _with_languages(
    tokenizer: Any, text: str, truncation: bool | str, src_lang: str | None, tgt_lang: str | None
) -> dict[str, Any]:
    """The token ids of a text marked as `src_lang`, and the token of `tgt_lang` as `forced_bos_token_id`."""
    try:
        encoded = tokenizer._build_translation_inputs(
            text, return_tensors="pt", truncation=truncation, src_lang=src_lang, tgt_lang=tgt_lang
        )
        marks = [*tokenizer.prefix_tokens, *tokenizer.suffix_tokens, encoded["forced_bos_token_id"]]
        if {None, tokenizer.unk_token_id} & set(marks):
            raise ValueError("The tokenizer has no token for one of them.")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"src_lang={src_lang!r} and tgt_lang={tgt_lang!r} are not two languages of {type(tokenizer).__name__}.",
            str(error),
            "Pass language codes as the tokenizer writes them, such as eng_Latn for NLLB, en_XX for mBART or en for M2M100.",
        ) from error
    return dict(encoded)
