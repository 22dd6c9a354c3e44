"""The cache that one call of `generate` returns and the next takes: transformers' text, and only new tokens are read."""

from typing import Any

import generation_pairs
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from generation_pairs import BATCH, CONFIGS, GREEDY, agree

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.generate import GenerationLoop
from hfax.generation.kept_cache import KeptCache

pairs = generation_pairs.pairs

_SLIDING = transformers.Gemma3TextConfig(
    **tiny_models.SIZES, head_dim=16, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
)
KINDS = {
    **{name: CONFIGS[name] for name in ("llama", "gpt2", "mamba")},
    "gemma3": _SLIDING,
    "mistral": transformers.MistralConfig(**tiny_models.SIZES, sliding_window=12),
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the ids that programs read as prompts, in order: [padded rows, padded tokens]."""
    shapes: list[tuple[int, int]] = []
    start = GenerationLoop.start

    def spy(self: Any, inputs: Any) -> Any:
        shapes.append(tuple(inputs["new" if "new" in inputs else "input_ids"].shape))
        return start(self, inputs)

    monkeypatch.setattr(GenerationLoop, "start", spy)
    return shapes


def turns(batch: int, count: int) -> list[torch.Tensor]:
    """New tokens of each turn: 3 to 8 of them."""
    rng = np.random.default_rng(7)
    return [torch.tensor(rng.integers(2, 97, (batch, 3 + turn % 6))) for turn in range(count)]


@pytest.mark.parametrize("name", KINDS)
def test_each_turn_of_a_conversation_reads_only_its_new_tokens(pairs: Any, name: str, read: list[Any]) -> None:
    model, plain = pairs(name, KINDS[name])
    rows = slice(1, 2) if name == "mamba" else slice(None)
    ids, mask, kept = BATCH["input_ids"][rows], BATCH["attention_mask"][rows], None
    batch = len(ids)
    for new in turns(batch, 10):
        ids = torch.cat([ids, new], dim=1)
        mask = torch.cat([mask, torch.ones(batch, ids.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
        options = {**GREEDY, "max_new_tokens": 9, "repetition_penalty": 1.2}
        out = model.generate(ids, attention_mask=mask, **options, past_key_values=kept)
        agree(out, plain.generate(ids, attention_mask=mask, **options), rtol=1e-3)
        assert isinstance(out.cache, KeptCache)
        ids, kept = out.sequences, out.cache
        assert kept.num_tokens == ids.shape[1] - 1
    assert ids.shape[1] > 128
    assert kept.capacity == 256  # it was 128 at first
    assert read == [(1 if batch == 1 else 4, 16)] * 10


def test_several_texts_continue_one_cache_and_edit_its_end(pairs: Any, read: list[Any]) -> None:
    model, plain = pairs("llama")
    first = model.generate(**BATCH, **GREEDY)
    mask = torch.nn.functional.pad(BATCH["attention_mask"], (0, 9), value=1)
    for edited in (0, 3, 6):
        ids = torch.cat([first.sequences[:, : 13 - edited], turns(3, 6)[5][:, :2]], dim=1)
        given = {"input_ids": ids, "attention_mask": mask[:, : ids.shape[1]]}
        agree(model.generate(**given, **GREEDY, cache=first.cache), plain.generate(**given, **GREEDY), rtol=1e-3)
    assert read == [(4, 16)] * 4


def test_sequences_of_a_prompt_with_a_processor_on_the_host_are_continued(pairs: Any) -> None:
    model, plain = pairs("llama")
    drawn = model.generate(
        BATCH["input_ids"][1:2], do_sample=True, num_return_sequences=3, seed=1, max_new_tokens=5,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = torch.cat([drawn.sequences, turns(3, 1)[0]], dim=1)
    seen: list[int] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        return scores.roll(1, dims=1)

    options = {**GREEDY, "logits_processor": transformers.LogitsProcessorList([note])}
    options["attention_mask"] = torch.ones_like(ids)
    mine = model.generate(ids, **options, past_key_values=drawn.cache)
    agree(mine, plain.generate(ids, **options), rtol=1e-3)
    assert seen[:7] == seen[7:]


@pytest.mark.parametrize(
    ("change", "options", "error", "what"),
    [
        (lambda ids: ids, {"past_key_values": object()}, UnsupportedOptionError, "past_key_values is a object"),
        (lambda ids: ids % 96 + 1, {}, InvalidInputError, "does not continue the text"),
        (lambda ids: ids[:2], {}, InvalidInputError, "holds 3 sequences; input_ids has 2"),
        (
            lambda ids: ids,
            {"position_ids": torch.zeros(3, 14, dtype=torch.long)},
            UnsupportedOptionError,
            "position_ids",
        ),
        (lambda ids: ids, {"guidance_scale": 2.0}, UnsupportedOptionError, "beside guidance_scale"),
        (lambda ids: ids, {"num_return_sequences": 2, "do_sample": True}, UnsupportedOptionError, "num_return_seq"),
    ],
)
def test_a_cache_that_does_not_fit_is_named(pairs: Any, change: Any, options: Any, error: type, what: str) -> None:
    model, _ = pairs("llama")
    first = model.generate(**BATCH, **GREEDY)
    ids = change(torch.cat([first.sequences, turns(3, 1)[0][:, :1]], dim=1))
    mask = torch.nn.functional.pad(BATCH["attention_mask"], (0, 8), value=1)[: len(ids)]
    with pytest.raises(error, match=what):
        model.generate(ids, attention_mask=mask, **{**GREEDY, "past_key_values": first.cache, **options})


def test_a_state_is_not_taken_back(pairs: Any) -> None:
    model, _ = pairs("mamba")
    first = model.generate(BATCH["input_ids"][1:2], **GREEDY)
    ids = torch.cat([first.sequences[:, :10], turns(1, 1)[0]], dim=1)
    with pytest.raises(UnsupportedOptionError, match="differs from past_key_values after 10 of 12 tokens"):
        model.generate(ids, **GREEDY, past_key_values=first.cache)
