"""The CTC loss and speech models that are trained with it, beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tiny_models import random_model, save
from transformers import AutoModelForCTC, Data2VecAudioConfig, HubertConfig, SEWDConfig, Wav2Vec2Config, WavLMConfig

from hfax import AutoModelForTPU, InvalidInputError, Trainer, TrainingArguments, make_train_step
from hfax.patches.ctc import ctc_loss

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 20,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
MODELS: dict[str, Any] = {
    "wav2vec2": lambda **more: Wav2Vec2Config(**SIZES, **more),
    "hubert": lambda **more: HubertConfig(**SIZES, **more),
    "wavlm": lambda **more: WavLMConfig(**SIZES, **more),
    "data2vec-audio": lambda **more: Data2VecAudioConfig(**{**SIZES, "num_conv_pos_embeddings": 3}, **more),
    "sew-d": lambda **more: SEWDConfig(**SIZES, squeeze_factor=2, **more),
}
LABELS = torch.tensor([[3, 3, 5, 7, 2, -100], [4, -100, -100, -100, -100, -100], [6, 5, 4, -100, -100, -100]])


def _inputs() -> dict[str, Any]:
    """Three recordings of different lengths, with their labels."""
    mask = torch.ones(3, 400, dtype=torch.long)
    mask[1, 300:] = 0
    mask[2, 120:] = 0
    sound = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    return {"input_values": sound, "attention_mask": mask, "labels": LABELS}


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["rows", "one after another"])
def test_values_and_gradients_are_those_of_torch(form: str, reduction: str, zero_infinity: bool) -> None:
    """Repeated labels, rows of other lengths, a row without labels, and one with too few frames for its labels."""
    scores = torch.randn(9, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.tensor([[1, 1, 3, 5], [4, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 0], [5, 4, 3, 1]])
    lengths, counts = torch.tensor([9, 6, 7, 9, 9]), torch.tensor([4, 1, 0, 3, 4])
    if zero_infinity:
        lengths[3] = 4  # three equal labels need five frames
    given = targets if form == "rows" else torch.cat([row[:n] for row, n in zip(targets, counts, strict=True)])
    options: dict[str, Any] = {"blank": 0, "reduction": reduction, "zero_infinity": zero_infinity}
    expected = torch.nn.functional.ctc_loss(scores.log_softmax(-1), given, lengths, counts, **options)
    expected.sum().backward()

    def loss(scores: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(scores, axis=-1)
        return ctc_loss(log_probs, *(jnp.asarray(a.numpy()) for a in (given, lengths, counts)), **options)

    array = jnp.asarray(scores.detach().numpy())
    np.testing.assert_allclose(jax.jit(loss)(array), expected.detach().numpy(), rtol=1e-5)
    assert scores.grad is not None
    found = jax.jit(jax.grad(lambda scores: loss(scores).sum()))(array)
    np.testing.assert_allclose(found, scores.grad.numpy(), atol=1e-5)


def test_what_cannot_be_is_infinite_and_one_row_needs_no_axis() -> None:
    log_probs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    for targets in ([2, 2, 2], [2, 3]):
        arguments = torch.tensor(targets), torch.tensor(3), torch.tensor(len(targets))
        expected = torch.nn.functional.ctc_loss(log_probs, *arguments, reduction="none")
        found = ctc_loss(jnp.asarray(log_probs.numpy()), *(jnp.asarray(a.numpy()) for a in arguments), reduction="none")
        assert found.shape == ()
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [k if k == "wav2vec2" else pytest.param(k, marks=pytest.mark.sweep) for k in MODELS])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # torch's, of WavLM
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_speech_model_takes_the_step_of_torch(kind: str, reduction: str, tmp_path: Path) -> None:
    config = MODELS[kind](
        ctc_loss_reduction=reduction, architectures=[AutoModelForCTC._model_mapping[type(MODELS[kind]())].__name__]
    )
    plain = random_model(config, seed=0, auto=AutoModelForCTC)
    inputs = _inputs()
    loss = plain(**inputs).loss
    loss.backward()
    model = AutoModelForTPU.from_pretrained(save(tmp_path, plain))
    assert float(model(**inputs).loss) == pytest.approx(loss.item(), rel=1e-5)
    before = {name: np.asarray(array) for name, array in model.params.items()}
    step = make_train_step(model, optax.sgd(1.0), dropout=False)
    state, metrics = step(step.init(), inputs)
    assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in plain.named_parameters():
        if name in before and weight.grad is not None:
            scale = max(float(weight.grad.abs().max()), 1e-2)
            np.testing.assert_allclose(
                (before[name] - np.asarray(state.params[name])) / scale, weight.grad / scale, atol=1e-4
            )


def test_a_speech_model_has_a_trainer_and_labels_are_checked(tmp_path: Path) -> None:
    plain = random_model(MODELS["wav2vec2"](), seed=0, auto=AutoModelForCTC)
    model = AutoModelForTPU.from_pretrained(save(tmp_path / "model", plain))
    inputs = _inputs()
    rows = [
        {"input_values": inputs["input_values"][i % 3].numpy(), "labels": [n for n in LABELS[i % 3].tolist() if n >= 0]}
        for i in range(12)
    ]
    args = TrainingArguments(
        tmp_path / "run", max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, dropout=False
    )
    trainer = Trainer(model, args, rows, rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    wrong = {**inputs, "labels": LABELS + 20}
    with pytest.raises(InvalidInputError, match="labels must be below the vocabulary's size, 20"):
        model(**wrong)
    step = make_train_step(model, optax.sgd(1.0), dropout=False)
    with pytest.raises(InvalidInputError, match="the model's vocabulary has ids 0 to 19"):
        step(step.init(), wrong)
