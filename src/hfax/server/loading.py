"""Loads what a server serves: an engine for a model that generates, or an embedder for one that does not."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hfax.checkpoint import Checkpoint
from hfax.engine.config import EngineConfig
from hfax.engine.engine import Engine
from hfax.engine.sampling_params import MAX_SUPPRESSED
from hfax.server.chat import ChatTemplate
from hfax.server.embeddings import Embedder
from hfax.server.request_reader import RequestReader
from hfax.server.token_text import TokenText

logger = logging.getLogger(__name__)

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Generation config options that serve as request defaults."""
OnStep = Callable[[float, int], None]
"""Called after each engine step with its seconds and token count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded model.

    Args:
        tokenizer: a transformers tokenizer.
        template: the chat template.
        engine: for generative models; None for others.
        embedder: for encoder models; None for others.
        defaults: default request options by name, from the model's generation config.
        max_new_tokens: the generation config's `max_new_tokens`; None if unset.
    """

    tokenizer: Any
    template: ChatTemplate
    engine: Engine | None
    embedder: Embedder | None
    defaults: dict[str, Any]
    max_new_tokens: int | None

    @functools.cached_property
    def token_text(self) -> TokenText:
        """The texts and bytes of the tokenizer's tokens."""
        return TokenText(self.tokenizer)


Load = Callable[[OnStep], Loaded]
"""Loads the model; called in a thread of its own."""


def make_reader(loaded: Loaded, model_names: tuple[str, ...], image_hosts: tuple[str, ...]) -> RequestReader:
    """What reads the model's requests.

    Args:
        loaded: the model.
        model_names: model names accepted in requests.
        image_hosts: host names that images may be fetched from.
    """
    engine = loaded.engine
    if engine is not None:
        longest: int | None = engine.limits.max_model_len
    else:
        assert loaded.embedder is not None
        longest = loaded.embedder.max_tokens
    return RequestReader(
        loaded.tokenizer,
        loaded.template,
        vocab_size=engine.vocab_size if engine is not None else 0,
        eos_token_ids=engine.stop_token_ids if engine is not None else (),
        max_model_len=longest,
        model_names=model_names,
        image_hosts=image_hosts,
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    engine_config: EngineConfig,
    *,
    chat_template: str | None,
    on_step: OnStep,
    in_background: bool = False,
) -> Loaded:
    """Load a checkpoint and compile its programs.

    Args:
        checkpoint: the checkpoint.
        engine_config: the engine's configuration, for a model that generates.
        chat_template: a chat template that replaces the tokenizer's.
        on_step: called after each engine step.
        in_background: see `Engine.warm_up`.
    """
    tokenizer = checkpoint.open_tokenizer()
    if _generates(checkpoint.architectures):
        processor = checkpoint.load_processor()
        model = checkpoint.load_model()
        return load_writer(
            model,
            tokenizer,
            engine_config,
            processor=processor,
            chat_template=chat_template,
            on_step=on_step,
            in_background=in_background,
        )
    embedder = Embedder(checkpoint.load_model("feature-extraction"), tokenizer, checkpoint.source.folder)
    embedder.warm_up()
    template = ChatTemplate(tokenizer, None, chat_template)
    return Loaded(
        tokenizer=tokenizer, template=template, engine=None, embedder=embedder, defaults={}, max_new_tokens=None
    )


def _generates(names: Sequence[str]) -> bool:
    """Whether the checkpoint's class, one of these, generates text."""
    return not names or any(n.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for n in names)


def load_writer(
    model: Any,
    tokenizer: Any,
    engine_config: EngineConfig,
    *,
    processor: Any,
    chat_template: str | None,
    on_step: OnStep,
    in_background: bool = False,
) -> Loaded:
    """Start an engine for a generative model, and warm it up.

    Args:
        model: an hfax model.
        tokenizer: the model's tokenizer.
        engine_config: the engine's configuration.
        processor: a transformers processor for image input; None: the model takes no images.
        chat_template: a chat template that replaces the tokenizer's.
        on_step: called after each engine step with its seconds and token count.
        in_background: see `Engine.warm_up`.
    """
    engine = Engine(model, tokenizer, engine_config, on_step=on_step)
    defaults, most = read_defaults(model.default_option)
    engine.warm_up(in_background=in_background)
    return Loaded(
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer, processor, chat_template),
        engine=engine,
        embedder=None,
        defaults=defaults,
        max_new_tokens=most,
    )


def read_defaults(default: Callable[[str], Any]) -> tuple[dict[str, Any], int | None]:
    """Request defaults from a model's generation config, and its `max_new_tokens`.

    Args:
        default: gives the config's value of an option.
    """
    found: dict[str, Any] = {}
    for name in DEFAULTS:
        if (value := default(name)) is not None:
            found[name] = value
    if not default("do_sample") and "temperature" not in found:
        found.pop("top_k", None)
    if suppressed := tuple(default("suppress_tokens") or ())[:MAX_SUPPRESSED]:
        found["suppress_tokens"] = suppressed
    for name, value in found.items():
        logger.info("request default from generation_config.json: %s = %s", name, value)
    for name in (
        "no_repeat_ngram_size",
        "bad_words_ids",
        "forced_eos_token_id",
        "begin_suppress_tokens",
        "sequence_bias",
        "typical_p",
    ):
        value = default(name)
        if value not in (None, 0, [], 1.0):
            logger.warning("generation_config.json sets %s, which the server does not support", name)
    return found, default("max_new_tokens")
