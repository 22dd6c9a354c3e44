"""Every kind of model takes the step that torch takes."""

from __future__ import annotations

import numpy as np
import optax
import pytest
import torch
import transformers
from flax import nnx
from tiny_models import save

from hfax import AutoModelForTPU, Trainer, TrainingArguments, make_train_step, to_nnx
from hfax.matrix.architectures import Architecture, architectures, small_config
from hfax.matrix.case import draw_weights
from hfax.synthetic.inputs import make_inputs
from hfax.tracing.abstract import open_skeleton
from hfax.train.updates import choose_decay

KINDS = {
    "base": "BertModel",
    "image-classification": "ViTForImageClassification",
    "batch-norm": "ResNetForImageClassification",
    "semantic-segmentation": "SegformerForSemanticSegmentation",
    "audio-classification": "ASTForAudioClassification",
    "token-classification": "BertForTokenClassification",
    "sequence-classification": "LlamaForSequenceClassification",
    "question-answering": "BertForQuestionAnswering",
    "masked-lm": "BertForMaskedLM",
    "seq2seq-lm": "BartForConditionalGeneration",
    "speech-seq2seq": "WhisperForConditionalGeneration",
    "state-space": "MambaForCausalLM",
    "convolution": "Lfm2ForCausalLM",
    "image-text-to-text": "LlavaForConditionalGeneration",
}
MAPPINGS = {"batch-norm": "image-classification", "state-space": "causal-lm", "convolution": "causal-lm"}


def model_type(class_name: str) -> str:
    return getattr(transformers, class_name).config_class.model_type


def both(kind: str, folder):
    """Plain transformers' small model of a kind, and hfax's of its folder."""
    mapping, name = MAPPINGS.get(kind, kind), KINDS[kind]
    config = small_config(Architecture(mapping=mapping, model_type=model_type(name), class_name=name))
    config.architectures = [name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = getattr(transformers, name)._from_config(config).eval()
        draw_weights(plain)
    return plain, AutoModelForTPU.from_pretrained(save(folder, plain))


def batch(kind: str, plain) -> dict[str, np.ndarray]:
    """Inputs with labels; for some kinds, one that is ignored."""
    rng, config = np.random.default_rng(0), plain.config
    inputs = {n: v.numpy() for n, v in make_inputs(plain, MAPPINGS.get(kind, kind)).forward.items()}
    if kind == "base":
        return inputs
    inputs.pop("decoder_input_ids", None)
    if kind == "question-answering":
        return inputs | {"start_positions": np.array([1, 2]), "end_positions": np.array([3, 4])}
    if kind == "semantic-segmentation":
        labels = rng.integers(0, config.num_labels, (2, *inputs["pixel_values"].shape[-2:]))
        labels[0, :5] = config.semantic_loss_ignore_index
    elif "classification" in MAPPINGS.get(kind, kind) and kind != "token-classification":
        labels = rng.integers(0, config.num_labels, 2)
    else:
        shape = inputs["input_ids"].shape if "input_ids" in inputs else (2, 6)
        labels = rng.integers(3, 50, shape) if kind != "token-classification" else rng.integers(0, 2, shape)
        labels[0, :2] = -100
    return inputs | {"labels": labels}


def squares(apply, inputs):
    return (apply(**inputs).last_hidden_state ** 2).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_torch(kind, tmp_path):
    """Buffers (running statistics, `final_logits_bias`) and tables that the class freezes were trained, too."""
    plain, model = both(kind, tmp_path)
    inputs = batch(kind, plain)
    out = plain(**{n: torch.tensor(a) for n, a in inputs.items()})
    loss = (out.last_hidden_state**2).mean() if kind == "base" else out.loss
    loss.backward()
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad and n not in model.parts.tied}
    before = {n: np.asarray(a) for n, a in model.params.items()}
    step = make_train_step(model, optax.sgd(1.0), squares if kind == "base" else None, dropout=False)
    state, metrics = step(step.init(), inputs)
    assert set(step.trainable) == set(trained)
    assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    scale = max(float(p.grad.abs().max()) for p in trained.values() if p.grad is not None)
    for name, parameter in trained.items():
        gradient = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        atol = 1e-4 * max(np.abs(gradient).max(), 1e-2 * scale)
        np.testing.assert_allclose(before[name] - np.asarray(state.params[name]), gradient, atol=atol, err_msg=name)
    step.update_model(state)
    for name in model.params.keys() - trained.keys():
        np.testing.assert_array_equal(np.asarray(model.params[name]), before[name], err_msg=name)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)


def test_models_without_a_vocabulary_have_a_trainer_and_a_module(tmp_path):
    plain, model = both("image-classification", tmp_path / "model")
    inputs = batch("image-classification", plain)
    rows = [{n: a[i % 2] for n, a in inputs.items()} for i in range(4)]
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "learning_rate": 1e-2}
    trainer = Trainer(model, TrainingArguments(tmp_path / "run", **options), rows)
    before = plain(**{n: torch.tensor(a) for n, a in inputs.items()}).loss.item()
    assert trainer.train()["loss"] < before
    module = to_nnx(model)
    gradients = nnx.grad(lambda m: m(**inputs).loss)(module)
    assert len(nnx.to_flat_state(gradients)) == len(model.params)


@pytest.mark.parametrize("kind", ["batch-norm", "seq2seq-lm"])
def test_parameters_of_an_nnx_module_are_torchs(kind, tmp_path):
    plain, model = both(kind, tmp_path)
    module = to_nnx(model)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert paths == {n for n, p in plain.named_parameters() if p.requires_grad}
    inputs = batch(kind, plain)
    expected = plain(**{n: torch.tensor(a) for n, a in inputs.items()}).loss
    assert float(module(**inputs).loss) == pytest.approx(expected.item(), rel=1e-4)


def test_weights_decay_as_in_transformers_trainer():
    """By names alone, norms called `ln_f` or `ln_1` decayed: those of GPT-2, Bloom and MPT."""
    compared = 0
    for mapping in ("causal-lm", "seq2seq-lm", "image-classification", "masked-lm"):
        for architecture in architectures(mapping)[::5]:
            try:
                config = small_config(architecture)
                config.architectures = [architecture.class_name]
                with torch.device("meta"):
                    plain = getattr(transformers, architecture.class_name)._from_config(config)
            except Exception:  # transformers itself cannot build it here
                continue
            expected = transformers.Trainer.get_decay_parameter_names(None, plain)  # type: ignore[arg-type]
            decays = choose_decay(open_skeleton(config).module)
            names = [name for name, _ in plain.named_parameters()]
            assert [n for n in names if decays(n)] == [n for n in names if n in expected], architecture.class_name
            compared += any(isinstance(part, torch.nn.LayerNorm) for part in plain.modules())
    assert compared > 20
