"""Replacements for Python code of transformers and torch that reads tensor values."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _mode_utils as mode_utils

from hfax.errors import UnsupportedModelError, running_line
from hfax.patches.patch import ForwardPatch, FunctionPatch, OpPatch, Patch

_local = threading.local()


@contextlib.contextmanager
def collecting_checks(found: dict[str, Any]) -> Iterator[None]:
    """Within the block, data-dependent checks of modelling code are added to `found`: location mapped to a scalar bool tensor."""
    before, _local.checks = getattr(_local, "checks", None), found
    try:
        yield
    finally:
        _local.checks = before


def merge_checks(found: dict[str, Any]) -> None:
    """Add checks collected separately, in a part of the trace that must return everything it computes."""
    if (checks := getattr(_local, "checks", None)) is not None:
        checks |= found


def note_check(condition: Any, what: str | None = None) -> None:
    """Record a condition on traced values that must hold when the program runs.

    Args:
        condition: bool of any shape; all elements must be true.
        what: description of the condition; None: the current line of modelling code.
    """
    if (found := getattr(_local, "checks", None)) is not None:
        name = f"{what or 'a check of the model fails'} ({running_line()})"
        found[name] = condition.all() & found[name] if name in found else condition.all()  # in a loop over layers


@contextlib.contextmanager
def applying_functions(apply: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the block, `apply(kind, args)` stands for `kind.apply(*args)` of a `torch.autograd.Function`."""
    before, _local.apply = getattr(_local, "apply", None), apply
    try:
        yield
    finally:
        _local.apply = before


def _make_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(_local, "apply", None)
        if found is None:
            return original(kind, *args, **kwargs)
        if kwargs:
            args = tuple(inspect.signature(kind.forward).bind(*args, **kwargs).args)
        return found(kind, args)

    return apply


def _make_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(*args: Any) -> None:
        condition = next(a for a in args if isinstance(a, torch.Tensor))
        message = args[-1] if callable(args[-1]) else None
        if getattr(condition, "host", None) is None:
            note_check(condition)
        elif not bool(condition.all()):
            raise ValueError(message() if message is not None else f"a check of the model fails ({running_line()})")

    return check


def _make_test(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_all_true(condition: torch.Tensor) -> bool:
        if getattr(condition, "host", None) is not None:
            return bool(condition.all())
        note_check(condition)
        return True

    return is_all_true


def _lengths_on_host(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        given: Any = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        rows, length = given.shape[:2]
        if kwargs.get("lengths") is None:
            if attention_mask is None and input_ids is not None:
                count = (input_ids != module.pad_index).sum(dim=1)
                attention_mask = torch.arange(length, device=input_ids.device)[None] < count[:, None]
            kwargs["lengths"] = torch.full((rows,), length)
        return original(input_ids, attention_mask, *args, **kwargs)

    return forward


def _any(x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    if dim in (None, 0) and (known := getattr(_local, "any", None)) is not None:
        with jax.ensure_compile_time_eval():
            return jnp.full(() if dim is None else x.shape[1:], known)
    found = jnp.any(x, axis=dim, keepdims=keepdim)
    return found.astype(x.dtype) if x.dtype == jnp.uint8 else found


@contextlib.contextmanager
def _any_is(known: bool) -> Iterator[None]:
    """Within the block, `any` of a whole mask, or of its first axis, is a constant."""
    before, _local.any = getattr(_local, "any", None), known
    try:
        yield
    finally:
        _local.any = before


def _any_is_true(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _any_is(True):
            return original(*args, **kwargs)

    return forward


def _global_if_given(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        is_given = given.get("global_attention_mask") is not None
        if not is_given and (mask := given.get("attention_mask")) is not None:
            note_check(mask <= 1, "attention_mask has values above 1; mark global tokens in global_attention_mask")
        with _any_is(is_given):
            return original(*args, **kwargs)

    return forward


def _padding_has_a_bucket(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def hash_vectors(vectors: Any, num_hashes: int, attention_mask: Any, increase_num_buckets: bool = False) -> Any:
        """Buckets, [batch, heads, hashes · length] int64, with a last one for padding, which stays empty if there is none."""
        sizes = module.num_buckets if isinstance(module.num_buckets, (list, tuple)) else [module.num_buckets]
        shape = (module.num_attention_heads, vectors.shape[-1], num_hashes, sum(sizes) // 2)
        if module.hash_seed is None:
            rotations = torch.randn(shape, device=vectors.device, dtype=vectors.dtype)
        else:  # torch's own numbers
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                rotations = torch.randn(
                    shape, generator=torch.Generator().manual_seed(module.hash_seed), dtype=vectors.dtype
                )
        rotated = torch.einsum("bmtd,mdhr->bmhtr", vectors.detach(), rotations)
        buckets, factor = 0, 1
        for size, part in zip(sizes, rotated.split([size // 2 for size in sizes], dim=-1), strict=True):
            buckets = buckets + factor * torch.cat([part, -part], dim=-1).argmax(dim=-1)
            factor *= size
        offsets = torch.arange(num_hashes, device=vectors.device)[:, None] * (factor + 1)
        if attention_mask is not None:
            buckets = torch.where(attention_mask.bool()[:, None, None], buckets, factor)
        return (buckets + offsets).flatten(start_dim=2)

    return hash_vectors


def _masks_in_every_block(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        """EoMT's forward, with a mask in each of its last blocks, which hides nothing where `attn_mask_probs` is zero."""
        probabilities = module.attn_mask_probs
        masks: list[Any] = []

        def disable(mask: Any, prob: Any, num_query_tokens: int, encoder_start_tokens: int, device: Any) -> Any:
            share = probabilities[len(masks)]
            before = masks[-1] if masks else torch.ones_like(mask)
            is_free = torch.zeros_like(mask)
            is_free[:, :num_query_tokens, encoder_start_tokens:] = (
                torch.rand(len(mask), num_query_tokens, device=device) >= share
            )[..., None]
            masks.append(torch.where(share > 0, mask | is_free, before))
            return masks[-1]

        module.attn_mask_probs = torch.ones(len(probabilities))  # modelling code asks whether they are above zero
        module._disable_attention_mask = disable
        try:
            return original(*args, **kwargs)
        finally:
            module.attn_mask_probs = probabilities
            del module._disable_attention_mask

    return forward


def _room_for_every_patch(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def patch_lengths(entropies: Any, sequence_length: int, patch_size: Any = None, threshold: Any = None) -> Any:
        """Lengths of patches, [batch, sequence_length + 1] int64; those behind the last patch are 0.

        The first two bytes begin a patch, and so does each byte behind one with an entropy above the threshold. Cumulative sums of
        the lengths are where patches begin; one that does not exist begins behind the end, so no byte belongs to it.
        """
        nowhere = sequence_length + 1
        positions = torch.arange(2, nowhere, device=entropies.device)
        begins = torch.where(entropies[:, 1:] > threshold, positions, nowhere).sort(dim=1).values
        first = torch.arange(2, device=entropies.device).expand(begins.shape[0], 2)
        end = torch.full_like(first[:, :1], nowhere)
        return torch.cat((first, begins, end), dim=1).diff(dim=1)

    return patch_lengths


def _no_bound_on_room(original: Callable[..., Any]) -> Callable[..., Any]:
    def process(patch_lengths: Any, max_patch_length: int | None) -> Any:
        """The lengths of patches; those of `_room_for_every_patch` add up to more than the text, so they cannot be divided."""
        if max_patch_length is not None and getattr(patch_lengths, "array", None) is not None:
            raise UnsupportedModelError(
                f"Blt with max_patch_length={max_patch_length} does not run with patches by entropy.",
                "hfax keeps room for a patch of each byte, behind the patches that there are; division would fill that room.",
                "Leave max_patch_length out of the config, or use plain transformers.",
            )
        return original(patch_lengths, max_patch_length)

    return process


PATCHES: list[Patch] = [
    OpPatch(
        name="any",
        why="for models that ask `if mask.any()` only to save work: see any-is-true",
        ops=("torch.any", "torch.Tensor.any"),  # not aten.any, since `all` is built on it
        lower=_any,
    ),
    ForwardPatch(
        name="any-is-true",
        why="the model asks `if mask.any()` of a traced mask, and does nothing for a mask that is all false",
        classes=("Ovis2Model", "FSMTModel"),
        make=_any_is_true,
    ),
    FunctionPatch(
        name="no-bound-on-room-for-patches",
        why="Blt can divide long patches, which room-for-every-patch does not allow",
        target="transformers.models.blt.modeling_blt:process_patch_lengths",
        make=_no_bound_on_room,
        model_types=("blt",),
    ),
    ForwardPatch(
        name="global-tokens-if-given",
        why="Longformer and LED look whether any token has global attention (`any().item()`): one may if there is a mask of them",
        classes=("LongformerModel", "LEDEncoder"),
        make=_global_if_given,
    ),
    ForwardPatch(
        name="every-pool-is-kept",
        why="GLM-5 drops pools of keys that are invalid in every row (`any(0)`); it masks them as well, so they may stay",
        classes=("Glm5NextTextIndexer",),
        method="get_pooled_states",
        make=_any_is_true,
    ),
    FunctionPatch(
        name="autograd-functions",
        why="a trace has no autograd: the `backward` of such functions becomes a custom gradient of JAX",
        target="torch.autograd:Function.apply",
        make=_make_apply,
    ),
    FunctionPatch(
        name="value-checks-with",
        why="transformers' checks read values, which a trace does not have; the program gives them back, and the host checks",
        target="torch:_check_tensor_all_with",
        make=_make_check,
    ),
    FunctionPatch(
        name="value-checks",
        why="the same check, in the form that transformers uses when it knows that it is traced",
        target="torch:_check_tensor_all",
        make=_make_check,
    ),
    FunctionPatch(
        name="value-checks-of-distributions",
        why="torch's distributions raise unless their parameters are valid, and ask nothing else of values",
        target="torch:_is_all_true",
        make=_make_test,
    ),
    *(
        FunctionPatch(
            name=f"{name}-static-table",
            why="the model compares the traced length with its table of positions, unless it believes to be compiled by torch",
            target=f"transformers.models.{name}.modeling_{name}:is_torchdynamo_compiling",
            make=lambda original: lambda: True,
            model_types=(model_type,),
        )
        for name, model_type in (
            ("xglm", "xglm"),
            ("nllb_moe", "nllb-moe"),
            ("m2m_100", "m2m_100"),
            ("seamless_m4t", "seamless_m4t"),
            ("seamless_m4t_v2", "seamless_m4t_v2"),
            ("kosmos2", "kosmos-2"),
            ("kosmos2_5", "kosmos-2.5"),
        )
    ),
    FunctionPatch(
        name="audio-tokens-are-expanded",
        why="Qwen2-Audio looks whether the prompt has a token for each feature, unless it believes to be compiled; it must have",
        target="transformers.models.qwen2_audio.modeling_qwen2_audio:is_torchdynamo_compiling",
        make=lambda original: lambda: True,
        model_types=("qwen2_audio",),
    ),
    ForwardPatch(
        name="lengths-on-the-host",
        why="XLM and Flaubert assert that the longest length, computed from the traced ids, fits (`item`)",
        classes=("XLMModel", "FlaubertModel"),
        make=_lengths_on_host,
    ),
    ForwardPatch(
        name="padding-has-a-bucket",
        why="Reformer counts the padding (`item`) to decide whether it gets a bucket of its own",
        classes=("LSHSelfAttention",),
        method="_hash_vectors",
        make=_padding_has_a_bucket,
    ),
    ForwardPatch(
        name="masks-in-every-block",
        why="EoMT's last blocks look at a buffer to decide whether queries are masked",
        classes=("EomtForUniversalSegmentation", "EomtDinov3ForUniversalSegmentation"),
        make=_masks_in_every_block,
    ),
    ForwardPatch(
        name="room-for-every-patch",
        why="Blt makes as many patches as bytes have an entropy above a threshold; so there is room for one a byte",
        classes=("BltPatcher",),
        method="patch_lengths_from_entropies",
        make=_room_for_every_patch,
    ),
]
