"""`model.generate` as a user calls it: options, ends, streamers, several sequences, records, and how often it compiles."""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import processes
import pytest
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError

_IDS = torch.tensor([[5, 17, 40, 8, 61, 33]])


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(llama_folder)


@pytest.fixture(scope="module")
def plain(plain_llama: Any) -> list[int]:
    """What transformers writes after the prompt: 20 greedy tokens."""
    return plain_llama.generate(_IDS, attention_mask=torch.ones_like(_IDS), do_sample=False, max_new_tokens=20)[
        0, 6:
    ].tolist()


# Ends


@pytest.mark.parametrize("as_override", [True, False])
def test_ends_at_the_first_of_several_eos_ids(hfax_llama: JaxModel, plain: list[int], as_override: bool) -> None:
    first, second = plain[7], plain[4]
    end = min(plain.index(first), plain.index(second))
    options = {"eos_token_id": [first, second]}
    if as_override:
        out = hfax_llama.generate(_IDS, max_new_tokens=20, do_sample=False, **options)
    else:
        config = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, **options)
        out = hfax_llama.generate(_IDS, generation_config=config)
    assert out[0, 6:].tolist() == plain[: end + 1]


def test_a_row_that_ended_is_filled_with_the_pad_token(
    hfax_llama: JaxModel, plain_llama: Any, plain: list[int]
) -> None:
    batch = torch.cat([_IDS, _IDS + 1])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": plain[3], "pad_token_id": 0}
    expected = plain_llama.generate(batch, attention_mask=torch.ones_like(batch), **options)
    ours = hfax_llama.generate(batch, attention_mask=torch.ones_like(batch), **options)
    assert ours.tolist() == expected.tolist()
    assert 0 in ours[0, 6:].tolist()


def test_min_new_tokens_holds_the_end_back(hfax_llama: JaxModel, plain_llama: Any, plain: list[int]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 8, "do_sample": False, "eos_token_id": plain[2]}
    expected = plain_llama.generate(_IDS, attention_mask=torch.ones_like(_IDS), pad_token_id=0, **options)
    assert hfax_llama.generate(_IDS, **options).tolist() == expected.tolist()


def test_ends_at_a_stop_string(hfax_llama: JaxModel, tokenizer: Any, plain: list[int]) -> None:
    stop = [f"w{plain[5]} w{plain[6]}", "w1234"]
    ours = hfax_llama.generate(_IDS, max_new_tokens=20, do_sample=False, stop_strings=stop, tokenizer=tokenizer)
    assert ours[0, 6:].tolist() == plain[:7]


def test_stop_strings_need_the_tokenizer(hfax_llama: JaxModel) -> None:
    with pytest.raises(InvalidInputError, match="tokenizer"):
        hfax_llama.generate(_IDS, max_new_tokens=4, stop_strings=["w1"])


# Streamers


def test_text_streamer_prints_the_text(
    hfax_llama: JaxModel, tokenizer: Any, plain: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    hfax_llama.generate(_IDS, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out.strip() == tokenizer.decode(plain)


def test_text_iterator_streamer_gives_the_text_from_another_thread(
    hfax_llama: JaxModel, tokenizer: Any, plain: list[int]
) -> None:
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=hfax_llama.generate, args=(_IDS,), kwargs=options)
    thread.start()
    assert "".join(streamer).strip() == tokenizer.decode(plain)
    thread.join()


def test_a_streamer_takes_one_sequence(hfax_llama: JaxModel, tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match="streamer was passed for 2 sequences"):
        hfax_llama.generate(torch.cat([_IDS, _IDS]), max_new_tokens=4, streamer=transformers.TextStreamer(tokenizer))


# Draws


def test_same_seed_same_tokens(hfax_llama: JaxModel) -> None:
    draw = lambda seed: hfax_llama.generate(_IDS, max_new_tokens=20, do_sample=True, seed=seed).tolist()  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_without_a_seed_transformers_set_seed_decides(hfax_llama: JaxModel) -> None:
    drawn = []
    for seed in (3, 3, 4):
        transformers.set_seed(seed)
        drawn.append(hfax_llama.generate(_IDS, max_new_tokens=20, do_sample=True).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_num_return_sequences_draws_different_texts_of_each_prompt(hfax_llama: JaxModel) -> None:
    batch = torch.cat([_IDS, _IDS + 1])
    out = hfax_llama.generate(batch, max_new_tokens=10, do_sample=True, num_return_sequences=3, seed=0)
    assert out.shape == (6, 16)
    assert out[:, :6].tolist() == batch.repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in out[:3, 6:].tolist()}) == 3


# Results


@pytest.mark.parametrize("make", [torch.Tensor.tolist, torch.Tensor.numpy, lambda t: jax.numpy.array(t.numpy())])
def test_ids_of_other_kinds_give_the_same_ids_as_jax_arrays(hfax_llama: JaxModel, plain: list[int], make: Any) -> None:
    out = hfax_llama.generate(make(_IDS), max_new_tokens=20, do_sample=False)
    assert isinstance(out, jax.Array)
    assert np.array(out)[0, 6:].tolist() == plain


def test_scores_and_logits_are_transformers(hfax_llama: JaxModel, plain_llama: Any) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = plain_llama.generate(_IDS, attention_mask=torch.ones_like(_IDS), **options)
    ours = hfax_llama.generate(_IDS, **options)
    assert type(ours).__name__ == type(expected).__name__
    for kind in ("scores", "logits"):
        assert len(ours[kind]) == 5
        for mine, theirs in zip(ours[kind], expected[kind], strict=True):
            assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_log_probs_are_those_of_the_drawn_tokens(hfax_llama: JaxModel) -> None:
    out = hfax_llama.generate(_IDS, max_new_tokens=5, do_sample=True, seed=0, output_log_probs=True, output_logits=True)
    for step, logits in enumerate(out.logits):
        expected = torch.log_softmax(logits[0], -1)[out.sequences[0, 6 + step]]
        assert float(out.log_probs[0, step]) == pytest.approx(float(expected), abs=1e-4)


# Precedence of options


def test_overrides_come_before_the_config_and_that_before_the_model(llama_folder: Path, plain: list[int]) -> None:
    model = AutoModelForTPU.from_pretrained(llama_folder)
    model.generation_config.max_new_tokens = 4
    config = transformers.GenerationConfig(max_new_tokens=6)
    assert model.generate(_IDS, do_sample=False).shape[1] == 6 + 4
    assert model.generate(_IDS, generation_config=config, do_sample=False).shape[1] == 6 + 6
    assert model.generate(_IDS, generation_config=config, max_new_tokens=8, do_sample=False).shape[1] == 6 + 8


@pytest.mark.parametrize("option", [{"token_healing": True}, {"penalty_alpha": 0.5}, {"max_new_token": 3}])
def test_what_is_not_implemented_is_refused_by_name(hfax_llama: JaxModel, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match=next(iter(option))):
        hfax_llama.generate(_IDS, max_new_tokens=3, **option)


# Compilations


def test_second_prompt_of_the_same_size_class_compiles_nothing(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a folder of its own for programs: those of an earlier run would take the place of every compilation."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    model = AutoModelForTPU.from_pretrained(llama_folder)
    batch = torch.cat([_IDS, _IDS + 1, _IDS + 2])
    model.generate(batch, max_new_tokens=10, do_sample=False)
    counted: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: counted.append(event) if event.endswith("backend_compile_duration") else None
    )
    model.generate(torch.cat([batch, batch], dim=1)[:, :9], max_new_tokens=14, do_sample=False)
    model.generate(torch.cat([batch, _IDS + 4])[:, :4], max_new_tokens=30, do_sample=False)
    assert not counted
    model.generate(batch.repeat(1, 6), max_new_tokens=10, do_sample=False)
    assert counted, "the count is dead"


_SECOND_PROCESS = """
import sys, jax, torch
counted = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: counted.append(event) if event.endswith("backend_compile_duration") else None
)
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
out = model.generate([[5, 17, 40, 8, 61, 33]], max_new_tokens=20, do_sample=False)
print(len(counted), out[0, 6:].tolist())
"""


def test_second_process_compiles_nothing(llama_folder: Path, plain: list[int], tmp_path: Path) -> None:
    command = ["-c", _SECOND_PROCESS, llama_folder]
    runs = [processes.run(command, {"HFAX_HOME": str(tmp_path)}).stdout.split(maxsplit=1) for _ in range(2)]
    assert int(runs[0][0]) > 0
    assert int(runs[1][0]) == 0
    assert runs[0][1].strip() == runs[1][1].strip() == str(plain)
