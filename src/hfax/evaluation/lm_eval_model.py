"""The lm-evaluation-harness model "hfax": `hfax lm-eval --model hfax --model_args pretrained=…`.

Importing this module registers it. Requests use the same tokens, windows and stop sequences as the harness's own "hf" model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError
from hfax.evaluation.scoring import score

_DEFAULT_CONTEXT = 2048


@register_model("hfax")
class HfaxLM(TemplateLM):
    """A decoder running on JAX.

    Args:
        pretrained: checkpoint name, see `AutoModelForTPU.from_pretrained`; or a loaded hfax model.
        revision: Hub revision.
        dtype: weight dtype.
        parallelism: "auto" or None.
        quantization: "int8" or "int4".
        peft: an adapter's folder or Hub id.
        max_length: maximum sequence length, in tokens; None: the model's context length.
        max_gen_toks: default maximum number of generated tokens.
        batch_size: batch size.
        add_bos_token: whether to add a BOS token; None: the tokenizer's default.
        trust_remote_code: see `from_pretrained`.
    """

    def __init__(
        self,
        pretrained: str | JaxModel,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        parallelism: str | None = None,
        quantization: Any = None,
        peft: str | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 8,
        add_bos_token: bool | None = None,
        trust_remote_code: bool = False,
        device: Any = None,
        max_batch_size: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        if more:
            raise InvalidInputError(
                f"Unknown model_args: {', '.join(sorted(more))}.",
                "The hfax model would ignore them.",
                "Use pretrained, revision, dtype, parallelism, quantization, peft, max_length, max_gen_toks, add_bos_token.",
            )
        del device, max_batch_size  # the harness passes them to all models
        from transformers import AutoTokenizer

        from hfax.auto import AutoModelForTPU

        if isinstance(pretrained, str):
            options: dict[str, Any] = {"revision": revision, "dtype": dtype, "parallelism": parallelism}
            options |= {"quantization": quantization, "trust_remote_code": trust_remote_code}
            self.model: Any = AutoModelForTPU.from_pretrained(pretrained, **options)
        else:
            self.model = pretrained
        if peft is not None:
            self.model.load_adapter(peft)
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(
            self.model.folder, trust_remote_code=trust_remote_code
        )
        self.max_length = int(max_length or self.model.context_length or _DEFAULT_CONTEXT)
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = 8 if batch_size == "auto" else int(batch_size)
        self.add_bos_token = add_bos_token

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token id."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token id that precedes text without context."""
        first = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer name, for the harness's request cache."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with the tokenizer's special tokens unless overridden by `add_bos_token` or the call."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            wanted = False
        return self.tokenizer.encode(string, **({} if wanted is None else {"add_special_tokens": wanted}))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation[-self.max_length :]) for _, context, continuation in requests]
        found = []
        step = self.batch_size * 32  # small enough to show progress
        for begin in tqdm(range(0, len(pairs), step), desc="Running loglikelihood requests", disable=disable_tqdm):
            scores = score(
                self.model, pairs[begin : begin + step], batch_size=self.batch_size, max_length=self.max_length
            )
            found += [(s.total, s.is_greedy) for s in scores]
        for (request, _, _), answer in zip(requests, found, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in non-overlapping windows."""
        found = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs: list[Any] = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(value for value, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate each request until one of its stop sequences."""
        groups: dict[str, list[int]] = {}
        given: list[Any] = [request.args for request in requests]
        for number, (_, options) in enumerate(given):
            groups.setdefault(repr(sorted(options.items(), key=lambda item: item[0])), []).append(number)
        found: dict[int, str] = {}
        progress = tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm)
        for numbers in groups.values():
            ordered = sorted(numbers, key=lambda n: -len(given[n][0]))
            for begin in range(0, len(ordered), self.batch_size):
                own = ordered[begin : begin + self.batch_size]
                texts = self._generate([given[n][0] for n in own], given[own[0]][1])
                for n, text in zip(own, texts, strict=True):
                    found[n] = text
                    self.cache_hook.add_partial("generate_until", given[n], text)
                progress.update(len(own))
        progress.close()
        return [found[n] for n in range(len(requests))]

    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        given: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(given.pop("until", None), eos=eos)
        most = given.pop("max_gen_toks")
        given.pop("max_length", None)
        room = self.max_length - most
        if room < 1:
            raise InvalidInputError(
                f"max_gen_toks={most} leaves no room in a context of {self.max_length} tokens.",
                "The prompt needs at least one token.",
                "Lower max_gen_toks.",
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        longest = max(len(prompt) for prompt in prompts)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.eot_token_id
        ids = np.full((len(prompts), longest), pad, np.int32)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        if not given.get("do_sample"):
            given = {n: v for n, v in given.items() if n not in ("temperature", "top_p", "top_k")}
        stops = [stop for stop in until if stop and stop != eos]
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            stop_strings=stops or None,
            tokenizer=self.tokenizer,
            pad_token_id=pad,
            **given,
        )
        written = np.asarray(out)[:, longest:].tolist()
        texts = (self.tokenizer.decode(row, skip_special_tokens=True) for row in written)
        return [postprocess_generated_text(text, until, None) for text in texts]
