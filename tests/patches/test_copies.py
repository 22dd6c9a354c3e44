"""Patches that stand for copies of Llama's and Gemma's code hold for what is a copy in all that it reaches, for nothing else."""

import textwrap
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

import hfax
from hfax import AutoModelForTPU, make_train_step, shrink_config
from hfax.kernels.target import compiling_for
from hfax.matrix.case import draw_weights
from hfax.patches import copies, registry
from hfax.patches.patch import ForwardPatch

_IDS = torch.arange(3, 35).reshape(2, 16)


def _nanochat(folder: Path) -> tuple[Any, Any]:
    plain = transformers.NanoChatForCausalLM(shrink_config(transformers.NanoChatConfig())).eval()
    draw_weights(plain)
    plain.save_pretrained(folder)
    return plain, AutoModelForTPU.from_pretrained(folder)


def test_nanochat_whose_rotation_turns_the_other_way_writes_the_text_of_transformers(tmp_path: Path) -> None:
    """Its `apply_rotary_pos_emb` is Llama's; small calls on CPU got Llama's sign: logits were off by two thirds of their scale."""
    plain, model = _nanochat(tmp_path)
    with torch.no_grad():
        expected = plain(_IDS).logits
    without_kernels = jax.jit(lambda params: model.apply(params, input_ids=_IDS.numpy()).logits)(model.params)
    for found in (model(_IDS).logits, torch.from_numpy(np.array(without_kernels))):
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(torch.as_tensor(model.generate(_IDS, **options)), plain.generate(_IDS, **options))
    assert "llama-rotation" not in model.patches_used


def test_gradients_of_nanochat_are_those_of_torch(tmp_path: Path) -> None:
    """The patch also stood in every program of training, whatever its size."""
    plain, model = _nanochat(tmp_path)
    plain(_IDS, labels=_IDS, use_cache=False).loss.backward()
    step = make_train_step(model, optax.sgd(1.0))
    before = {name: np.asarray(array) for name, array in model.params.items()}
    state, _ = step(step.init(), {"input_ids": _IDS.numpy(), "labels": _IDS.numpy()})
    with compiling_for("cpu", is_differentiated=True):
        loss = jax.grad(lambda p: model.apply(p, input_ids=_IDS.numpy(), labels=_IDS.numpy(), use_cache=False).loss)
        direct = jax.jit(loss)(model.params)
    for name, parameter in plain.named_parameters():
        gradient = parameter.grad.numpy()
        atol = 1e-5 * max(np.abs(gradient).max(), 1e-1) + 1e-6
        np.testing.assert_allclose(before[name] - np.asarray(state.params[name]), gradient, atol=atol, err_msg=name)
        np.testing.assert_allclose(np.asarray(direct[name]), gradient, atol=atol, err_msg=name)


_ROTATION = """
import torch

SIGN = -1


def half(x):
    return x.shape[-1] // 2


def rotate_half(x, *, dim=-1):
    {docstring}
    x1 = x[..., : half(x)]
    x2 = x[..., half(x) :]
    return torch.cat((SIGN * x2, x1), dim=dim)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
"""


def _written(name: str, source: str, folder: Path) -> Any:
    """A module with this source, which is imported from a file so that its source can be read."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    module = types.ModuleType(name)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("{docstring}", '"""Says something else."""'), None),
        (("def half(x):", "def half(x: torch.Tensor) -> int:"), None),
        (("SIGN = -1", "SIGN = 1"), "SIGN"),
        (("SIGN = -1", "SIGN = -1.0"), "SIGN"),
        (("// 2", "// 2 + 0"), "half"),
        (("dim=-1)", "dim=1)"), "the default of rotate_half's dim"),
        (("unsqueeze_dim=1", "unsqueeze_dim=2"), "a default of apply_rotary_pos_emb"),
        (("sin, unsqueeze_dim=1", "sin, position_ids=None, unsqueeze_dim=1"), "apply_rotary_pos_emb"),
        (("import torch\n", "import numpy as torch\n"), "torch.cat"),
        (
            (
                "def half(x):",
                "def twice(f):\n    def half():\n        return 1\n    return f\n\n\n@twice\ndef half(x):",
            ),
            None,
        ),
        (
            ("\n\ndef apply", "\n\ndef len_of(f):\n    return lambda x: -f(x)\n\n\nhalf = len_of(half)\n\n\ndef apply"),
            "half",
        ),
    ],
)
def test_a_copy_is_one_in_all_that_it_reaches(change: tuple[str, str], named: str | None, tmp_path: Path) -> None:
    reference = _written("reference", _ROTATION.replace("{docstring}", "pass"), tmp_path)
    source = _ROTATION.replace(*change).replace("{docstring}", "pass")
    if "docstring" in change[0]:
        reference = _written("reference", _ROTATION.replace("{docstring}", '"""Says something."""'), tmp_path)
    other = _written("other", source, tmp_path)
    assert copies.difference(other.apply_rotary_pos_emb, reference.apply_rotary_pos_emb) == named


_NORM = """
import torch


class Norm(torch.nn.Module):
    variance_epsilon = 1e-6

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def mean(self, x):
        return x.pow(2).mean(-1, keepdim=True)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(self.mean(x) + self.variance_epsilon)
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("torch.ones(4)", "torch.zeros(4)"), None),  # what a weight is, the patch looks up itself
        ((".pow(2)", ".abs()"), "self.mean"),
        (("1e-6", "1e-5"), "self.variance_epsilon"),
        (("    def mean", "    weight = property(lambda self: 2.0)\n\n    def mean"), "self.weight"),
        (("    def mean", "    def __getattr__(self, name):\n        return 2.0\n\n    def mean"), "self.__getattr__"),
    ],
)
def test_a_method_is_read_with_its_class(change: tuple[str, str], named: str | None, tmp_path: Path) -> None:
    reference = _written("reference", _NORM, tmp_path).Norm
    other = _written("other", _NORM.replace(*change), tmp_path).Norm
    found = copies.difference(other.forward, reference.forward, owner=other, reference_owner=reference)
    assert found == named


def test_a_subclass_that_computes_the_same_otherwise_is_no_copy() -> None:
    class Doubled(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Any) -> Any:
            return 2 * super().forward(hidden_states)

    class Same(modeling_llama.LlamaRMSNorm):
        pass

    norm = modeling_llama.LlamaRMSNorm
    assert copies.difference(Doubled.forward, norm.forward, owner=Doubled, reference_owner=norm) == "forward"
    assert copies.difference(Same.forward, norm.forward, owner=Same, reference_owner=norm) is None


def test_rotations_of_all_models_are_compared_with_what_they_call() -> None:
    """Of transformers 5.23's 186 functions of that name, NanoChat's and Blt's alone differ from Llama's only in what they call."""
    from transformers.models.blt import modeling_blt
    from transformers.models.mistral import modeling_mistral
    from transformers.models.nanochat import modeling_nanochat

    differences = {
        module.__name__.rpartition("_")[2]: copies.difference(
            module.apply_rotary_pos_emb, modeling_llama.apply_rotary_pos_emb
        )
        for module in (modeling_blt, modeling_mistral, modeling_nanochat)
    }
    assert differences == {"blt": "rotate_half", "mistral": None, "nanochat": "rotate_half"}


def test_a_patch_of_one_of_transformers_classes_leaves_another_class_of_the_name_alone(tmp_path: Path) -> None:
    """A model whose code comes with it may call its experts as transformers does, and compute something else."""
    from transformers.models.dbrx import modeling_dbrx

    (patch,) = (p for p in registry.all_patches() if p.name == "dbrx-experts")
    assert isinstance(patch, ForwardPatch)
    config = transformers.DbrxConfig().ffn_config
    config.hidden_size, config.ffn_hidden_size, config.moe_num_experts = 8, 8, 2
    own = modeling_dbrx.DbrxExperts(config)
    assert patch.fits(own)
    assert not patch.refused(own)

    class Overridden(modeling_dbrx.DbrxExperts):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return hidden_states

    source = "import torch\n\n\nclass DbrxExperts(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    for other in (Overridden(config), _written("modeling_own", source, tmp_path).DbrxExperts()):
        assert not patch.fits(other)
        (why,) = patch.refused(other).values()
        assert why.startswith("forward of ")
        assert why.endswith("differs from that of transformers' DbrxExperts")


def test_a_function_of_a_model_that_is_changed_afterwards_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    model = transformers.MistralForCausalLM(shrink_config(transformers.MistralConfig()))
    (patch,) = (p for p in registry.all_patches() if p.name == "llama-rotation")
    with compiling_for("cpu", is_differentiated=True):
        assert patch.owners(model)  # type: ignore[attr-defined]
        monkeypatch.setattr(modeling_mistral, "rotate_half", lambda x: x)
        assert not patch.owners(model)  # type: ignore[attr-defined]


def test_patches_in_force_do_not_hide_what_they_stand_for() -> None:
    """A trace within a trace finds the dispatcher of the outer one in the function's place."""
    model = transformers.LlamaForCausalLM(shrink_config(transformers.LlamaConfig()))
    (patch,) = (p for p in registry.all_patches() if p.name == "llama-rotation")
    with compiling_for("cpu", is_differentiated=True), registry.patched(model):
        assert patch.owners(model) == [(modeling_llama, "apply_rotary_pos_emb")]  # type: ignore[attr-defined]


def test_the_doctor_says_which_patch_does_not_apply_and_why() -> None:
    from hfax.cli.doctor import as_text

    found = hfax.diagnose(shrink_config(transformers.NanoChatConfig()))
    assert found.refusals["llama-rotation"] == "rotate_half differs from Llama's"
    assert (
        "  no patch llama-rotation: rotate_half differs from Llama's"
        in as_text(found, verbose=False, free=None).splitlines()
    )
    assert hfax.diagnose(shrink_config(transformers.LlamaConfig())).refusals == {}
    assert hfax.diagnose(shrink_config(transformers.GemmaConfig())).refusals == {}
