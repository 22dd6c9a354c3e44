"""`hfax.pipeline` beside `transformers.pipeline`, on the same folders: same inputs, same options, same answers."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import hfax
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError

from .checkpoints import RATE, SAVE, picture, sound

TEXT = "the quick brown fox jumps over the lazy dog"
TEXTS = [TEXT, "who lives in a small red house", "fish every day"]
_CONTENT = [{"type": "image", "image": picture()}, {"type": "text", "text": "who lives near the house"}]
_WHISPER = {"max_new_tokens": 12, "num_beams": 1}
_GREEDY = {"max_new_tokens": 6, "do_sample": False}

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "text-generation": ("text-generation", TEXT, _GREEDY),
    "text-generation, several": ("text-generation", TEXTS, {**_GREEDY, "return_full_text": False}),
    "text-generation, sampling off and a batch": ("text-generation", TEXTS, {**_GREEDY, "batch_size": 2}),
    "text-classification": ("text-classification", TEXTS, {"top_k": None}),
    "text-classification, one length": ("text-classification", TEXTS, {"padding": "max_length", "max_length": 16}),
    "token-classification": ("token-classification", TEXT, {}),
    "token-classification, grouped": ("token-classification", TEXTS, {"aggregation_strategy": "simple"}),
    "fill-mask": ("fill-mask", "the quick [MASK] fox", {"top_k": 3}),
    "feature-extraction": ("feature-extraction", TEXT, {}),
    "zero-shot-classification": ("zero-shot-classification", TEXT, {"candidate_labels": ["fish", "house", "dog"]}),
    "zero-shot-classification, several labels": (
        "zero-shot-classification",
        TEXTS[:2],
        {"candidate_labels": ["fish", "house"], "multi_label": True, "hypothesis_template": "the {} ."},
    ),
    "image-classification": ("image-classification", [picture(0), picture(1)], {"top_k": 2}),
    "image-text-to-text": ("image-text-to-text", [{"role": "user", "content": _CONTENT}], _GREEDY),
    "image-text-to-text, beams": (
        "image-text-to-text",
        [{"role": "user", "content": _CONTENT}],
        {"max_new_tokens": 6, "do_sample": False, "num_beams": 3},
    ),
    "automatic-speech-recognition, as many beams as transformers": (
        "automatic-speech-recognition",
        sound(1.0),
        {"generate_kwargs": {"max_new_tokens": 12}},
    ),
    "automatic-speech-recognition": ("automatic-speech-recognition", sound(1.0), {"generate_kwargs": _WHISPER}),
    "automatic-speech-recognition, long, with times": (
        "automatic-speech-recognition",
        sound(3.1),
        {"return_timestamps": True, "generate_kwargs": {**_WHISPER, "language": "de"}},
    ),
    "automatic-speech-recognition, long, with times of words": (
        "automatic-speech-recognition",
        sound(3.1),
        {"return_timestamps": "word", "generate_kwargs": {**_WHISPER, "language": "de"}},
    ),
    "automatic-speech-recognition, ctc": ("automatic-speech-recognition, ctc", sound(1.0), {}),
    "automatic-speech-recognition, ctc, letters": (
        "automatic-speech-recognition, ctc",
        sound(1.0),
        {"return_timestamps": "char"},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("checkpoint")) for name, save in SAVE.items()}


def _same(mine: Any, theirs: Any) -> None:
    """Equal, numbers nearly."""
    if isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if key != "image":
                _same(mine[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            _same(a, b)
    elif hasattr(theirs, "item"):
        _same(float(mine), float(theirs))
    else:
        assert mine == theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    key, inputs, options = CASES[name]
    task = key.partition(",")[0]
    ours = hfax.pipeline(task, folders[key])
    theirs = transformers.pipeline(task, str(folders[key]), device="cpu")
    _same(ours(inputs, **options), theirs(inputs, **options))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_loaded_already(folders: dict[str, Path]) -> None:
    model = hfax.AutoModelForTPU.from_pretrained(folders["fill-mask"], dtype="bfloat16")
    found = hfax.pipeline("fill-mask", model)("the [MASK] dog")
    assert len(found) == 5
    assert all(0 <= f["score"] <= 1 for f in found)


def test_a_task_that_does_not_exist() -> None:
    with pytest.raises(UnsupportedOptionError, match="question-answering"):
        hfax.pipeline("sing", "demo")


def test_a_task_that_the_checkpoint_has_no_head_for(folders: dict[str, Path]) -> None:
    with pytest.raises(HfaxError, match="missing"):
        hfax.pipeline("token-classification", folders["feature-extraction"])
    with pytest.raises(UnsupportedOptionError, match="task="):
        hfax.pipeline("image-classification", folders["fill-mask"])


@pytest.mark.filterwarnings("ignore")
def test_a_folder_without_a_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders["fill-mask"] / file).read_bytes())
    with pytest.raises(HfaxError, match="tokenizer"):
        hfax.pipeline("fill-mask", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["fill-mask"])
    assert hfax.pipeline("fill-mask", tmp_path, tokenizer=tokenizer)("the [MASK]")


def test_a_plain_torch_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"transformers\.pipeline"):
        hfax.pipeline("fill-mask", transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=0)))  # type: ignore[arg-type]


def test_a_device_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="JAX_PLATFORMS"):
        hfax.pipeline("fill-mask", "demo", device="cuda:0")


@pytest.mark.filterwarnings("ignore")
def test_sound_at_another_rate_is_an_error_that_names_it(folders: dict[str, Path]) -> None:
    recognize = hfax.pipeline("automatic-speech-recognition", folders["automatic-speech-recognition, ctc"])
    with pytest.raises((ImportError, ValueError, RuntimeError), match=r"torchaudio|sampling"):
        recognize({"raw": sound(0.5), "sampling_rate": RATE // 2})
