"""Losses of preferences and distillation: trl 1.16's formulas, written here in torch, on the same logits.

Sources: trl/trainer/dpo_trainer.py, kto_trainer.py and reward_trainer.py, trl/experimental/orpo/orpo_trainer.py and
trl/experimental/gkd/gkd_trainer.py of that version.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from hfax import AutoModelForTPU, InvalidInputError, LoraConfig, make_train_step
from hfax.train.data import PaddingCollator
from hfax.train.distillation import DistillationLoss
from hfax.train.dpo import DPOLoss
from hfax.train.preference_collators import PairCollator, VerdictCollator
from hfax.train.preference_losses import KTOLoss, ORPOLoss, RewardLoss

from .small_models import make, rows

VOCABULARY, LENGTH = 11, 9
RNG = np.random.default_rng(0)
PAIRS = [
    {
        f"{side}_{part}": ids if part == "ids" else [-100] * 3 + ids[3:]
        for side, length in (("chosen", chosen), ("rejected", rejected))
        for ids in [RNG.integers(1, VOCABULARY, length).tolist()]
        for part in ("ids", "labels")
    }
    for chosen, rejected in ((9, 6), (5, 8), (7, 7))
]
BATCH = PairCollator(pad_to_multiple_of=1)(PAIRS)
OWN, REFERENCE = (RNG.normal(size=(6, LENGTH, VOCABULARY)).astype(np.float32) for _ in range(2))


def as_model(logits):
    """A model that has these logits for any ids."""
    return lambda **_: SimpleNamespace(logits=logits)


def value_and_gradient(loss, batch, logits, reference=None):
    """Of hfax's loss with respect to the logits."""
    if reference is not None:
        batch = {**batch, **loss.reference(as_model(jnp.asarray(reference)), batch)}
    return jax.value_and_grad(lambda x: loss(as_model(x), batch)[0])(jnp.asarray(logits))


def log_probs(logits, labels):
    """[rows, length - 1], 0 where labels are ignored."""
    labels = torch.as_tensor(labels).long()[:, 1:]
    found = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == -100, 0.0, found)


LABELS = np.concatenate([BATCH["chosen_labels"], BATCH["rejected_labels"]])
MASK = torch.as_tensor(LABELS != -100)


def dpo(logits, beta=0.1, smoothing=0.0, kind="sigmoid", divergence="reverse_kl", alpha=0.5, tau=0.05, ld_alpha=None):
    """trl's `DPOTrainer._compute_loss`."""
    own, other = log_probs(logits, LABELS), log_probs(torch.as_tensor(REFERENCE), LABELS)
    if ld_alpha is not None:
        places = MASK[:, 1:].cumsum(1)
        shared = torch.minimum(*MASK[:, 1:].sum(1).chunk(2)).repeat(2)[:, None]
        own, other = (torch.where(places <= shared, x, ld_alpha * x) for x in (own, other))
    (chosen, rejected), (ref_chosen, ref_rejected) = own.sum(1).chunk(2), other.sum(1).chunk(2)
    c, r = chosen - ref_chosen, rejected - ref_rejected
    scores = {
        "reverse_kl": lambda x: x,
        "forward_kl": lambda x: 1 - torch.exp(-x),
        "js_divergence": lambda x: math.log(2) + F.logsigmoid(x),
        "alpha_divergence": lambda x: (torch.exp((alpha - 1) * x) - 1) / (alpha - 1),
    }[divergence]
    delta = scores(c) - scores(r)
    lengths = MASK.sum(1).clamp(min=1).chunk(2)
    mean_delta = scores(c) / lengths[0] - scores(r) / lengths[1]
    e, x = torch.tensor(smoothing), beta * delta

    def aot(delta):
        return -F.logsigmoid(beta * delta) * (1 - smoothing) - F.logsigmoid(-beta * delta) * smoothing

    share = torch.sigmoid(x / tau)
    each = {
        "sigmoid": lambda: -F.logsigmoid(x),
        "hinge": lambda: torch.relu(1 - x),
        "ipo": lambda: (mean_delta - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            torch.sigmoid(x) * (F.logsigmoid(x) - torch.log1p(-e))
            + torch.sigmoid(-x) * (F.logsigmoid(-x) - torch.log(e))
        ),
        "nca_pair": lambda: -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r),
        "robust": lambda: (-(1 - e) * F.logsigmoid(x) + e * F.logsigmoid(-x)) / (1 - 2 * e),
        "bco_pair": lambda: -F.logsigmoid(beta * c) - F.logsigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "aot": lambda: aot((chosen - rejected).sort(0)[0] - (ref_chosen - ref_rejected).sort(0)[0]),
        "aot_unpaired": lambda: aot(c.sort(0)[0] - r.sort(0)[0]),
        "apo_zero": lambda: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * (c - r)),
        "discopop": lambda: -F.logsigmoid(x) * (1 - share) + torch.exp(-x) * share,
        "sft": lambda: -own.chunk(2)[0][MASK[:3, 1:]].mean(),
        "sigmoid_norm": lambda: -F.logsigmoid(beta * mean_delta),
    }[kind]
    return each().mean()


def check(loss, batch, expected, logits=OWN, reference=None):
    """hfax's loss and its gradient are those of a torch function."""
    given = torch.tensor(logits, requires_grad=True)
    value = expected(given)
    value.backward()
    found, gradient = value_and_gradient(loss, batch, logits, reference)
    assert float(found) == pytest.approx(value.item(), rel=1e-5)
    assert given.grad.abs().max() > 1e-4
    np.testing.assert_allclose(gradient, given.grad, atol=2e-6 * max(1, float(given.grad.abs().max())))


KINDS = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft sigmoid_norm"


@pytest.mark.parametrize("kind", KINDS.split())
def test_dpo_is_trl_s(kind):
    smoothing = 0.2 if kind in ("exo_pair", "robust", "aot", "aot_unpaired") else 0.0
    loss = DPOLoss(loss_type=kind, beta=0.3, label_smoothing=smoothing)
    check(loss, BATCH, lambda x: dpo(x, beta=0.3, smoothing=smoothing, kind=kind), reference=REFERENCE)


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_dpo_with_another_divergence_is_trl_s(divergence):
    loss = DPOLoss(f_divergence_type=divergence, f_alpha_divergence_coef=0.3)
    check(loss, BATCH, lambda x: dpo(x, divergence=divergence, alpha=0.3), reference=REFERENCE)


def test_options_of_dpo_are_trl_s():
    check(DPOLoss(ld_alpha=0.25), BATCH, lambda x: dpo(x, ld_alpha=0.25), reference=REFERENCE)
    mixed = DPOLoss(loss_type=("sigmoid", "sft"), loss_weights=(0.8, 2.0))
    check(mixed, BATCH, lambda x: 0.8 * dpo(x) + 2.0 * dpo(x, kind="sft"), reference=REFERENCE)

    def weighted(x):
        """WPO, `use_weighting`."""
        all_probs = torch.log_softmax(x[:, :-1].detach(), -1)
        aligned = (log_probs(x.detach(), LABELS) - (2 * all_probs).logsumexp(-1)) * MASK[:, 1:]
        weights = torch.exp(aligned.sum(1) / MASK[:, 1:].sum(1)).chunk(2)
        ratios = log_probs(x, LABELS).sum(1) - log_probs(torch.as_tensor(REFERENCE), LABELS).sum(1)
        delta = torch.sub(*ratios.chunk(2))
        return (-F.logsigmoid(0.1 * delta) * weights[0] * weights[1]).mean()

    check(DPOLoss(use_weighting=True), BATCH, weighted, reference=REFERENCE)

    def free(x):
        return -F.logsigmoid(0.1 * torch.sub(*log_probs(x, LABELS).sum(1).chunk(2))).mean()

    check(DPOLoss(reference_free=True), BATCH, free)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "kto"}, "loss_type 'kto' is unknown"),
        ({"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0,)}, "1 numbers for 2 losses"),
        ({"label_smoothing": 0.1}, "no effect on sigmoid"),
        ({"loss_type": "exo_pair"}, "out of range"),
        ({"loss_type": "aot", "f_divergence_type": "forward_kl"}, "does not go with loss_type 'aot'"),
        ({"f_divergence_type": "kl"}, "'kl' is unknown"),
        ({"beta": 0.0}, "above 0"),
        ({"ld_alpha": 2.0}, "ld_alpha=2.0 is out of range"),
    ],
)
def test_options_that_dpo_does_not_have_are_refused(options, words):
    with pytest.raises(InvalidInputError, match=words):
        DPOLoss(**options)


def test_orpo_is_trl_s():
    def orpo(x):
        chosen, rejected = (log_probs(x, LABELS).sum(1) / MASK[:, 1:].sum(1)).chunk(2)

        def log1mexp(x):
            return torch.where(x < -0.6931471805599453, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))

        ratio = F.logsigmoid((chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected)))
        ids = torch.as_tensor(np.where(BATCH["chosen_attention_mask"] == 1, BATCH["chosen_ids"], -100)).long()
        nll = F.cross_entropy(x[:3, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        return nll - (0.25 * ratio).mean()

    check(ORPOLoss(beta=0.25), BATCH, orpo)


VERDICTS = [
    {"prompt_ids": row["chosen_ids"][:3], "completion_ids": row["chosen_ids"][3:], "label": label}
    for row, label in zip(PAIRS, (True, False, True), strict=True)
]


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto_is_trl_s(kind):
    batch = VerdictCollator(group=3, pad_to_multiple_of=LENGTH, has_kl=kind == "kto")(VERDICTS)
    if kind == "kto":  # the prompt of each row, the completion of the one before
        assert batch["KL_input_ids"][0].tolist()[:7] == PAIRS[0]["chosen_ids"][:3] + PAIRS[2]["chosen_ids"][3:]
        assert batch["KL_labels"][1].tolist()[:9] == [-100] * 3 + PAIRS[0]["chosen_ids"][3:]
    loss = KTOLoss(loss_type=kind, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)

    def kto(x):
        def ratios(name):
            return log_probs(x, batch[name]).sum(1) - log_probs(torch.as_tensor(REFERENCE[:3]), batch[name]).sum(1)

        kl = ratios("KL_labels").mean().detach().clamp(min=0) if kind == "kto" else 0.0
        c, r = ratios("labels")[[0, 2]], ratios("labels")[[1]]
        if kind == "kto":
            chosen, rejected = 1 - torch.sigmoid(0.3 * (c - kl)), 1 - torch.sigmoid(0.3 * (kl - r))
        else:
            chosen, rejected = 1 - torch.sigmoid(0.3 * c), torch.sigmoid(0.3 * r)
        return torch.cat([1.5 * chosen, 0.5 * rejected]).mean()

    check(loss, batch, kto, OWN[:3] * 0.5 + REFERENCE[:3], REFERENCE[:3])  # a KL term above 0


def test_reward_is_trl_s():
    pairs = [{n: v for n, v in row.items() if "ids" in n} | {"margin": 0.5 * i} for i, row in enumerate(PAIRS)]
    batch = PairCollator()(pairs)

    def reward(x):
        chosen, rejected = x[:, 0].chunk(2)
        loss = -F.logsigmoid(chosen - rejected - torch.tensor([0.0, 0.5, 1.0])).mean()
        return loss + 0.01 * ((chosen + rejected) ** 2).mean()

    check(RewardLoss(center_rewards_coefficient=0.01), batch, reward, OWN[:, 0, :1])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_trl_s(beta):
    batch = {"input_ids": BATCH["chosen_ids"], "attention_mask": BATCH["chosen_attention_mask"]}
    batch["labels"] = BATCH["chosen_labels"]

    def gkd(x):
        own, teacher = (torch.log_softmax(y[:, :-1] / 2.0, -1) for y in (x, torch.as_tensor(REFERENCE[:3])))
        if beta in (0, 1):
            first, second = (own, teacher) if beta == 0 else (teacher, own)
            divergence = F.kl_div(first, second, reduction="none", log_target=True)
        else:
            share = torch.tensor(beta)
            mixture = torch.logsumexp(torch.stack([own + torch.log1p(-share), teacher + torch.log(share)]), dim=0)
            divergence = beta * F.kl_div(mixture, teacher, reduction="none", log_target=True)
            divergence = divergence + (1 - beta) * F.kl_div(mixture, own, reduction="none", log_target=True)
        mask = torch.as_tensor(batch["labels"][:, 1:] != -100)
        cross_entropy = -log_probs(x, batch["labels"]).sum() / mask.sum()
        return 0.75 * divergence[mask].sum() / mask.sum() + 0.25 * cross_entropy

    check(DistillationLoss(beta=beta, temperature=2.0, alpha=0.75), batch, gkd, OWN[:3], REFERENCE[:3])


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(InvalidInputError, match="temperature=0"):
        DistillationLoss(temperature=0)


def test_the_reference_is_the_model_before_training_without_its_adapter(tmp_path):
    """peft's adapter with random first values: the base model is the reference, in the step and computed before."""
    plain, model = make("llama", tmp_path)
    model.add_adapter(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    data = rows("llama", 4)
    batch = PairCollator()(
        [{f"{s}_{p}": each["input_ids"] for s, each in zip(("chosen", "rejected"), pair, strict=True) for p in ("ids", "labels")}
         for pair in (data[:2], data[2:])]
    )  # fmt: skip
    with torch.no_grad():
        logits = plain.eval()(input_ids=torch.as_tensor(batch["chosen_ids"]).long()).logits
    step = make_train_step(model, optax.sgd(10.0), DPOLoss())
    reference = step.reference(batch)
    expected = log_probs(logits, batch["chosen_labels"]).sum(1)
    np.testing.assert_allclose(reference["ref_chosen_logps"], expected, rtol=1e-4)
    state = step.init()
    for _ in range(2):  # the reference stays, while the adapter learns
        before = step.compute(lambda apply, b: DPOLoss()(apply, b)[0], state.params, batch | reference)
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(before), rel=1e-5)


def test_a_teacher_is_another_model(tmp_path):
    plain, model = make("llama", tmp_path / "student")
    other, teacher = make("llama", tmp_path / "teacher", seed=1, hidden_size=32, intermediate_size=64)
    batch = PaddingCollator()(rows("llama", 2))
    step = make_train_step(model, optax.sgd(0.1), DistillationLoss(beta=0.0), ref_model=teacher)
    _, metrics = step(step.init(), batch)
    ids, mask = (torch.as_tensor(batch[n]).long() for n in ("input_ids", "attention_mask"))
    assert isinstance(plain, LlamaForCausalLM)
    own, others = (m.eval()(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1) for m in (plain, other))
    counts = torch.as_tensor(batch["labels"][:, 1:] != -100)
    expected = F.kl_div(own, others, reduction="none", log_target=True)[counts].sum() / counts.sum()
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-4)
    with pytest.raises(InvalidInputError, match="the loss has no reference"):
        make_train_step(model, optax.sgd(0.1), ref_model=teacher)
    wide = AutoModelForTPU.from_pretrained("demo")
    with pytest.raises(InvalidInputError, match="same tokenizer"):
        make_train_step(model, optax.sgd(0.1), DistillationLoss(), ref_model=wide)
    with pytest.raises(InvalidInputError, match="would overwrite"):
        make_train_step(model, optax.sgd(0.1), DistillationLoss()).init(copy=False)
