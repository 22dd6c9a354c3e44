"""Beam search beside transformers' own: ids, beams and scores; sampled beams; what is refused; how often it compiles."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from beam_models import DECODERS, ENCODER_DECODERS, MODELS, OPTIONS, BeamModel, assert_same_search, generate, load

from hfax import AutoModelForTPU
from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.beam_config import BeamSpec
from hfax.generation.beam_search import _best_continuations
from hfax.generation.sampling_config import make_sampling_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*Input ids are automatically padded")
_IDS = torch.tensor([[5, 17, 40, 8, 61, 33]])
_ON_EVERY_CHANGE = {
    *(("marian", options) for options in OPTIONS),
    *(("llama", options) for options in ("never ends early", "does not repeat", "renormalizes")),
    ("gemma3_text", "prefers short texts"),
    ("mamba", "defaults"),
}
"""The sweep runs every model with all options."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BeamModel]:
    """Holds four models: the programs of all would need more maps of memory than a process has (`vm.max_map_count`)."""
    return functools.lru_cache(maxsize=4)(lambda name: load(name, tmp_path_factory.mktemp(name)))


def _cases() -> list[Any]:
    pairs = [(name, options) for name in MODELS for options in OPTIONS]
    return [
        pytest.param(*pair, marks=() if pair in _ON_EVERY_CHANGE else pytest.mark.sweep, id="-".join(pair))
        for pair in pairs
    ]


# Against transformers


@pytest.mark.parametrize(("name", "options"), _cases())
def test_a_padded_batch_is_searched_as_in_transformers(
    name: str, options: str, loaded: Callable[[str], BeamModel]
) -> None:
    model = loaded(name)
    assert_same_search(model, model.batch, **OPTIONS[options])


@pytest.mark.parametrize(
    "name", [n if n in ("marian", "llama") else pytest.param(n, marks=pytest.mark.sweep) for n in MODELS]
)
def test_a_prompt_alone_is_searched_as_in_transformers(name: str, loaded: Callable[[str], BeamModel]) -> None:
    model = loaded(name)
    assert_same_search(model, model.one(1), num_beams=4, num_return_sequences=4)


def test_the_tables_show_what_they_are_for(loaded: Callable[[str], BeamModel]) -> None:
    """Texts that end early, texts of different lengths, and beams that change places."""
    model = loaded("marian")
    found = [generate(model.ours, model.batch, eos_token_id=model.eos, **options) for options in OPTIONS.values()]
    lengths = [(result.beam_indices >= 0).sum(dim=1) for result in found]
    assert any(int(of.max()) < 12 for of in lengths)
    assert any(len(set(of.tolist())) > 1 for of in lengths)
    assert any((result.beam_indices % 4 > 0).any() for result in found)
    assert len(ENCODER_DECODERS) >= 12
    assert len(DECODERS) >= 12


def test_scores_of_tokens_sum_up_to_the_score_of_their_sequence(loaded: Callable[[str], BeamModel]) -> None:
    model = loaded("marian")
    result = assert_same_search(model, model.batch, num_beams=4, num_return_sequences=4, length_penalty=0.5)
    of_tokens = model.ours.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
    expected = model.plain.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
    torch.testing.assert_close(of_tokens, expected)
    lengths = (result.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(of_tokens.sum(dim=1) / lengths**0.5, result.sequences_scores, rtol=1e-4, atol=1e-4)


def test_log_probs_are_those_of_the_best_text(loaded: Callable[[str], BeamModel]) -> None:
    model = loaded("marian")
    options: dict[str, Any] = {"num_beams": 4, "eos_token_id": model.eos, "output_log_probs": True}
    result = generate(model.ours, model.batch, **options)
    of_tokens = model.plain.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
    torch.testing.assert_close(result.log_probs, of_tokens, rtol=1e-4, atol=1e-5)


def test_ids_alone_are_the_result_unless_more_is_asked_for(loaded: Callable[[str], BeamModel]) -> None:
    model = loaded("marian")
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.ours.generate(**model.batch, **options), model.plain.generate(**model.batch, **options))
    result = model.ours.generate(**model.batch, **options, return_dict_in_generate=True)
    assert result.sequences_scores is None
    assert result.beam_indices.shape == (3, 8)


def test_the_checkpoint_may_ask_for_beams(tmp_path: Path) -> None:
    """As those of Marian, BART, Pegasus and NLLB do."""
    model = load("bart", tmp_path)
    model.ours.generation_config.num_beams = model.plain.generation_config.num_beams = 4
    expected = model.plain.generate(**model.batch, max_new_tokens=10)
    assert torch.equal(model.ours.generate(**model.batch, max_new_tokens=10), expected)


def test_half_precision_weights_are_searched_too(llama_folder: Path) -> None:
    """Its scores are those of its own logits; which tokens they choose depends on the rounding of each library."""
    model = AutoModelForTPU.from_pretrained(llama_folder, dtype="bfloat16")
    result = generate(model, {"input_ids": _IDS}, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    of_tokens = model.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
    torch.testing.assert_close(of_tokens.sum(dim=1), result.sequences_scores, rtol=1e-4, atol=1e-4)
    assert result.sequences_scores.tolist() == sorted(result.sequences_scores.tolist(), reverse=True)


# Sampled beams


def _sample(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return generate(model, inputs, do_sample=True, num_beams=3, num_return_sequences=3, top_k=20, **options)


def test_the_same_seed_samples_the_same_beams_in_every_batch(loaded: Callable[[str], BeamModel]) -> None:
    model = loaded("llama")
    first, again, other = (_sample(model.ours, model.one(0), seed=seed).sequences.tolist() for seed in (1, 1, 2))
    assert first == again != other
    batch = torch.cat([model.one(0)["input_ids"]] * 2)
    assert _sample(model.ours, {"input_ids": batch}, seed=1).sequences[:3].tolist() == first


def test_sampled_beams_have_the_scores_of_their_tokens(loaded: Callable[[str], BeamModel]) -> None:
    model = loaded("llama")
    options: dict[str, Any] = {"eos_token_id": model.eos, "length_penalty": 0.0, "seed": 3}
    result = _sample(model.ours, model.batch, **options)
    of_tokens = model.plain.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
    torch.testing.assert_close(of_tokens.sum(dim=1), result.sequences_scores, rtol=1e-4, atol=1e-4)


def test_candidates_are_drawn_without_replacement_in_proportion_to_their_probability() -> None:
    """20000 prompts of one distribution: each unordered pair of candidates as often as draws of `torch.multinomial` have it."""
    prompts, vocab = 20_000, 3
    config = transformers.GenerationConfig(do_sample=True, num_beams=2, top_k=0)
    sampling, _ = make_sampling_spec(config, vocab_size=vocab, prompt_length=1, max_new_tokens=1)
    log_probs = np.log(np.asarray([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], np.float32))
    running = np.asarray([-0.1, -1.1], np.float32)
    drawn = jax.jit(_best_continuations, static_argnums=(0, 1))(
        BeamSpec(num_beams=2, num_candidates=2),
        sampling,
        jnp.tile(log_probs, (prompts, 1)),
        jnp.tile(running, (prompts, 1)),
        jnp.uint32(0),
        jnp.int32(0),
    )
    totals, parent, token = map(np.asarray, drawn)
    place = np.sort(parent * vocab + token, axis=1)
    p = np.exp(log_probs + running[:, None]).reshape(-1)
    p /= p.sum()
    assert (place[:, 0] < place[:, 1]).all()
    assert (totals[:, 0] >= totals[:, 1]).all()
    for i in range(6):
        for j in range(i + 1, 6):
            expected = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
            found = ((place == [i, j]).all(axis=1)).mean()
            assert abs(found - expected) < 5 * (expected * (1 - expected) / prompts) ** 0.5


# Refusals


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (InvalidInputError, "num_return_sequences", {"num_beams": 2, "num_return_sequences": 3}),
        (InvalidInputError, "num_beams=0", {"num_beams": 0}),
        (InvalidInputError, "early_stopping", {"num_beams": 2, "early_stopping": "always"}),
        (InvalidInputError, "length_penalty", {"num_beams": 2, "length_penalty": float("nan")}),
        (UnsupportedOptionError, "stop_strings", {"num_beams": 2, "stop_strings": ["w1"]}),
        (UnsupportedOptionError, "several", {"num_beams": 2, "prompt_lookup_num_tokens": 3}),
        (UnsupportedOptionError, "group-beam-search", {"num_beams": 4, "num_beam_groups": 2}),
        (UnsupportedOptionError, "separates groups", {"num_beams": 4, "diversity_penalty": 0.5}),
        (UnsupportedOptionError, "constrained-beam-search", {"num_beams": 4, "force_words_ids": [[1]]}),
        (UnsupportedOptionError, "constrained-beam-search", {"num_beams": 4, "constraints": [object()]}),
    ],
)
def test_what_cannot_be_searched_is_refused(
    hfax_llama: JaxModel, error: type[Exception], says: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=says):
        hfax_llama.generate(_IDS, max_new_tokens=3, do_sample=False, **options)


def test_a_streamer_is_refused_as_in_transformers(hfax_llama: JaxModel, llama_folder: Path) -> None:
    streamer = transformers.TextStreamer(transformers.AutoTokenizer.from_pretrained(llama_folder))
    with pytest.raises(UnsupportedOptionError, match="streamer"):
        hfax_llama.generate(_IDS, max_new_tokens=3, num_beams=2, streamer=streamer)


# Compilations


def test_values_of_the_options_compile_nothing(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a folder of its own for programs: those of an earlier run would take the place of every compilation."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    model = AutoModelForTPU.from_pretrained(llama_folder)
    options: dict[str, Any] = {"do_sample": False, "num_beams": 3, "eos_token_id": 5}
    counted: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: counted.append(event) if event.endswith("backend_compile_duration") else None
    )
    model.generate(_IDS, max_new_tokens=10, **options)
    assert len(counted) == 2
    for others in (
        {"length_penalty": -2.0},
        {"length_penalty": 1.5, "early_stopping": "never"},
        {"early_stopping": True, "num_return_sequences": 3},
        {"eos_token_id": 9},
    ):
        model.generate(_IDS[:, :5], max_new_tokens=9, **options | others)
    assert len(counted) == 2
