"""Training over eight devices gives the losses of one, and each holds its share."""

from __future__ import annotations

import json

import jax
import numpy as np
import optax
import pytest
import transformers
from characters import Characters
from tiny_models import SIZES, tiny_llama_config

from hfax import (
    AutoModelForTPU,
    GRPOLoss,
    GRPOTrainer,
    LoraConfig,
    RolloutConfig,
    Trainer,
    TrainingArguments,
    make_train_step,
)
from hfax.train.dpo import DPOLoss
from hfax.train.preference_collators import PairCollator

SHAPE = {
    **SIZES,
    "vocab_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": tiny_llama_config(**SHAPE),
    "mixtral": transformers.MixtralConfig(
        **SHAPE, num_local_experts=8, output_router_logits=True, architectures=["MixtralForCausalLM"]
    ),
    "t5": transformers.T5Config(
        **{"vocab_size": 128, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8},
        dropout_rate=0.0,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
}
MESHES = {"fsdp 8": {"fsdp": 8}, "data 2, tensor 4": {"data": 2, "tensor": 4}}
IDS = np.random.default_rng(0).integers(1, 128, (5, 16, 12))


def run(model, steps=10, **options):
    """Losses of a few steps."""
    step = make_train_step(model, optax.adamw(3e-3), **options)
    state, losses = step.init(), []
    for number in range(steps):
        ids = IDS[number % len(IDS)]
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        losses.append(float(metrics["loss"]))
    return losses, state, step


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, marks=[pytest.mark.sweep] if (kind == "llama") == (mesh == "fsdp 8") else [])
        for kind in CONFIGS
        for mesh in MESHES
    ],
)
def test_losses_are_those_of_one_device(kind, mesh):
    alone, _, _ = run(AutoModelForTPU.from_config(CONFIGS[kind]))
    split, _, _ = run(AutoModelForTPU.from_config(CONFIGS[kind], parallelism=MESHES[mesh]))
    np.testing.assert_allclose(split, alone, atol=1e-4)
    assert alone[-1] < alone[0]


def test_preferences_and_muon_over_a_mesh(tmp_path):
    """The reference is split like the model, and so is the optimizer's state."""
    pairs = [
        {
            f"{side}_{part}": ids[:length].tolist()
            for side, length in (("chosen", 12), ("rejected", 9))
            for part in ("ids", "labels")
        }
        for ids in IDS[0]
    ]
    losses = []
    for number, (mesh, rows) in enumerate(((None, 8), ({"fsdp": 4, "tensor": 2}, 2))):
        model = AutoModelForTPU.from_config(CONFIGS["llama"], parallelism=mesh)
        arguments = TrainingArguments(
            tmp_path / str(number), max_steps=3, per_device_train_batch_size=rows, learning_rate=3e-3, optim="muon"
        )
        trainer = Trainer(model, arguments, [*pairs, *pairs], data_collator=PairCollator(), loss=DPOLoss(beta=0.5))
        losses.append(trainer.train()["loss"])
    assert losses[0] < 0.6
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    split = [not a.sharding.is_fully_replicated for a in jax.tree.leaves(trainer.state.opt_state) if a.ndim == 2]
    assert all(split)


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"remat": True}])
def test_parts_and_rematerialisation_over_a_mesh(options):
    alone, _, _ = run(AutoModelForTPU.from_config(CONFIGS["llama"]), steps=4)
    split, _, _ = run(AutoModelForTPU.from_config(CONFIGS["llama"], parallelism={"fsdp": 8}), steps=4, **options)
    np.testing.assert_allclose(split, alone, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sizes", "init", "name", "spec"),
    [
        ("llama", {"fsdp": 2, "tensor": 4}, True, "self_attn.q_proj", (("tensor", "group"), None)),
        ("llama", {"fsdp": 2, "tensor": 4}, "pissa", "self_attn.q_proj", (("tensor", "group"), None)),
        (
            "mixtral",
            {"fsdp": 2, "expert": 4},
            True,
            "mlp.experts.down_proj",
            (("expert", "tensor", "group"), "fsdp", None),
        ),
    ],
)
def test_an_adapter_over_a_mesh(kind, sizes, init, name, spec, tmp_path):
    losses = []
    for parallelism in (None, sizes):
        model = AutoModelForTPU.from_config(CONFIGS[kind], parallelism=parallelism)
        model.add_adapter(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init), seed=1)
        found, state, step = run(model, steps=6)
        losses.append(found)
        step.update_model(state)
        model.save_adapter(tmp_path / str(len(losses)))
    np.testing.assert_allclose(*losses, atol=1e-4)
    found = state.params[f"model.layers.0.{name}.lora_B.weight"].sharding.spec
    assert found == jax.sharding.PartitionSpec(*spec)
    again = AutoModelForTPU.from_config(CONFIGS[kind])
    again.load_adapter(tmp_path / "2")
    expected = np.asarray(model(input_ids=IDS[0]).logits)
    np.testing.assert_allclose(np.asarray(again(input_ids=IDS[0]).logits), expected, atol=1e-4)


def test_each_device_of_fsdp_holds_an_eighth():
    """Weights of float32 and both moments of Adam: three times four bytes a number; norms and the like are whole."""
    config = tiny_llama_config(**{**SHAPE, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512})
    model = AutoModelForTPU.from_config(config, parallelism={"fsdp": 8})
    step = make_train_step(model, optax.adamw(1e-3))
    state = step.init()
    device = jax.devices()[3]
    held = sum(
        shard.data.nbytes
        for array in jax.tree.leaves((state.params, state.opt_state))
        for shard in array.addressable_shards
        if shard.device == device
    )
    assert held == pytest.approx(12 * model.num_parameters() / 8, rel=0.1)
    ids = np.ones((8, 16), np.int32)
    compiled = step.compile(state, {"input_ids": ids, "labels": ids})
    arguments = compiled.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(12 * model.num_parameters() / 8, rel=0.1)
    text = compiled.as_text()
    assert "all-gather" in text
    state, _ = step(state, {"input_ids": ids, "labels": ids})
    for name, array in state.params.items():
        assert array.sharding == model.params[name].sharding, name


def test_a_run_over_a_mesh_goes_on_over_another(tmp_path):
    data = [{"input_ids": row.tolist()} for row in IDS.reshape(-1, 12)]

    def trainer(parallelism, rows, steps):
        model = AutoModelForTPU.from_config(CONFIGS["llama"], parallelism=parallelism)
        arguments = TrainingArguments(
            output_dir=tmp_path / "run",
            max_steps=steps,
            per_device_train_batch_size=rows,
            lr_scheduler_type="constant",
            logging_steps=1,
        )
        return Trainer(model, arguments, data)

    trainer({"fsdp": 8}, 1, 3).train()
    resumed = trainer({"data": 2, "tensor": 4}, 4, 6).resume()
    model = AutoModelForTPU.from_config(CONFIGS["llama"])
    arguments = TrainingArguments(
        output_dir=tmp_path / "alone", max_steps=6, per_device_train_batch_size=8, lr_scheduler_type="constant"
    )
    alone = Trainer(model, arguments, data).train()
    assert resumed["loss"] == pytest.approx(alone["loss"], abs=1e-4)


def test_a_model_is_moved_over_a_mesh_by_the_step():
    model = AutoModelForTPU.from_config(CONFIGS["llama"])
    before = np.asarray(model(input_ids=IDS[0]).logits)
    step = make_train_step(model, optax.sgd(0.1), mesh={"fsdp": 4, "tensor": 2})
    assert len(model.params["model.layers.0.mlp.up_proj.weight"].sharding.device_set) == 8
    np.testing.assert_allclose(np.asarray(model(input_ids=IDS[0]).logits), before, atol=1e-4)
    ids = IDS[0]
    _, metrics = step(step.init(), {"input_ids": ids, "labels": ids})
    assert np.isfinite(float(metrics["loss"]))


def test_a_module_of_nnx_says_how_its_parameters_are_split():
    from flax import nnx

    from hfax import to_nnx

    model = AutoModelForTPU.from_config(CONFIGS["llama"], parallelism={"fsdp": 2, "tensor": 4})
    module = to_nnx(model)
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module, nnx.Param))))
    plan = model.sharding_plan()
    for path, spec in specs.items():
        name = ".".join(map(str, path))
        found = spec.get_value() if isinstance(spec, nnx.Variable) else spec
        assert found == plan.weights[name].spec, name
    logits = nnx.jit(lambda m: m(input_ids=IDS[0]).logits)(module)
    np.testing.assert_allclose(np.asarray(logits), np.asarray(model(input_ids=IDS[0]).logits), atol=1e-4)


def test_a_model_over_devices_writes_and_learns_what_one_device_does(tmp_path):
    """GRPO: the engine and the step share the weights of the mesh."""
    found = {}
    for name, mesh in {"alone": None, "split": {"fsdp": 2, "tensor": 4}}.items():
        model = AutoModelForTPU.from_config(CONFIGS["llama"], parallelism=mesh)
        rows = 8 if mesh is None else 4
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [sum(map(str.islower, text)) / len(text) for text in completions],
            TrainingArguments(
                tmp_path / name, max_steps=3, per_device_train_batch_size=rows, learning_rate=1e-3, logging_steps=1
            ),
            [{"prompt": text} for text in ("ab", "cde", "fghi", "j")],
            processing_class=Characters(),
            loss=GRPOLoss(max_completion_length=6, beta=0.01),
            rollouts=RolloutConfig(num_generations=4, num_iterations=3, log_completions=True),
        )
        trainer.train()
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [(line["loss"], line["grad_norm"], line["kl"]) for line in lines]
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in found]
    assert texts[0] == texts[1]
    np.testing.assert_allclose(found["split"], found["alone"], rtol=1e-3, atol=1e-6)
