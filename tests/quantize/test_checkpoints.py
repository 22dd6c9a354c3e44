"""`hfax.quantize` from a checkpoint to a checkpoint: what it measures, what it writes, and what others read of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from quantizable_models import TOKENIZER

import hfax
from hfax.errors import HfaxError, InvalidInputError, UnsupportedModelError
from hfax.kernels.quantized import QuantizedArray
from hfax.quantization import awq, layer_steps
from hfax.quantization.calibration import make_blocks, read_rows

SMALL = {"num_samples": 16, "max_length": 64}
HELD_OUT = 8
"""Rows of the two batches that 16 rows of 64 tokens make: the second one is held out."""


def held_out(text: Path) -> np.ndarray:
    return make_blocks(read_rows(text), TOKENIZER, count=16, length=64)[-HELD_OUT:]


def perplexity_of(logits: np.ndarray, ids: np.ndarray) -> float:
    flat = torch.from_numpy(logits[:, :-1]).flatten(0, 1)
    return math.exp(torch.nn.functional.cross_entropy(flat, torch.from_numpy(ids)[:, 1:].flatten().long()))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "gptq"),
        ("bfloat16", "awq"),
        ("windows", "awq"),
        ("experts", "gptq"),
        pytest.param("fused", "gptq", marks=pytest.mark.sweep),
        pytest.param("parallel", "awq", marks=pytest.mark.sweep),
        ("tuples", "gptq"),
        pytest.param("recurrent", "awq", marks=pytest.mark.sweep),
        ("of two schemes", "awq"),
        pytest.param("of two schemes", "rtn", marks=pytest.mark.sweep),
    ],
)
def test_the_perplexities_are_those_of_both_checkpoints(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, name: str, method: Any
) -> None:
    """Before, of transformers on the given one; afterwards, of hfax on the written one."""
    folder, ids = checkpoint(name), held_out(text)
    report = hfax.quantize(folder, tmp_path / "out", data=text, method=method, **SMALL)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tolerance = 2e-2 if plain.dtype == torch.bfloat16 else 1e-4
    with torch.no_grad():
        before = perplexity_of(plain(input_ids=torch.from_numpy(ids).long()).logits.float().numpy(), ids)
    assert report.perplexity_before == pytest.approx(before, rel=tolerance)
    mine = hfax.AutoModelForTPU.from_pretrained(tmp_path / "out")
    logits = np.array(mine(input_ids=ids).logits, np.float32)
    assert report.perplexity == pytest.approx(perplexity_of(logits, ids), rel=tolerance)
    packed = [weight for weight in mine.params.values() if isinstance(weight, QuantizedArray)]
    assert len(packed) == report.num_quantized
    assert not (tmp_path / "out" / ".quantizing").exists()


@pytest.mark.parametrize("name", ["llama", "bfloat16", "experts", "of two schemes"])
def test_transformers_reads_the_checkpoint(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, name: str
) -> None:
    hfax.quantize(checkpoint(name), tmp_path, data=text, **SMALL)
    ids = held_out(text)
    mine = np.asarray(hfax.AutoModelForTPU.from_pretrained(tmp_path)(input_ids=ids).logits, np.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(input_ids=torch.from_numpy(ids).long()).logits.float().numpy()
    # on average: activations rounded to 16 bits may choose other experts
    assert np.abs(mine - theirs).mean() <= (0.05 if model.dtype == torch.bfloat16 else 5e-3) * np.abs(theirs).mean()


@pytest.mark.parametrize(("name", "method"), [("llama", "gptq"), ("llama", "awq"), ("experts", "gptq")])
def test_calibration_lowers_the_error(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, name: str, method: Any
) -> None:
    """Logits of held-out text are closer to the checkpoint's own than after rounding to nearest."""
    folder, ids = checkpoint(name), held_out(text)
    expected = np.asarray(hfax.AutoModelForTPU.from_pretrained(folder)(input_ids=ids).logits)
    errors = []
    for number, one in enumerate((method, "rtn")):
        out = tmp_path / str(number)
        hfax.quantize(folder, out, data=text, method=one, **SMALL)
        errors.append(np.square(np.asarray(hfax.AutoModelForTPU.from_pretrained(out)(input_ids=ids).logits) - expected))
    assert errors[0].mean() < 0.99 * errors[1].mean()


def test_awq_finds_what_makes_each_input(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[str]] = {}
    plain = awq._scaled

    def noting(weights: Any, maker: str | None, readers: Any, factor: Any) -> Any:
        if maker is not None and not np.isin(np.asarray(factor), [0.5, 1, 2]).all():  # not a trial
            found[maker.split(".", 3)[3]] = {name.split(".")[-2] for name in readers}
        return plain(weights, maker, readers, factor)

    monkeypatch.setattr(awq, "_scaled", noting)
    hfax.quantize(checkpoint("llama"), tmp_path / "out", data=text, method="awq", **SMALL)
    assert found == {
        "input_layernorm.weight": {"q_proj", "k_proj", "v_proj"},
        "post_attention_layernorm.weight": {"gate_proj", "up_proj"},
        "mlp.up_proj.weight": {"down_proj"},
    }


def test_the_moments_are_those_of_torch_s_inputs(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first layer, whose input no quantized layer has changed."""
    found: dict[str, np.ndarray] = {}
    plain = layer_steps.LayerSteps.observe

    def noting(self: Any, *arguments: Any) -> Any:
        moments = plain(self, *arguments)
        for modules, moment in moments.items():
            for name in modules:
                found[name] = found.get(name, 0) + np.asarray(moment)
        return moments

    monkeypatch.setattr(layer_steps.LayerSteps, "observe", noting)
    hfax.quantize(checkpoint("llama"), tmp_path / "out", data=text, **SMALL)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    expected: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    for part, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = f"model.layers.0.{part}"
            module.register_forward_pre_hook(lambda _, args, name=name: expected.update({name: args[0].flatten(0, 1)}))
    ids = make_blocks(read_rows(text), TOKENIZER, count=16, length=64)[:HELD_OUT]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids).long())
    assert len(expected) == 7
    for name, rows in expected.items():
        moment = rows.T @ rows
        torch.testing.assert_close(torch.from_numpy(found[name]), moment, rtol=0, atol=1e-5 * float(moment.max()))


class Interrupted(Exception):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_quantization_goes_on_where_it_was(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, observed = checkpoint("llama"), list[str]()

    def stop(name: str, done: int, total: int) -> None:
        if done == 2:
            raise Interrupted

    hfax.quantize(folder, tmp_path / "whole", data=text, **SMALL)
    with pytest.raises(Interrupted):
        hfax.quantize(folder, tmp_path / "parts", data=text, progress=stop, **SMALL)
    assert not list((tmp_path / "parts").glob("*.safetensors"))
    with pytest.raises(InvalidInputError, match="unfinished quantization with another group_size"):
        hfax.quantize(folder, tmp_path / "parts", data=text, group_size=64, **SMALL)
    plain = layer_steps.LayerSteps.observe
    monkeypatch.setattr(layer_steps.LayerSteps, "observe", lambda self, *a: observed.append(a[0]) or plain(self, *a))
    hfax.quantize(folder, tmp_path / "parts", data=text, **SMALL)
    assert set(observed) == {"model.layers.2"}
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_one_layer_is_in_memory_at_a_time(checkpoint: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    outside = 2 * len(TOKENIZER) * 128 * 4
    layer = (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256) * 4
    before, most = {id(array) for array in jax.live_arrays()}, 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(a.nbytes for a in jax.live_arrays() if a.ndim == 2 and id(a) not in before))

    hfax.quantize(checkpoint("llama"), tmp_path / "out", data=text, progress=look, **SMALL)
    assert outside + layer < most < outside + 2.2 * layer


def test_modules_that_are_ignored_stay_as_they_are(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    report = hfax.quantize(folder, tmp_path, data=text, ignore=["*.0.*", "*.o_proj"], bits=8, group_size=32, **SMALL)
    assert report.num_quantized == 12
    found, plain = (hfax.AutoModelForTPU.from_pretrained(f).params for f in (tmp_path, folder))
    for name, weight in found.items():
        if ".0." in name or "o_proj" in name:
            assert np.array_equal(np.asarray(weight), np.asarray(plain[name])), name
        elif name.startswith("model.layers.") and weight.ndim == 2:
            assert isinstance(weight, QuantizedArray)
            assert weight.encoding == "int8"
            assert weight.group == 32
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in config["ignore"]


def test_rows_of_conversations_calibrate(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What does len return?"}, {"role": "assistant", "content": "A number."}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"messages": messages}) + "\n\n") * 20)
    report = hfax.quantize(checkpoint("llama"), tmp_path / "out", data=rows, num_samples=4, max_length=32)
    assert report.tokens == 2 * 31
    again = hfax.quantize(
        checkpoint("llama"), tmp_path / "again", data=[{"messages": messages}] * 20, num_samples=4, max_length=32
    )
    assert again.perplexity == report.perplexity


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("encoder-decoder", {}, UnsupportedModelError, "no decoder with a list of layers"),
        ("convolutions", {}, UnsupportedModelError, "no matrix to quantize"),
        ("llama", {"ignore": ["*"]}, UnsupportedModelError, "no matrix to quantize"),
        ("llama", {"bits": 3}, InvalidInputError, "bits=3"),
        ("llama", {"group_size": 100}, InvalidInputError, "group_size=100"),
        ("llama", {"method": "magic"}, InvalidInputError, "method='magic'"),
        ("llama", {"damping": 0.0}, InvalidInputError, "damping=0.0"),
        ("llama", {"num_samples": 1}, InvalidInputError, "num_samples=1"),
        ("llama", {"data": [{"text": "Too short."}]}, InvalidInputError, "The calibration data has"),
        ("llama", {"data": "missing.txt"}, InvalidInputError, "missing.txt could not be read"),
        ("llama", {"data": [{"words": "?"}]}, InvalidInputError, "unknown format"),
    ],
)
def test_what_cannot_be_quantized_is_an_error_and_writes_nothing(
    checkpoint: Callable[[str], Path],
    text: Path,
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    error: type[HfaxError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        hfax.quantize(checkpoint(name), tmp_path / "out", **{"data": text, **SMALL, **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [("[1, 2]", "jsonl, line 2, is not an object"), ('{"text": ', "jsonl, line 2, is not valid JSON")],
)
def test_a_line_that_is_no_row_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, line: str, message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "One."}\n' + line + "\n")
    with pytest.raises(InvalidInputError, match=message):
        hfax.quantize(checkpoint("llama"), tmp_path / "out", data=rows)


def test_a_checkpoint_is_not_written_over_itself(checkpoint: Callable[[str], Path], text: Path) -> None:
    with pytest.raises(InvalidInputError, match="own folder"):
        hfax.quantize(checkpoint("llama"), checkpoint("llama"), data=text, **SMALL)


def test_the_moments_of_experts_are_those_of_their_tokens(
    checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first matrices read all tokens; the last one of each expert what it made of the tokens that chose it."""
    found: dict[str, np.ndarray] = {}
    plain = layer_steps.LayerSteps.observe

    def noting(self: Any, name: str, *arguments: Any) -> Any:
        moments = plain(self, name, *arguments)
        for (weight, *_), moment in moments.items():
            if ".layers.0." in weight and "experts" in weight:
                found[weight.rpartition(".")[2]] = found.get(weight.rpartition(".")[2], 0) + np.asarray(moment)
        return moments

    monkeypatch.setattr(layer_steps.LayerSteps, "observe", noting)
    report = hfax.quantize(checkpoint("experts"), tmp_path / "out", data=text, **SMALL)
    assert report.num_uncalibrated == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("experts"))
    experts = model.model.layers[0].mlp.experts
    given: list[Any] = []
    experts.register_forward_pre_hook(lambda _, args, kwargs: given.append((*args, *kwargs.values())), with_kwargs=True)
    ids = make_blocks(read_rows(text), TOKENIZER, count=16, length=64)[:HELD_OUT]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids).long())
        rows, chosen = given[0][:2]
        expected = []
        for number, matrix in enumerate(experts.gate_up_proj):
            inner = experts._apply_gate(rows[(chosen == number).any(-1)] @ matrix.T)
            expected.append(inner.T @ inner)
    for name, moment in (("gate_up_proj", rows.T @ rows), ("down_proj", torch.stack(expected))):
        torch.testing.assert_close(torch.from_numpy(found[name]), moment, rtol=0, atol=1e-4 * float(moment.max()))


def test_layers_of_one_structure_share_their_programs(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo has six layers: the first is given no hidden states, and each runs with its own weights and with quantized ones."""
    counts: list[int] = []
    plain = layer_steps.LayerSteps.losses

    def noting(self: Any, *arguments: Any) -> Any:
        found = plain(self, *arguments)
        counts.append(len(self._programs))
        return found

    monkeypatch.setattr(layer_steps.LayerSteps, "losses", noting)
    hfax.quantize("demo", tmp_path / "out", data=text, **SMALL)
    assert counts[-1] == 2 * 3 + 1
