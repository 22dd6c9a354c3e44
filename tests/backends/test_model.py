"""What a user calls on a loaded model: types of inputs and results, pure functions, generation's options, saving, pipelines."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tiny_models import SIZES, random_model, save, tiny_llama_config

import hfax
from hfax import AutoModelForTPU
from hfax.backends.jax.model import JaxModel


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(llama_folder)


_IDS = [[5, 17, 40, 8, 61, 33], [9, 9, 72, 30, 2, 50]]


def _prompt() -> torch.Tensor:
    return torch.tensor(_IDS)


def _close(ours: Any, theirs: torch.Tensor) -> None:
    ours = ours if isinstance(ours, torch.Tensor) else torch.from_numpy(np.array(ours))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def _compilations() -> list[str]:
    """Fills with an entry for each compilation by XLA, from now on."""
    counted: list[str] = []

    def count(event: str, seconds: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    return counted


# The forward pass


@pytest.mark.parametrize(
    ("kind", "make", "result"),
    [
        ("torch", lambda: _prompt(), torch.Tensor),
        ("numpy", lambda: np.array(_IDS), jax.Array),
        ("jax", lambda: jnp.array(_IDS), jax.Array),
        ("list", lambda: _IDS, jax.Array),
    ],
)
def test_forward_takes_every_kind_of_array(
    hfax_llama: JaxModel, plain_llama: Any, kind: str, make: Any, result: type
) -> None:
    with torch.no_grad():
        expected = plain_llama(_prompt()).logits
    out = hfax_llama(input_ids=make())
    assert type(out).__name__ == "CausalLMOutputWithPast"
    assert isinstance(out.logits, result)
    _close(out.logits, expected)


def test_flags_are_static(hfax_llama: JaxModel, plain_llama: Any) -> None:
    with torch.no_grad():
        expected = plain_llama(_prompt(), use_cache=False, output_hidden_states=True)
    out = hfax_llama(_prompt(), use_cache=False, output_hidden_states=True)
    assert out.cache is None
    assert len(out.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(out.hidden_states, expected.hidden_states, strict=True):
        _close(ours, theirs)
    as_tuple = hfax_llama(_prompt(), use_cache=False, return_dict=False)
    assert isinstance(as_tuple, tuple)
    _close(as_tuple[0], expected.logits)


def test_attentions_are_eager_transformers(hfax_llama: JaxModel, llama_folder: Path) -> None:
    eager = transformers.LlamaForCausalLM.from_pretrained(llama_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(_prompt(), output_attentions=True)
    out = hfax_llama(_prompt(), output_attentions=True)
    for ours, theirs in zip(out.attentions, expected.attentions, strict=True):
        _close(ours, theirs)


def test_padding_is_not_seen(hfax_llama: JaxModel) -> None:
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), _prompt()], dim=1)
    mask = (torch.arange(9) >= 3).long().expand(2, -1)
    positions = (torch.arange(9) - 3).clamp(min=0).expand(2, -1)
    _close(
        hfax_llama(padded, attention_mask=mask, position_ids=positions).logits[:, 3:].numpy(),
        hfax_llama(_prompt()).logits,
    )


def test_other_values_of_the_same_shapes_compile_nothing(hfax_llama: JaxModel) -> None:
    hfax_llama(_prompt())
    counted = _compilations()
    hfax_llama(_prompt() + 1)
    assert not counted


def test_loss_is_transformers(hfax_llama: JaxModel, plain_llama: Any) -> None:
    with torch.no_grad():
        expected = plain_llama(_prompt(), labels=_prompt()).loss
    assert abs(float(hfax_llama(_prompt(), labels=_prompt()).loss) - float(expected)) < 1e-4


# The pure function


def test_apply_is_pure_under_jit_grad_and_checkpoint(hfax_llama: JaxModel, llama_folder: Path) -> None:
    ids = jnp.array(_IDS)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return hfax_llama.apply(params, input_ids=ids, labels=ids, use_cache=False).loss

    value, gradients = jax.jit(jax.value_and_grad(loss))(hfax_llama.params)
    rematerialised = jax.jit(jax.grad(jax.checkpoint(loss)))(hfax_llama.params)

    reference = transformers.LlamaForCausalLM.from_pretrained(llama_folder).train()
    expected = reference(_prompt(), labels=_prompt()).loss
    expected.backward()
    assert abs(float(value) - expected.item()) < 1e-4
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        _close(gradients[name], parameter.grad)
        _close(rematerialised[name], parameter.grad)


def test_apply_under_vmap_equals_the_batch(hfax_llama: JaxModel) -> None:
    ids = jnp.array(_IDS)
    one = lambda row: hfax_llama.apply(hfax_llama.params, input_ids=row[None], use_cache=False).logits[0]  # noqa: E731
    _close(jax.jit(jax.vmap(one))(ids), torch.from_numpy(np.array(hfax_llama(ids).logits)))


def test_apply_outside_of_jit_equals_the_call(hfax_llama: JaxModel) -> None:
    _close(hfax_llama.apply(hfax_llama.params, input_ids=jnp.array(_IDS)).logits, hfax_llama(_prompt()).logits)


def test_params_are_a_flat_dict_and_may_be_replaced(llama_folder: Path) -> None:
    model = AutoModelForTPU.from_pretrained(llama_folder)
    assert type(model.params) is dict
    assert set(model.params) == set(transformers.LlamaForCausalLM.from_pretrained(llama_folder).state_dict())
    before = model(_prompt()).logits
    model.params = {**model.params, "lm_head.weight": model.params["lm_head.weight"] * 2}
    _close(model(_prompt()).logits, before * 2)


def test_register_pytrees_lets_outputs_and_caches_leave_jit() -> None:
    hfax.register_pytrees()
    hfax.register_pytrees()
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=jnp.ones((1, 2)))  # type: ignore[arg-type]
    back = jax.jit(lambda o: o)(output)
    assert type(back) is type(output)
    assert back.hidden_states is None
    plain = transformers.DynamicCache()
    plain.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    doubled = jax.jit(lambda c: jax.tree.map(lambda a: a * 2, c))(jax.tree.map(lambda t: jnp.array(t.numpy()), plain))
    assert type(doubled) is transformers.DynamicCache
    assert doubled.layers[0].keys.shape == (1, 1, 3, 2)
    assert float(doubled.layers[0].values.sum()) == 12


# Saving


@pytest.mark.parametrize("kind", ["llama", "mixtral, experts stacked", "tied gpt2"])
def test_saved_folder_is_what_plain_transformers_reads(kind: str, tmp_path: Path) -> None:
    config: Any = {
        "llama": tiny_llama_config,
        "mixtral, experts stacked": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
        "tied gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50),
    }[kind]()
    original = random_model(config)
    AutoModelForTPU.from_pretrained(save(tmp_path / "theirs", original)).save_pretrained(tmp_path / "ours")
    back, report = type(original).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for name, tensor in original.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = AutoModelForTPU.from_pretrained(tmp_path / "ours")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        _close(again(ids).logits, original(ids).logits)


def test_bfloat16_survives_saving_bit_for_bit(llama_folder: Path, tmp_path: Path) -> None:
    AutoModelForTPU.from_pretrained(llama_folder, dtype="bfloat16").save_pretrained(tmp_path)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert back.dtype == torch.bfloat16
    expected = transformers.LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.bfloat16)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


# Pipelines


def test_text_generation_pipeline_takes_the_model(hfax_llama: JaxModel, plain_llama: Any, tokenizer: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    theirs = transformers.pipeline("text-generation", model=plain_llama, tokenizer=tokenizer)
    ours = transformers.pipeline("text-generation", model=hfax_llama, tokenizer=tokenizer)
    text = "w5 w17 w40"
    assert ours(text, **options) == theirs(text, **options)


def test_text_classification_pipeline_takes_the_model(llama_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama_folder, num_labels=3)
    torch.manual_seed(1)
    reference = transformers.LlamaForSequenceClassification(config).eval()
    reference.save_pretrained(tmp_path)
    ours = transformers.pipeline(
        "text-classification", model=AutoModelForTPU.from_pretrained(tmp_path), tokenizer=tokenizer
    )
    theirs = transformers.pipeline("text-classification", model=reference, tokenizer=tokenizer)
    (mine,), (expected,) = ours("w5 w17 w40"), theirs("w5 w17 w40")
    assert mine["label"] == expected["label"]
    assert mine["score"] == pytest.approx(expected["score"], rel=1e-4)
