"""Optimizers by name: two steps beside torch's and transformers' classes on the same gradients."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM
from transformers.optimization import Adafactor

from hfax import InvalidInputError, Trainer, TrainingArguments, UnsupportedOptionError
from hfax.train.optimizers import Weights, make_optimizer

from .small_models import CONFIGS, make, rows

SHAPES = {"layer.weight": (12, 8), "wide.weight": (6, 20), "embed.weight": (30, 8), "norm.bias": (8,)}
RNG = np.random.default_rng(0)
START, *GRADIENTS = ({n: RNG.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(3))
WEIGHTS = Weights(
    decays=lambda name: "bias" not in name,
    is_hidden=lambda name: not name.startswith("embed"),
    is_embedding=lambda name: name.startswith("embed"),
)
RATE, DECAY = 0.02, 0.1


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2 (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params, lr, betas):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = torch.sign(first * momentum + (1 - first) * weight.grad)
                weight -= group["lr"] * (update + group["weight_decay"] * weight)
                momentum.mul_(second).add_(weight.grad, alpha=1 - second)


def as_torch(make):
    """Weights after two steps, with transformers' two groups."""
    weights = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in START.items()}
    groups = [
        {"params": [w for n, w in weights.items() if WEIGHTS.decays(n) == decays], "weight_decay": DECAY * decays}
        for decays in (True, False)
    ]
    for optimizer in make(groups, weights):
        for gradients in GRADIENTS:
            for name, weight in weights.items():
                weight.grad = torch.tensor(gradients[name])
            optimizer.step()
    return {n: w.detach().numpy() for n, w in weights.items()}


def as_hfax(**options):
    arguments = TrainingArguments(
        "run", learning_rate=RATE, weight_decay=DECAY, max_grad_norm=None, lr_scheduler_type="constant", **options
    )
    optimizer = make_optimizer(arguments, arguments.schedule(10), WEIGHTS)
    params = {n: jnp.asarray(a) for n, a in START.items()}
    state = optimizer.init(params)
    for gradients in GRADIENTS:
        updates, state = optimizer.update({n: jnp.asarray(a) for n, a in gradients.items()}, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"optim": "adamw_torch", "adam_beta2": 0.95}, lambda g: torch.optim.AdamW(g, lr=RATE, betas=(0.9, 0.95))),
        ({"optim": "sgd"}, lambda g: torch.optim.SGD(g, lr=RATE)),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
            lambda g: torch.optim.SGD(g, lr=RATE, momentum=0.9, nesterov=True),
        ),
        ({"optim": "adafactor"}, lambda g: Adafactor(g, lr=RATE, scale_parameter=False, relative_step=False)),
        ({"optim": "lion", "adam_beta2": 0.99}, lambda g: Lion(g, lr=RATE, betas=(0.9, 0.99))),
    ],
)
def test_two_steps_are_those_of_torch(options, make):
    expected, found = as_torch(lambda groups, _: [make(groups)]), as_hfax(**options)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6, err_msg=name)
        assert np.abs(found[name] - START[name]).max() > 1e-3


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch_for_hidden_matrices_and_adamw_for_others(adjust):
    """torch orthogonalizes in bfloat16, so its matrices are close; what AdamW changes is equal."""
    hidden = ("layer.weight", "wide.weight")

    def make(groups, weights):
        muon = torch.optim.Muon([weights[n] for n in hidden], lr=RATE, weight_decay=DECAY, adjust_lr_fn=adjust)
        others = [{**g, "params": [p for p in g["params"] if all(p is not weights[n] for n in hidden)]} for g in groups]
        return [muon, torch.optim.AdamW(others, lr=RATE)]

    expected, found = as_torch(make), as_hfax(optim="muon", optim_args={"adjust_lr_fn": adjust})
    for name in SHAPES:
        change = np.abs(expected[name] - START[name]).max()
        np.testing.assert_allclose(found[name], expected[name], atol=0.03 * change if name in hidden else 2e-6)


def test_hidden_weights_are_neither_embeddings_nor_heads():
    with torch.device("meta"):
        llama = LlamaForCausalLM(CONFIGS["llama"]())
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        bert = BertForSequenceClassification(BertConfig(**sizes))
    is_hidden = Weights.of(llama).is_hidden
    assert not any(map(is_hidden, ("model.embed_tokens.weight", "lm_head.weight")))
    assert all(map(is_hidden, ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.lora_A.weight")))
    is_hidden = Weights.of(bert).is_hidden
    assert not any(map(is_hidden, ("bert.embeddings.position_embeddings.weight", "classifier.weight")))
    assert is_hidden("bert.encoder.layer.0.output.dense.weight")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optim": "paged_adamw_8bit"}, UnsupportedOptionError, "hfax has AdamW and Lion with 8"),
        ({"optim": "adamw_torch_4bit"}, UnsupportedOptionError, "Use adamw_8bit or lion_8bit"),
        ({"optim": "galore_adamw"}, InvalidInputError, "'galore_adamw' is unknown"),
        ({"optim": "chain"}, InvalidInputError, "'chain' is unknown"),
        ({"optim": "sgd", "optim_args": {"beta": 1}}, InvalidInputError, "'beta', which sgd does not take"),
        ({"optim": "adafactor", "adam_beta1": 0.8}, InvalidInputError, "adam_beta1=0.8 has no effect"),
        ({"optim": "lamb", "weight_decay": 0.1}, InvalidInputError, "options of optax.lamb are given in optim_args"),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=1"}, InvalidInputError, "adjust_lr_fn=1 is unknown"),
        ({"optim": "sgd", "optim_args": "momentum"}, InvalidInputError, "could not be read"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        TrainingArguments("run", **options)


def test_a_run_uses_the_optimizer_that_is_named_and_resumes_with_it(tmp_path):
    _, model = make("llama", tmp_path / "model", num_hidden_layers=1)
    data = rows("llama", 8)
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    for name in ("muon", "lamb"):
        arguments = TrainingArguments(tmp_path / name, optim=name, **options)
        trainer = Trainer(model, arguments, data)
        assert np.isfinite(trainer.train()["loss"])
    arguments = TrainingArguments(tmp_path / "muon", optim="adamw_torch", **{**options, "max_steps": 3})
    with pytest.raises(InvalidInputError, match='optim was "muon" and is now "adamw_torch"'):
        Trainer(model, arguments, data).resume()
