"""A fixed sample of the support matrix that goes through every patch and every kind of cache, compared with plain transformers."""

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import transformers

from hfax.cli.app import run
from hfax.errors import InvalidInputError
from hfax.matrix import case
from hfax.matrix.architectures import MAPPINGS, Architecture, architectures
from hfax.matrix.case import CaseResult
from hfax.matrix.command import run_matrix
from hfax.matrix.report import render
from hfax.matrix.runner import run_cases
from hfax.patches import registry

SAMPLE = {
    "causal-lm": [
        "llama",  # full attention
        "mistral",  # a sliding window shorter than the prompt
        "gemma4_text",  # heads that differ between layers, shared caches
        "llama4_text",  # chunked attention
        "deepseek_v3",  # latent attention
        "deepseek_v32",  # an indexer's keys
        "deepseek_v4",  # without a cache; additive masks; sinks
        "mamba2",  # states
        "qwen3_next",  # gated delta rule beside attention
        "falcon_h1",  # attention and states in one layer
        "inkling_text",  # a window and states in one layer
        "inkling2_text",  # sinks of each token, in attention of its own
        "recurrent_gemma",  # states on modules
        "rwkv",  # a list of states
        "gpt_neo",  # a table of windows
        "falcon",  # calls torch's attention itself
        "zamba2",  # shared attention
        "bart",  # positions that count padding
        "xglm",
        "dbrx",
        "jetmoe",
        "longcat_flash",
        "gpt_oss",
        "gemma4_unified",
        "roberta",  # position ids that it would count wrongly by itself
        "bamba",
        "blt",  # patches of bytes by entropy
        "diffllama",  # torch's own norm
        "xlm",  # predicts at an appended mask, without a cache
        "xlstm",  # takes no mask
        "dory",  # layers in a loop
    ],
    "seq2seq-lm": [
        *("t5", "m2m_100", "nllb-moe", "switch_transformers", "seamless_m4t", "seamless_m4t_v2"),
        *("led", "fsmt", "prophetnet"),  # no mask for a single token
    ],
    "question-answering": ["longformer"],  # windows with global tokens
    "universal-segmentation": ["eomt"],  # queries masked in some blocks
    "masked-lm": ["xlm", "bert"],
    "image-text-to-text": [
        "llava",
        "qwen2_vl",  # a grid, positions of three axes
        "qwen2_5_vl",  # windows of patches
        "glm4v",  # position embeddings looked up by grids
        "paddleocr_vl",  # patches merged behind the tower
        "llava_next",  # tiles without their padding
        "gemma3",  # token types of images
        "ovis2",
        "mllama",  # cross-attention to images
        "paligemma",  # prompts that see themselves in both directions
        "blip-2",
        "ernie4_5_vl_moe",
        "glm5_next",
        "hunyuan_vl",
        "idefics3",
        "kimi_k25",
        "kosmos-2",
        "kosmos-2.5",
        "qwen4_exp",
        "step3p7",
        "idefics",  # features of images that every step reads
        "instructblipvideo",
    ],
    "speech-seq2seq": ["whisper"],
    "image-classification": ["vit"],
    "ctc": ["wav2vec2"],
    "base": [
        "swin2sr",  # rolled windows
        "reformer",  # hashes, with a bucket for padding
        "udop",  # patches of images under words
        "vits",  # a number of frames that is read between programs
        "lightglue",  # many such values
        "higgs_audio_v2",  # two kinds of tokens
    ],
}


ON_EVERY_CHANGE = [
    "causal-lm/mistral",
    "causal-lm/gemma4_text",
    "causal-lm/deepseek_v3",
    "causal-lm/mamba2",
    "causal-lm/qwen3_next",
    "causal-lm/falcon_h1",
    "causal-lm/gpt_oss",
    "seq2seq-lm/m2m_100",
    "masked-lm/bert",
    "image-text-to-text/qwen2_vl",
    "speech-seq2seq/whisper",
    "base/swin2sr",
]
"""A kind of cache or of model each; the sweep runs the whole sample."""


def chosen(mapping: str, model_types: list[str]) -> list[Architecture]:
    return [a for a in architectures(mapping) if a.model_type in model_types]


def assert_agrees(result: CaseResult) -> None:
    assert result.outcome == "works", f"{result.mapping}/{result.model_type}: {result.outcome}: {result.reason}"
    assert result.error <= 1e-4
    if result.generates:
        assert result.decode_traces == 1


@pytest.mark.parametrize("name", ON_EVERY_CHANGE)
def test_agrees_with_transformers(name: str) -> None:
    mapping, model_type = name.split("/")
    assert model_type in SAMPLE[mapping]
    (result,) = run_cases(chosen(mapping, [model_type]))
    assert_agrees(result)


@pytest.mark.sweep
@pytest.mark.timeout(2400)
def test_the_sample_agrees_and_goes_through_every_patch() -> None:
    results = run_cases([a for mapping, types in SAMPLE.items() for a in chosen(mapping, types)], timeout_s=600)
    assert len(results) == sum(map(len, SAMPLE.values()))
    for result in results:
        assert_agrees(result)
    used = Counter(name for r in results for name in r.patches)
    unused = {p.name for p in registry.all_patches()} - set(used)
    # these need inputs that the sample does not give, or training: tests/test_images.py, test_audio.py, generation, patches, train
    others = {
        "audio-tokens-are-expanded",
        "cross-entropy",
        "ctc-loss",
        "padding-images-dropped",
        "pixels-in-size-classes",
        "packed-only-where-positions-say-so",
        "value-checks",
    }
    assert unused <= others


def test_what_does_not_work_is_told_from_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = run_cases([Architecture(mapping="causal-lm", model_type="xlnet", class_name="XLNetLMHeadModel")])
    assert result.outcome == "generate fails"
    assert "permutation mask" in result.reason
    page = render([result])
    assert "| causal-lm | 1 | 0 | 0 | 1 of 1 | 0 of 1 | 0 of 1, 0.0% |" in page
    assert "| xlnet | generate fails |" in page


def test_reasons_do_not_say_where_libraries_lie_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: dict[str, Any]) -> None:
        raise RuntimeError(f"a line of {transformers.__file__}")

    monkeypatch.setattr(case, "_build", fail)
    result = case.run_case(Architecture(mapping="base", model_type="vits", class_name="VitsModel"))
    assert result.outcome == "unbuilt"
    assert result.reason.startswith("RuntimeError: a line of transformers/__init__.py [")


def test_a_class_that_cannot_be_built_counts_neither_way() -> None:
    (result,) = run_cases(
        [Architecture(mapping="causal-lm", model_type="gemma4_assistant", class_name="Gemma4AssistantForCausalLM")]
    )
    assert result.outcome == "unbuilt"


def test_command_writes_both_files(tmp_path) -> None:
    failed = run_matrix(
        mappings=["masked-lm"], model_types=["bert"], json_file=tmp_path / "a.json", markdown=tmp_path / "b" / "a.md"
    )
    assert failed == 0
    assert '"outcome": "works"' in (tmp_path / "a.json").read_text()
    assert "| masked-lm | 1 | 0 | 0 | 1 of 1 |  | 1 of 1, 100.0% |" in (tmp_path / "b" / "a.md").read_text()


def test_an_interrupted_run_resumes_with_what_does_not_work_yet(tmp_path, monkeypatch) -> None:
    file = tmp_path / "support.json"
    ran: list[str] = []

    def run_some(chosen, on_result, **_):
        for a in chosen:
            ran.append(a.model_type)
            failed = a.model_type == "bert" and len(ran) < 3
            outcome = "forward differs" if failed else "works"
            on_result(CaseResult(**dataclasses.asdict(a), outcome=outcome, gradient_error=0.0))

    monkeypatch.setattr("hfax.matrix.command.run_cases", run_some)
    options = {"mappings": ["masked-lm"], "model_types": ["bert", "albert"], "json_file": file, "trains": True}
    assert run_matrix(**options) == 1
    ran.append("")
    assert run_matrix(**options, resume=True, markdown=tmp_path / "support.md") == 0
    assert ran == ["albert", "bert", "", "bert"]
    assert "| 2 of 2, 100.0% |" in (tmp_path / "support.md").read_text()
    changed = json.loads(file.read_text())
    changed["versions"]["jax"] = "0.1"
    file.write_text(json.dumps(changed))
    with pytest.raises(InvalidInputError, match="are of other versions"):
        run_matrix(**options, resume=True)
    file.write_text("[]")
    with pytest.raises(InvalidInputError, match="has no results of hfax matrix"):
        run_matrix(**options, resume=True)
    assert run(["matrix", "--resume"]) == 1


def test_every_mapping_has_architectures() -> None:
    assert all(architectures(m) for m in MAPPINGS)
