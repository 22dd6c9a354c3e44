"""Variations drawn at random, and the corpus of those that once failed."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tiny_llama_config
from transformers import MistralConfig

import hfax
from hfax.errors import InvalidInputError
from hfax.matrix import sweep
from hfax.matrix.architectures import Architecture, architectures, small_config
from hfax.matrix.case import CaseResult, run_case, with_ties_in_order
from hfax.matrix.runner import run_cases
from hfax.matrix.variations import Variation, apply_changes, draw, vary_inputs
from hfax.synthetic.inputs import CaseInputs, make_inputs

MISTRAL = Architecture(mapping="causal-lm", model_type="mistral", class_name="MistralForCausalLM")
WINDOWED = Variation(changes={"sliding_window": 3}, lengths=(9, 2), new_tokens=6)
CORPUS = sweep.read_corpus(Path(__file__).parent / "corpus.json")


def names_of(case: tuple[Architecture, Variation]) -> str:
    architecture, variation = case
    return f"{architecture.mapping}/{architecture.model_type}-{'-'.join(variation.changes) or 'call'}"


@pytest.mark.parametrize("case", CORPUS, ids=names_of)
def test_what_once_failed_agrees(case: tuple[Architecture, Variation]) -> None:
    (result,) = run_cases([case[0]], [case[1]])
    assert result.verdict in ("works", "refused"), result.reason


def test_a_seed_draws_the_same_and_another_seed_something_else() -> None:
    config = small_config(MISTRAL)
    drawn = [draw(config, "causal-lm", seed) for seed in range(30)]
    assert drawn == [draw(config, "causal-lm", seed) for seed in range(30)]
    assert len({repr(one) for one in drawn}) == 30
    changed = {name for one in drawn for name in one.changes}
    assert {"sliding_window", "num_attention_heads", "num_key_value_heads", "rope_parameters", "hidden_act"} <= changed
    assert {one.padding for one in drawn} == {"left", "right", "holes"}


def test_changes_reach_parts_of_a_config() -> None:
    config = tiny_llama_config()
    apply_changes(config, {"vocab_size": 300, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}})
    assert (config.vocab_size, config.rope_parameters["rope_theta"]) == (300, 10.0)


def test_a_call_has_the_rows_and_the_padding_that_were_drawn() -> None:
    model = hfax.AutoModelForTPU.from_config(tiny_llama_config()).module
    ids = torch.ones(2, 4, dtype=torch.long)
    inputs = CaseInputs(forward={"input_ids": ids, "attention_mask": ids, "position_ids": ids}, generate={}, mask=None)

    def masks(padding: str) -> tuple[list[list[int]], list[list[int]]]:
        varied = vary_inputs(model, inputs, Variation(lengths=(7, 3), padding=padding))
        return varied.forward["attention_mask"].tolist(), varied.generate["attention_mask"].tolist()

    left = [[1] * 7, [0] * 4 + [1] * 3]
    assert masks("left") == (left, left)
    assert masks("right") == ([[1] * 7, [1] * 3 + [0] * 4], left)
    holes, whole = masks("holes")
    assert whole == left
    assert 0 in holes[0]
    assert holes[0][-1] == holes[1][-1] == 1
    assert vary_inputs(model, inputs, Variation()) is inputs


def test_images_have_the_sizes_that_were_drawn() -> None:
    (architecture,) = (a for a in architectures("image-text-to-text") if a.model_type == "qwen2_vl")
    config = small_config(architecture)
    drawn = [draw(config, "image-text-to-text", seed) for seed in range(10)]
    assert len({one.image_sizes for one in drawn}) > 5
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    inputs = make_inputs(model, "image-text-to-text")
    varied = vary_inputs(model, inputs, Variation(image_sizes=((1, 3), (4, 2)), around=(2, 6)))
    merge = config.vision_config.spatial_merge_size
    assert varied.forward["image_grid_thw"].tolist() == [[1, merge, 3 * merge], [1, 4 * merge, 2 * merge]]
    assert varied.forward["attention_mask"].sum(1).tolist() == [2 + 3 + 6, 2 + 8 + 5]


def test_prompts_with_images_have_the_padding_that_was_drawn() -> None:
    (architecture,) = (a for a in architectures("image-text-to-text") if a.model_type == "qwen2_vl")
    config = small_config(architecture)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    inputs = make_inputs(model, "image-text-to-text")

    def rows(padding: str) -> tuple[CaseInputs, list[torch.Tensor]]:
        varied = vary_inputs(model, inputs, Variation(image_sizes=((1, 1), (4, 2)), around=(2, 6), padding=padding))
        ids, mask = varied.forward["input_ids"], varied.forward["attention_mask"]
        assert torch.equal(varied.generate["attention_mask"][:, -1], torch.ones(2, dtype=torch.long))
        return varied, [row[real.bool()] for row, real in zip(ids, mask, strict=True)]

    left, texts = rows("left")
    assert left.forward["attention_mask"][0].tolist() == [0] * 6 + [1] * 9
    right, same = rows("right")
    assert right.forward["attention_mask"][0].tolist() == [1] * 9 + [0] * 6
    assert all(map(torch.equal, texts, same))
    holes, fewer = rows("holes")
    assert all(len(a) < len(b) for a, b in zip(fewer, texts, strict=True))
    for one in (right, holes):
        assert torch.equal(one.generate["input_ids"], left.forward["input_ids"])
        assert (one.forward["input_ids"] == config.image_token_id).sum() == 1 + 8


def test_a_result_has_the_variation_that_was_asked_for() -> None:
    """transformers changes dicts of a config in place, and the process's copy comes back."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    variation = Variation(changes={"rope_parameters": rope}, lengths=(3,), new_tokens=1)
    drawn = repr(variation)
    (result,) = run_cases([MISTRAL], [variation])
    assert repr(result.variation) == repr(variation) == drawn


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "support.json"
    for text in ('{\n "versions": 1\n}\n', '{"versions": 1}\n', "[1]\n", "half"):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match="no records of random variations"):
            sweep.run_sweep(draws=1, mappings=["causal-lm"], json_file=file)
        assert file.read_text() == text


def test_an_interrupted_sweep_resumes_and_its_page_counts_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    fails = {"mistral"}

    def run(architectures, variations, *, on_result, **_):
        results = []
        for architecture, variation in zip(architectures, variations, strict=True):
            ran.append(architecture.model_type)
            outcome = {"outcome": "generate differs", "reason": "row 0 | 1"} if architecture.model_type in fails else {}
            results.append(CaseResult(**dataclasses.asdict(architecture), variation=variation, **outcome))
            on_result(results[-1])
        return results

    monkeypatch.setattr(sweep, "run_cases", run)
    file, page = tmp_path / "draws.jsonl", tmp_path / "page.md"
    given = {"mappings": ["causal-lm"], "model_types": ["llama", "mistral"], "json_file": file, "markdown": page}
    sweep.run_sweep(draws=2, **given)
    assert ran == ["llama", "mistral"] * 2
    assert "| causal-lm | 4 | 2 | 0 | 0 | 2 |" in page.read_text()
    assert "| mistral | generate differs | row 0 / 1 | 2 |" in page.read_text()
    with file.open("a") as lines:
        lines.write('{"mapping": "causal-lm", "mod')  # the process was killed here
    ran.clear()
    fails.clear()
    sweep.run_sweep(draws=3, **given)
    assert ran == ["mistral", "mistral", "llama", "mistral"]  # what failed again, and the third of each
    assert "| causal-lm | 6 | 6 | 0 | 0 | 0 |" in page.read_text()
    ran.clear()
    sweep.run_sweep(draws=3, **given)
    assert not ran


def test_an_agreeing_variation_works_and_a_window_that_is_off_by_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_case(MISTRAL, variation=WINDOWED).outcome == "works"
    plain = hfax.AutoModelForTPU.from_pretrained

    def shifted(folder: str, **options: object) -> object:
        config = MistralConfig.from_pretrained(folder)
        config.sliding_window += 1
        config.save_pretrained(folder)
        return plain(folder, **options)

    monkeypatch.setattr(hfax.AutoModelForTPU, "from_pretrained", shifted)
    result = run_case(MISTRAL, variation=WINDOWED)
    assert result.outcome == "forward differs"
    assert result.variation == WINDOWED


def test_a_failure_is_reduced_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(architectures, variations, **_):
        fails = "sliding_window" in variations[0].changes and variations[0].new_tokens > 5
        outcome = "generate differs" if fails else "works"
        return [CaseResult(**dataclasses.asdict(architectures[0]), outcome=outcome, variation=variations[0])]

    monkeypatch.setattr(sweep, "run_cases", run)
    changes = {"vocab_size": 300, "sliding_window": 3, "hidden_act": "relu"}
    drawn = Variation(changes=changes, lengths=(5, 2, 9), padding="holes", new_tokens=40)
    failed = run([MISTRAL], [drawn])[0]
    smallest = sweep.minimise(failed).variation
    assert smallest == Variation(changes={"sliding_window": 3}, lengths=(5,), new_tokens=10)


def test_the_corpus_keeps_each_case_once(tmp_path: Path) -> None:
    file = tmp_path / "corpus.json"
    result = CaseResult(**dataclasses.asdict(MISTRAL), outcome="generate differs", variation=WINDOWED)
    other = dataclasses.replace(result, variation=Variation(image_sizes=((1, 2), (3, 1)), around=(1, 2)))
    sweep.add_to_corpus(file, [result, other])
    sweep.add_to_corpus(file, [result])
    assert sweep.read_corpus(file) == [(MISTRAL, WINDOWED), (MISTRAL, other.variation)]
    assert sweep.read_corpus(tmp_path / "nothing.json") == []


def test_hfaxs_own_errors_are_no_defects() -> None:
    fields = dataclasses.asdict(MISTRAL)
    refused = CaseResult(**fields, outcome="forward fails", reason="UnsupportedModelError: it is so")
    assert refused.verdict == "refused"
    assert CaseResult(**fields, outcome="forward fails", reason="TypeError: x").verdict == "forward fails"
    with pytest.raises(InvalidInputError, match="Unknown mapping nothing"):
        sweep.run_sweep(draws=1, mappings=["nothing"])


def test_one_reference_breaks_ties_by_their_order() -> None:
    values, plain = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]]), torch.topk
    assert with_ties_in_order(lambda: values.topk(2)).indices.tolist() == [[1, 3]]
    assert with_ties_in_order(lambda: torch.topk(values, 2, largest=False)).values.tolist() == [[1.0, 2.0]]
    assert torch.topk is plain
