"""Scales of keys and values in checkpoints: a cache of float8 holds what transformers' would, divided by them."""

import contextlib

import numpy as np
import packers
import pytest
import tiny_models
import torch
import transformers
from agreement import plain_reference
from tiny_models import random_model, save
from transformers.cache_utils import Cache

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.errors import CheckpointCorruptError
from hfax.kernels.target import compiling_for

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
SCALES = [[0.0004, 0.003], [0.05, 0.0007]]
"""Those of each layer's keys and values. Without them, or with each other's, most numbers would be rounded to 0, or coarsely."""
NAMES = ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"]
BATCH = {
    "input_ids": torch.tensor([[0, 0, 5, 17, 40, 8, 21, 3, 9, 11, 2, 7], [9, 3, 61, 33, 2, 7, 15, 4, 50, 8, 30, 12]]),
    "attention_mask": torch.tensor([[0, 0, *[1] * 10], [1] * 12]),
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}


@contextlib.contextmanager
def rounding(scales):
    """transformers' caches hold float8, divided by these scales."""
    update = Cache.update

    def rounded(self, keys, values, layer_idx, *args, **options):
        keys, values = (
            ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
            for x, scale in zip((keys, values), scales[layer_idx], strict=True)
        )
        return update(self, keys, values, layer_idx, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Cache, "update", rounded)
        yield


def scores_of(out):
    return np.stack([np.asarray(step, np.float32) for step in out.scores])


def check(model, plain):
    """Logits and tokens are those of transformers with a cache that rounds likewise, and the engine's tokens are those, too."""
    exact = plain.generate(**BATCH, **GREEDY)
    with rounding([(1.0, 1.0)] * 2):
        unscaled = scores_of(plain.generate(**BATCH, **GREEDY))[0]
    with rounding(SCALES):
        expected = plain.generate(**BATCH, **GREEDY)
    ours = model.generate(**BATCH, **GREEDY, kv_cache_dtype="fp8")
    assert ours.sequences.tolist() == expected.sequences.tolist()
    error = np.abs(scores_of(ours) - scores_of(expected)).mean()
    assert error < 0.1 * np.abs(scores_of(exact)[0] - scores_of(expected)[0]).mean()
    assert error < 0.1 * np.abs(unscaled - scores_of(expected)[0]).mean()
    auto = model.generate(**BATCH, **GREEDY)
    np.testing.assert_allclose(scores_of(auto), scores_of(exact), atol=2e-4)
    prompt = BATCH["input_ids"][1].tolist()
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
    with Engine(model, config=EngineConfig(**options, kv_cache_dtype="fp8")) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    assert output.outputs[0].token_ids == ours.sequences[1, 12:].tolist()


@pytest.mark.parametrize("names", NAMES)
def test_scales_are_read_by_each_librarys_names(tmp_path, plain, names):
    tensors, config = plain("llama")
    stored, numbers = packers.quantized(
        tensors,
        lambda _, w: (
            dict(zip(("weight", "weight_scale_inv"), (f := packers.fp8(w, (32, 32)))[:2], strict=True)),
            f[2],
        ),
    )
    for layer, scales in enumerate(SCALES):
        for kind, scale in zip("kv", scales, strict=True):
            stored[f"model.layers.{layer}.{names.format(kind)}"] = torch.tensor(scale)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    model = AutoModelForTPU.from_pretrained(packers.write(tmp_path / "packed", stored, config, FP8), dtype="float32")
    np.testing.assert_allclose(model.config.kv_cache_scales, SCALES, rtol=1e-6)
    check(model, reference)
    if names == NAMES[0]:
        model.save_pretrained(tmp_path / "saved")
        check(AutoModelForTPU.from_pretrained(tmp_path / "saved", dtype="float32"), reference)
        stored["model.layers.1.self_attn.v_scale"] = torch.tensor(0.0)
        with pytest.raises(CheckpointCorruptError, match=r"layers\.1\.self_attn\.v_scale"):
            AutoModelForTPU.from_pretrained(packers.write(tmp_path / "packed", stored, config, FP8))


@pytest.mark.parametrize(
    ("config", "pages"),
    [
        (
            transformers.Gemma2Config(**tiny_models.SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=5.0),
            False,
        ),
        (
            transformers.GptOssConfig(**tiny_models.SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
            False,
        ),
        (transformers.Qwen3Config(**tiny_models.SIZES, head_dim=128), True),
    ],
    ids=["window and cap", "sinks", "pages"],
)
def test_every_kind_of_cache_uses_them(tmp_path, monkeypatch, config, pages):
    """Also the pages of TPUs, which are read here as dense keys and values. The config has the scales."""
    config.kv_cache_scales = SCALES
    plain = random_model(config)
    model = AutoModelForTPU.from_pretrained(save(tmp_path, plain))
    if pages:
        with_pages = lambda *args, **options: compiling_for(*args, **options | {"pages": True})  # noqa: E731
        monkeypatch.setattr("hfax.programs.program_cache.compiling_for", with_pages)
    check(model, plain)
    cache = model.generate(**BATCH, **GREEDY, kv_cache_dtype="fp8").cache.state["cache"]
    assert any("pages" in name for name in cache) == pages
