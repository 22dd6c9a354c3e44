"""GRPO: trl 1.16's formulas, written here in torch, on the same numbers; and runs of a small model.

Source: trl/trainer/grpo_trainer.py of that version.
"""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from characters import Characters

from hfax import AutoModelForTPU, GRPOLoss, GRPOTrainer, LoraConfig, RolloutConfig, TrainingArguments
from hfax.cli.app import run
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.train.rewards import advantages, load_reward_functions
from hfax.train.rollouts import RolloutCollator, prompt_rows

from .small_models import make

RNG = np.random.default_rng(0)
ROWS, LENGTH, WORDS = 4, 9, 11
STARTS, ENDS = (3, 2, 4, 3), (9, 7, 8, 4)
"""Where the completion of each row begins and ends."""
IDS = RNG.integers(1, WORDS, (ROWS, LENGTH)).astype(np.int32)
PLACES = np.arange(LENGTH)[None]
MASK = (np.array(STARTS)[:, None] <= PLACES) & (np.array(ENDS)[:, None] > PLACES)
LABELS = np.where(MASK, IDS, -100)
LOGITS = (2 * RNG.normal(size=(ROWS, LENGTH, WORDS))).astype(np.float32)
ADVANTAGES = np.array([1.2, -0.7, 0.4, -0.9], np.float32)
OLD, REFERENCE = (RNG.normal(scale=s, size=(ROWS, LENGTH - 1)).astype(np.float32) for s in (0.4, 0.3))
"""What old and reference log-probabilities differ by from the policy's."""
TOKENS_PER_PASS = 11.5


def as_model(logits):
    return lambda **_: SimpleNamespace(logits=logits)


def log_probs(logits, temperature=1.0):
    """[rows, length - 1] of all ids."""
    return torch.log_softmax(logits[:, :-1] / temperature, -1).gather(
        -1, torch.as_tensor(IDS[:, 1:]).long()[..., None]
    )[..., 0]


def reference(logits, *, is_drifting, options):
    """trl's `GRPOTrainer._compute_loss`."""
    get = lambda name, default: options.get(name, default)  # noqa: E731
    kind, temperature = get("loss_type", "dapo"), get("temperature", 1.0)
    mask, each = torch.as_tensor(MASK[:, 1:]).float(), log_probs(logits, temperature)
    advantages = torch.as_tensor(ADVANTAGES)[:, None]
    base = log_probs(torch.as_tensor(LOGITS), temperature)
    old = base + torch.as_tensor(OLD) if is_drifting else each.detach()
    probs = torch.log_softmax(logits[:, :-1] / temperature, -1)
    entropies = -(probs.exp() * probs).sum(-1)
    low = get("epsilon", 0.2)
    high = get("epsilon_high", None)
    high = low if high is None else high
    log_ratio = each - old
    weights = log_ratio
    if get("importance_sampling_level", "token") == "sequence":
        weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(weights)
    beta = get("beta", 0.0)
    if beta:
        away = base + torch.as_tensor(REFERENCE) - each
        kl = torch.exp(away) - away - 1
        kl = kl * coef_1 if get("use_bias_correction_kl", True) else kl
    if kind == "cispo":
        loss = -torch.clamp(coef_1, max=high).detach() * advantages * each
    elif kind == "sapo":
        heat = torch.where(advantages > 0, get("sapo_temperature_pos", 1.0), get("sapo_temperature_neg", 1.05))
        loss = -torch.sigmoid(heat * (coef_1 - 1)) * 4 / heat * advantages
    elif kind == "vespo":
        lower = math.log(1e-8)
        log_w = torch.clamp((torch.clamp(log_ratio, -20, 20) * mask).sum(-1, keepdim=True), lower, 20).detach()
        k = torch.where(advantages >= 0, 2.0, 3.0)
        decay = torch.where(advantages >= 0, 3.0, 2.0)
        loss = -torch.exp(decay + k * log_w - decay * torch.exp(log_w)) * advantages * each
    else:
        coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
        if (delta := get("delta", None)) is not None:
            coef_1 = torch.clamp(coef_1, max=delta)
        loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if (threshold := get("off_policy_mask_threshold", None)) is not None:
        drift = ((old - each.detach()) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        loss = loss * ((advantages >= 0) | (drift <= threshold)).float()
    chosen = mask
    if (share := get("top_entropy_quantile", 1.0)) < 1:
        border = torch.quantile(entropies.detach()[mask.bool()], 1 - share)
        chosen = mask * (entropies.detach() * mask >= border)
        loss = loss * chosen
    if beta:
        loss = loss + beta * kl
    if kind in ("grpo", "sapo"):
        value = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    elif kind == "bnpo":
        value = (loss * mask).sum() / mask.sum()
    elif kind == "dr_grpo":
        value = (loss * mask).sum() / (ROWS * get("max_completion_length", 512))
    elif kind == "luspo":
        value = (loss * mask).sum(-1).mean()
    else:
        value = (loss * mask).sum() / TOKENS_PER_PASS
    return value - get("entropy_coef", 0.0) * (entropies * chosen).sum() / chosen.sum()


LOSSES = [
    {},
    {"temperature": 0.7, "epsilon": 0.1, "epsilon_high": 0.28},
    {"loss_type": "grpo", "beta": 0.04},
    {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    {"loss_type": "bnpo", "delta": 1.3},
    {"loss_type": "dr_grpo", "max_completion_length": 6, "beta": 0.1},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.1},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "sapo"},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    {"loss_type": "vespo"},
    {"top_entropy_quantile": 0.4},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.1, "beta": 0.1},
    {"off_policy_mask_threshold": 0.02},
]


@pytest.mark.parametrize("is_drifting", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("options", LOSSES, ids=lambda o: " ".join(f"{n}={v}" for n, v in o.items()) or "default")
def test_losses_and_gradients_are_trls(options, is_drifting):
    loss = GRPOLoss(**options)
    now = log_probs(torch.as_tensor(LOGITS), loss.temperature).numpy()
    batch = {
        "input_ids": IDS,
        "attention_mask": (np.arange(LENGTH)[None] < np.array(ENDS)[:, None]).astype(np.int32),
        "labels": LABELS,
        "advantages": ADVANTAGES,
        "tokens_per_pass": np.full(ROWS, TOKENS_PER_PASS, np.float32),
        **({"old_logps": now + OLD} if is_drifting else {}),
        **({"ref_logps": now + REFERENCE} if loss.beta else {}),
    }
    batch = {name: jnp.asarray(array) for name, array in batch.items()}
    value, gradient = jax.value_and_grad(lambda x: loss(as_model(x), batch)[0])(jnp.asarray(LOGITS))
    logits = torch.tensor(LOGITS, requires_grad=True)
    expected = reference(logits, is_drifting=is_drifting, options=options)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=2e-4, atol=2e-6)


def test_the_reference_is_computed_with_the_temperature():
    loss = GRPOLoss(beta=0.1, temperature=0.5)
    found = loss.reference(
        as_model(jnp.asarray(LOGITS)), {"input_ids": IDS, "attention_mask": IDS, "labels": jnp.asarray(LABELS)}
    )
    expected = np.where(MASK[:, 1:], log_probs(torch.as_tensor(LOGITS), 0.5).numpy(), 0)
    np.testing.assert_allclose(found["ref_logps"], expected, rtol=1e-5, atol=1e-6)
    assert loss.reference_names == ("ref_logps",)
    assert GRPOLoss().reference_names == ()


def nanstd(values, dim):
    """trl/trainer/utils.py."""
    mean = torch.nanmean(values, dim=dim, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=dim, keepdim=True)
    count = torch.sum(~torch.isnan(values), dim=dim, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.full_like(mean, math.nan))
    return torch.sqrt(variance * correction)


def trl_advantages(rewards, weights, group, scale, aggregation):
    """Of `GRPOTrainer._generate_and_score_completions`."""
    rewards, weights = torch.as_tensor(rewards), torch.as_tensor(weights)[None]
    unscorable = torch.isnan(rewards).all(dim=1)
    if aggregation == "normalize_then_sum":
        groups = rewards.view(-1, group, rewards.shape[1])
        each = (groups - torch.nanmean(groups, dim=1, keepdim=True)) / (nanstd(groups, 1) + 1e-4)
        total = (each.view(rewards.shape) * weights).nansum(dim=1)
        total[unscorable] = math.nan
        return torch.nan_to_num((total - torch.nanmean(total)) / (nanstd(total, 0) + 1e-4), nan=0.0)
    total = (rewards * weights).nansum(dim=1)
    total[unscorable] = math.nan
    groups = total.view(-1, group)
    centred = (groups - torch.nanmean(groups, dim=1, keepdim=True)).view(-1)
    if scale == "none":
        return torch.nan_to_num(centred, nan=0.0)
    std = nanstd(total, 0) if scale == "batch" else nanstd(groups, 1).repeat_interleave(group, 0).view(-1)
    return torch.nan_to_num(centred / (std + 1e-4), nan=0.0)


@pytest.mark.parametrize("holes", [False, True], ids=["all rewarded", "some without rewards"])
@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [
        ("group", "sum_then_normalize"),
        ("batch", "sum_then_normalize"),
        ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum"),
    ],
)
def test_advantages_are_trls(scale, aggregation, holes):
    rewards = RNG.normal(size=(12, 2))
    rewards[8:, :] = 1.0  # a group without differences
    if holes:
        rewards[1] = np.nan
        rewards[2, 0] = np.nan
        rewards[4:7] = np.nan
    weights = np.array([1.0, 0.5])
    found, is_equal = advantages(rewards, weights, 4, scale_rewards=scale, aggregation=aggregation)
    np.testing.assert_allclose(
        found, trl_advantages(rewards, weights, 4, scale, aggregation), rtol=1e-6, atol=1e-9
    )  # trl has float32 factors
    if scale != "batch" and aggregation == "sum_then_normalize":
        assert is_equal[8:].all()
        assert not is_equal[:4].any()


# Runs

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 128,
}  # fmt: skip

PROMPTS = [{"prompt": text, "wanted": text[0]} for text in ("ab", "cde", "fghi", "jk", "lm", "nop", "qr", "stu")]


def reward_letters(completions, wanted, **_):
    """The share of a completion that is the prompt's first letter, or the one before."""
    return [
        sum(abs(ord(a) - ord(letter)) <= 8 for a in text) / len(text)
        for text, letter in zip(completions, wanted, strict=True)
    ]


def trainer(
    tmp_path,
    rewards=reward_letters,
    *,
    steps=4,
    folder="run",
    loss=None,
    rollouts=None,
    evaluation=None,
    prepare=None,
    **args,
):
    _, model = make("llama", tmp_path / f"model-{folder}", load={"parallelism": args.pop("parallelism", None)})
    if prepare is not None:
        prepare(model)
    options = {
        "max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", **args,
    }  # fmt: skip
    return GRPOTrainer(
        model,
        rewards,
        TrainingArguments(tmp_path / folder, **options),
        PROMPTS,
        evaluation,
        processing_class=Characters(),
        loss=GRPOLoss(**{"max_completion_length": 6, **(loss or {})}),
        rollouts=RolloutConfig(**{"num_generations": 4, **(rollouts or {})}),
    )


def metrics(tmp_path, folder="run"):
    lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
    timed = ("step_s", "tokens_per_s", "peak_share")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def test_a_model_learns_what_is_rewarded(tmp_path):
    made = trainer(tmp_path, steps=40, per_device_train_batch_size=32, rollouts={"num_generations": 8})
    last = made.train()
    lines = metrics(tmp_path)
    assert lines[0]["reward"] < 0.3
    assert np.mean([line["reward"] for line in lines[-5:]]) > 0.9
    assert last["reward"] == lines[-1]["reward"]
    assert last["steps"] == 40
    assert {"rewards/reward_letters/mean", "completions/mean_length", "entropy", "clip_ratio/region_mean"} <= set(last)


def test_the_samplers_log_probabilities_are_the_trainers(tmp_path):
    trainer(tmp_path).train()
    trainer(tmp_path, folder="drifting", rollouts={"num_iterations": 2}, loss={"temperature": 0.8}).train()
    for folder in ("run", "drifting"):
        found = [line["sampling/sampling_logp_difference/max"] for line in metrics(tmp_path, folder)]
        assert max(found) < 1e-4
        assert min(found) >= 0


ARCHITECTURES = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "falcon with alibi": transformers.FalconConfig(**SMALL, alibi=True, new_decoder_architecture=True, num_kv_heads=2),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL),
    "mamba": transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_sampled_as_they_are_trained(name, tmp_path):
    """Pages, windows, experts, positions by attention, and slots."""
    model = AutoModelForTPU.from_config(ARCHITECTURES[name], dtype="float32")
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "dropout": False,
    }
    arguments = TrainingArguments(tmp_path / "run", save_strategy="no", **options)
    rollouts = RolloutConfig(num_generations=4)
    loss = GRPOLoss(max_completion_length=8)
    GRPOTrainer(
        model, reward_letters, arguments, PROMPTS, processing_class=Characters(), loss=loss, rollouts=rollouts
    ).train()
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics(tmp_path)) < 1e-4


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    options = {
        "rollouts": {"num_iterations": 2, "log_completions": True},
        "loss": {"beta": 0.01},
        "prepare": lambda model: model.add_adapter(LoraConfig(r=4, target_modules="all-linear"), seed=1),
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    trainer(tmp_path, **options, folder="whole").train()
    trainer(tmp_path, **options, folder="parts", steps=2).train()
    trainer(tmp_path, **options, folder="parts").resume()
    assert metrics(tmp_path, "parts") == metrics(tmp_path, "whole")
    texts = [(tmp_path / folder / "completions.jsonl").read_text() for folder in ("whole", "parts")]
    assert texts[0] == texts[1]
    first = json.loads(texts[0].splitlines()[0])
    assert set(first) == {"step", "prompt", "completion", "reward_letters", "reward", "advantage"}
    assert first["step"] == 1


def test_the_base_model_is_the_reference_of_an_adapter(tmp_path):
    made = trainer(
        tmp_path,
        loss={"beta": 0.1},
        prepare=lambda m: m.add_adapter(LoraConfig(r=4, target_modules="all-linear"), seed=1),
    )
    before = {name: np.asarray(array) for name, array in made.model.params.items() if "lora" not in name}
    made.train()
    found = [line["kl"] for line in metrics(tmp_path)]
    assert abs(found[0]) < 1e-9
    assert found[-1] > 1e-6
    for name, array in before.items():
        np.testing.assert_array_equal(made.model.params[name], array)


def test_parts_of_a_step_have_the_gradient_of_the_whole(tmp_path):
    whole = trainer(tmp_path, folder="whole", steps=2)
    whole.train()
    parts = trainer(tmp_path, folder="parts", steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    parts.train()
    for one, other in zip(metrics(tmp_path, "whole"), metrics(tmp_path, "parts"), strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_several_steps_take_their_rows_from_one_generation(tmp_path):
    calls = []

    def reward(completions, prompts, **_):
        calls.append((len(completions), len(set(prompts))))
        return [float(len(calls))] * len(completions)

    made = trainer(tmp_path, reward, steps=6, per_device_train_batch_size=4, rollouts={"steps_per_generation": 3})
    made.train()
    assert calls == [(12, 3), (12, 3)]
    assert metrics(tmp_path)[0]["reward"] == 1


def test_what_reward_functions_get_and_say(tmp_path):
    seen = {}

    async def by_length(completions, log_metric, log_extra, **_):
        log_metric("longest", max(map(len, completions)))
        log_extra("length", [len(text) for text in completions])
        return [None if len(text) < 3 else float(len(text)) for text in completions]

    def first(prompts, completions, completion_ids, wanted, trainer_state, **others):
        seen.update(others)
        assert [chr(ids[0]) for ids in completion_ids] == [text[0] for text in completions]
        assert [prompt[0] for prompt in prompts] == wanted
        return [1.0] * len(prompts)

    made = trainer(
        tmp_path,
        [by_length, first],
        steps=1,
        rollouts={"reward_weights": (1.0, 0.5), "log_completions": True, "scale_rewards": False},
    )

    async def in_a_notebook():
        return made.train()

    found = asyncio.run(in_a_notebook())
    assert set(seen) == {"log_metric", "log_extra"}
    assert found["rewards/first/mean"] == 1
    assert 1 <= found["longest"] <= 6
    lines = list(map(json.loads, (tmp_path / "run" / "completions.jsonl").read_text().splitlines()))
    assert all(line["reward"] == (line["by_length"] or 0) + 0.5 * line["first"] for line in lines)
    assert all(line["length"] == len(line["completion"]) for line in lines)


def test_nothing_is_learned_without_rewards(tmp_path):
    made = trainer(tmp_path, lambda completions, **_: [None] * len(completions), steps=1)
    before = {name: np.asarray(array) for name, array in made.model.params.items()}
    with pytest.warns(UserWarning, match="nothing is learned from it"):
        made.train()
    assert metrics(tmp_path)[0]["grad_norm"] == 0
    for name, array in before.items():
        np.testing.assert_array_equal(made.model.params[name], array)


def test_truncated_completions_can_be_left_out(tmp_path):
    made = trainer(tmp_path, steps=1, rollouts={"mask_truncated_completions": True})
    made.model.generation_config.eos_token_id = None  # nothing ends before the maximum
    found = made.train()
    assert found["completions/clipped_ratio"] == 1
    assert found["loss"] == found["grad_norm"] == 0


def test_evaluations_have_rewards(tmp_path):
    made = trainer(
        tmp_path, steps=2, evaluation=PROMPTS[:3], eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, rollouts={"num_generations_eval": 2},
    )  # fmt: skip
    found = made.train()
    evaluations = [line["eval_reward"] for line in metrics(tmp_path) if "eval_reward" in line]
    assert len(evaluations) == 2
    assert found["eval_reward"] == evaluations[-1]
    assert made.evaluate(PROMPTS[:3])["eval_reward"] == pytest.approx(max(evaluations))


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: GRPOLoss(loss_type="ppo"), "loss_type 'ppo' is unknown"),
        (lambda: GRPOLoss(importance_sampling_level="word"), "importance_sampling_level 'word' is unknown"),
        (lambda: GRPOLoss(loss_type="cispo"), "has no epsilon_high"),
        (lambda: GRPOLoss(loss_type="sapo", delta=2.0), "delta=2.0 has no effect"),
        (lambda: GRPOLoss(vespo_k_pos=1.0), "vespo_k_pos has no effect"),
        (lambda: GRPOLoss(beta=-1), "beta=-1 is out of range"),
        (lambda: GRPOLoss(temperature=0), "temperature=0 is out of range"),
        (lambda: GRPOLoss(top_entropy_quantile=1.5), "top_entropy_quantile=1.5 is out of range"),
        (lambda: RolloutConfig(num_generations=1), "num_generations=1 is too small"),
        (lambda: RolloutConfig(scale_rewards="all"), "scale_rewards 'all' is unknown"),
        (lambda: RolloutConfig(top_p=2.0), "top_p=2.0 is out of range"),
        (
            lambda: RolloutConfig(multi_objective_aggregation="normalize_then_sum", scale_rewards="none"),
            "scale_rewards='none' has no effect",
        ),
    ],
)
def test_wrong_values_are_named(make_it, words):
    with pytest.raises(InvalidInputError, match=words):
        make_it()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": {"num_generations": 3}}, "8 completions is not divisible by num_generations=3"),
        (
            {"gradient_accumulation_steps": 2, "rollouts": {"steps_per_generation": 3}},
            "is not a multiple of gradient_accumulation",
        ),
        ({"rollouts": {"num_iterations": 2}, "save_strategy": "steps", "save_steps": 3}, "Use save_steps=2"),
        ({"rewards": []}, "There are no reward functions"),
        ({"rewards": [reward_letters, reward_letters]}, "named reward_letters"),
        ({"rollouts": {"reward_weights": (1.0, 2.0)}}, "2 numbers for 1 reward functions"),
        ({"per_device_train_batch_size": 64}, "has 8 rows, but a step needs 16"),
        ({"group_by_length": True}, "group_by_length is not supported"),
        ({"loss": {"max_completion_length": 4000}}, "exceed the model's context length"),
        ({"rewards": lambda completions, **_: [1.0]}, "for 8 completions"),
        ({"rewards": lambda completions, **_: "good"}, "returned 'good'"),
        ({"rewards": lambda completions, **_: [math.inf] * 8}, "infinite reward"),
        ({"rewards": lambda completions: [1.0] * 8}, "cannot be called"),
        (
            {"rewards": lambda completions, log_extra, **_: log_extra("a", [1]) or [1.0] * 8},
            "got 1 values for 8 completions",
        ),
    ],
)
def test_what_does_not_fit_is_said(options, words, tmp_path):
    with pytest.raises((InvalidInputError, UnsupportedOptionError), match=words):
        trainer(tmp_path, **options).train()


def test_a_run_that_ended_within_a_generation_is_not_resumed(tmp_path):
    options = {"rollouts": {"num_iterations": 2}, "save_strategy": "steps"}
    trainer(tmp_path, steps=3, **options).train()
    with pytest.raises(InvalidInputError, match="within the 2 steps of a generation"):
        trainer(tmp_path, steps=5, **options).resume()


def test_arguments_of_trl_that_hfax_lacks_are_refused(tmp_path):
    _, model = make("llama", tmp_path / "model")
    arguments = TrainingArguments(tmp_path / "run", max_steps=1)
    for name, words in {
        "peft_config": "add_adapter",
        "tools": "call no tools",
        "rewards": "Did you mean 'reward_funcs'",
    }.items():
        with pytest.raises(UnsupportedOptionError, match=words):
            GRPOTrainer(model, reward_letters, arguments, PROMPTS, processing_class=Characters(), **{name: None})
    _, seq2seq = make("t5", tmp_path / "t5")
    with pytest.raises(UnsupportedOptionError, match="has an encoder and a decoder"):
        GRPOTrainer(seq2seq, reward_letters, arguments, PROMPTS, processing_class=Characters())


def test_an_error_of_a_reward_function_is_its_own(tmp_path):
    def broken(completions, **_):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        trainer(tmp_path, broken).train()


def test_prompts_of_all_formats():
    rows = [
        {"prompt": "abc", "answer": 1},
        {"prompt": "a" * 50, "answer": 2},
    ]
    found = prompt_rows(rows, Characters(), max_length=10)
    assert found == [{"prompt": "abc", "answer": 1, "prompt_ids": [97, 98, 99]}]
    with pytest.raises(InvalidInputError, match="No row is left"):
        prompt_rows(rows, Characters(), max_length=2)
    with pytest.raises(InvalidInputError, match="Row 1 has no prompt"):
        prompt_rows([{"text": "abc"}], Characters(), max_length=None)


def test_batches_have_few_lengths():
    collate = RolloutCollator(max_length=200)
    lengths = set()
    for length in range(2, 200, 7):
        row = {"input_ids": [1] * length, "labels": [1] * length, "advantages": 1.0, "tokens_per_pass": 1.0}
        lengths.add(collate([row])["labels"].shape[1])
    assert lengths == {64, 128, 200}


# Recipes


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a recipe for the demo model, and return its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def short(completions, **_):\n    return [-float(len(text)) for text in completions]\n"
    )
    prompts = [
        {"prompt": "Return a"},
        {"prompt": "Raise an"},
        {"messages": [{"role": "user", "content": "What is a list?"}]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts[:2]))
    (tmp_path / "chats.jsonl").write_text(json.dumps(prompts[2]) + "\n")

    def write(**fields):
        given = {
            "recipe": "grpo", "model": "demo", "train_data": "prompts.jsonl", "output_dir": "run", "max_steps": 1,
            "reward_funcs": "rewards.py:short", "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4,
            **fields,
        }  # fmt: skip
        path = tmp_path / "grpo.yaml"
        path.write_text(json.dumps({name: value for name, value in given.items() if value is not None}))
        return str(path)

    return write


def test_a_recipe_is_run(write, tmp_path, capsys):
    assert run(["train", write(logging_steps=1, lora={"r": 2, "target_modules": "all-linear"}), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["reward"] == found["rewards/short/mean"] < 0
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()


def test_a_recipe_with_conversations_is_run(write, tmp_path):
    recipe = write(train_data="chats.jsonl", per_device_train_batch_size=2, log_completions=True)
    (tmp_path / "rewards.py").write_text(
        "def short(completions, prompts, **_):\n    return [-float(len(c[0]['content'])) for c in completions]\n"
    )
    assert run(["train", recipe]) == 0
    line = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [{"role": "user", "content": "What is a list?"}]
    assert line["completion"][0]["role"] == "assistant"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward_funcs": None}, "recipe: grpo has no reward_funcs"),
        ({"reward_funcs": "rewards.py:long"}, "has no function long; it has short"),
        ({"reward_funcs": "nothing.py:short"}, "there is no file"),
        ({"reward_funcs": "short"}, "names no function"),
        ({"reward_funcs": ["rewards.py:short", "no_such_module.reward"]}, "No module named 'no_such_module'"),
        ({"use_vllm": True}, "hfax writes completions with its own engine"),
        (
            {"recipe": "dpo", "max_completion_length": 4, "num_generations": None, "reward_funcs": None},
            "max_length counts prompt",
        ),
        (
            {"recipe": "sft", "max_completion_length": None, "reward_funcs": None},
            "which recipe: sft does not use",
        ),
        ({"max_length": 4}, "leaves no room for prompts"),
        ({"loss_type": "ppo"}, "loss_type 'ppo' is unknown"),
    ],
)
def test_a_wrong_recipe_is_refused(fields, words, write, capsys):
    assert run(["train", write(**fields)]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_reward_functions_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import dataclasses\n\n\ndef one(**_):\n    return [1.0]\n")
    assert load_reward_functions("own.py:one")[0]() == [1.0]
    assert load_reward_functions(["math.sqrt"]) == [math.sqrt]
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(InvalidInputError, match="ZeroDivisionError"):
        load_reward_functions("broken.py:one")
