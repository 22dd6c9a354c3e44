"""Patches: in force for one thread and one trace, gone afterwards, and open to others."""

import importlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfax import AutoModelForTPU, register_patch, shrink_config
from hfax.errors import InvalidInputError
from hfax.kernels.target import compiling_for
from hfax.patches import registry
from hfax.patches.patch import ForwardPatch, FunctionPatch, OpPatch

_PATCHED = FunctionPatch(
    name="test-arange", why="a test", target="torch:arange", make=lambda original: lambda *a, **k: original(*a, **k) + 1
)


def _state() -> dict[str, Any]:
    """What patching might leave changed."""
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    classes = [c for c in vars(modeling_llama).values() if isinstance(c, type)]
    return {
        "torch": {n: getattr(torch, n) for n in ("arange", "_check_tensor_all", "_check_tensor_all_with")},
        "classes": {c.__qualname__: dict(vars(c)) for c in classes},
        "masks": dict(vars(masking_utils.AttentionMaskInterface)),
        "mask functions": dict(masking_utils.AttentionMaskInterface._global_mapping),
    }


@pytest.fixture
def llama() -> torch.nn.Module:
    return tiny_llama(hidden_size=32)


def test_tracing_leaves_transformers_classes_as_they_were(llama: Any) -> None:
    model = AutoModelForTPU.from_config(llama.config)
    model(torch.tensor([[1, 2, 3]]))  # registers hfax's own names, once
    before = _state()
    model(torch.tensor([[1, 2, 3, 4]]))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)
    assert _state() == before


def _with_images() -> list[torch.nn.Module]:
    """Models whose modules have the functions that patches of packed images replace."""
    kinds = [
        getattr(transformers, f"{name}ForConditionalGeneration") for name in ("Qwen2_5_VL", "Qwen3VL", "LlavaNext")
    ]
    with torch.device("meta"):
        return [kind(shrink_config(kind.config_class())) for kind in kinds]


def test_every_patch_names_itself_its_reason_and_what_it_changes(llama: Any) -> None:
    patches = registry.all_patches()
    assert len({p.name for p in patches}) == len(patches)
    for patch in patches:
        assert patch.why
        assert patch.applies_to()
        if isinstance(patch, OpPatch):
            assert patch.resolve(), f"{patch.name}: this torch has none of {patch.ops}"
        if isinstance(patch, FunctionPatch):
            with compiling_for("cpu", is_differentiated=True):
                owners = [owner for model in (llama, *_with_images()) for owner in patch.owners(model)]
            assert owners
            assert all(callable(getattr(holder, name)) for holder, name in owners)


def test_every_forward_patch_names_a_class_that_exists() -> None:
    from pathlib import Path

    sources = "".join(p.read_text() for p in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    for patch in registry.all_patches():
        if isinstance(patch, ForwardPatch):
            assert all(f"class {name.rpartition(':')[2]}(" in sources for name in patch.classes), patch.name
            for place, _, name in (c.rpartition(":") for c in patch.classes if ":" in c):
                assert callable(getattr(getattr(importlib.import_module(place), name), patch.method)), patch.name


def test_a_function_patch_holds_in_its_block_and_thread_alone(llama: Any) -> None:
    undo = register_patch(_PATCHED)
    before = torch.arange
    elsewhere: list[Any] = []
    try:
        with registry.patched(llama) as used:
            assert torch.arange(2).tolist() == [1, 2]
            with registry.patched(llama):
                assert torch.arange(2).tolist() == [2, 3]
            thread = threading.Thread(target=lambda: elsewhere.append(torch.arange(2).tolist()))
            thread.start()
            thread.join()
        assert elsewhere == [[0, 1]]
        assert "test-arange" in used
        assert torch.arange is before
        with pytest.raises(KeyError), registry.patched(llama):
            raise KeyError
        assert torch.arange is before
    finally:
        undo()
    with registry.patched(llama):
        assert torch.arange(2).tolist() == [0, 1]


def test_a_patch_that_cannot_be_made_leaves_the_function_as_it_was(llama: Any) -> None:
    """The dispatcher of torch's function stayed for good."""

    def make(original: Any) -> Any:
        raise KeyError

    undo = register_patch(FunctionPatch(name="test-broken", why="a test", target="torch:arange", make=make))
    before = torch.arange
    try:
        with pytest.raises(KeyError), registry.patched(llama):
            pass
        assert torch.arange is before
    finally:
        undo()


def test_a_forward_patch_changes_instances_not_classes(llama: Any) -> None:
    patch = ForwardPatch(
        name="test-norm",
        why="a test",
        classes=("LlamaRMSNorm",),
        make=lambda module, original: lambda x: original(x) * 0,
    )
    undo = register_patch(patch)
    x = torch.ones(1, 32)
    norm: Any = llama.model.norm
    try:
        with torch.no_grad(), registry.patched(llama) as used:
            assert float(norm(x).abs().max()) == 0
            assert "test-norm" in used
        assert float(norm(x).detach().abs().max()) > 0
        assert "forward" not in vars(norm)
    finally:
        undo()


def test_a_registered_op_patch_changes_the_model_and_its_programs(llama: Any) -> None:
    config = llama.config
    model = AutoModelForTPU.from_config(config)
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    undo = register_patch(
        OpPatch(
            name="test-silu",
            why="a test",
            ops=("torch.nn.functional.silu", "aten.silu"),
            lower=lambda x, inplace=False: x * 0,
        )
    )
    try:
        changed = AutoModelForTPU.from_config(config)
        assert float((changed(ids).logits - before).abs().max()) > 1e-3
        assert "test-silu" in changed.patches_used
    finally:
        undo()
    again = AutoModelForTPU.from_config(config)
    np.testing.assert_allclose(again(ids).logits, before, rtol=1e-5)


def test_a_name_can_be_taken_once() -> None:
    undo = register_patch(_PATCHED)
    with pytest.raises(InvalidInputError, match="test-arange"):
        register_patch(_PATCHED)
    undo()
    register_patch(_PATCHED)()


def test_what_is_no_patch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="is not a patch"):
        register_patch("linear")  # type: ignore[arg-type]


def test_patches_of_versions_that_are_not_installed_are_left_out() -> None:
    old = FunctionPatch(
        name="test-old", why="a test", target="torch:arange", make=lambda o: o, versions=("transformers<5",)
    )
    undo = register_patch(old)
    try:
        assert "test-old" not in {p.name for p in registry.all_patches()}
    finally:
        undo()


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        ("llama", "llama"),
        ("qwen3", "llama"),
        ("mixtral", "llama"),
        ("gemma", "gemma"),
        ("gemma3_text", "gemma"),
        ("t5", ""),
        ("gpt2", ""),
    ],
)
def test_norms_and_rotations_are_known_by_their_source(kind: str, norm: str) -> None:
    config = shrink_config(AutoConfig.for_model(kind))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config) if kind != "t5" else AutoModelForSeq2SeqLM.from_config(config)
    by_name = {p.name: p for p in registry.all_patches()}
    llama, gemma, rotation = (by_name[n] for n in ("llama-norm", "gemma-norm", "llama-rotation"))
    # plain JAX, as under a user's own jax.jit, has them as they are
    assert not llama.matches(model)
    assert not gemma.matches(model)
    assert not rotation.owners(model)
    with compiling_for("cpu", is_differentiated=True):
        assert llama.matches(model) == (norm == "llama")
        assert not gemma.matches(model)
        assert bool(rotation.owners(model)) == bool(norm)
    with compiling_for("cpu"):
        assert llama.matches(model) == (norm == "llama")
        assert gemma.matches(model) == (norm == "gemma")
        assert bool(rotation.owners(model)) == bool(norm)
    with compiling_for("tpu"):
        assert not llama.matches(model)
        assert not gemma.matches(model)
        assert not rotation.owners(model)
