"""Verifies a checkpoint against plain transformers: same outputs and same text, or the first difference.

Turns a loaded model and prompts into a `Verification`. Images, audio and other inputs besides text are random. The reference is
transformers' own class with the same weights and dtype, run by torch on the CPU. If the two differ by more than rounding, both run
again recording every module's outputs, and then every operation's outputs in the first differing module.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode, resolve_name

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.kernels.target import compiling_for
from hfax.load.host_arrays import to_numpy
from hfax.synthetic.inputs import make_inputs
from hfax.tracing.geometry import HostArray
from hfax.tracing.torchax import as_array, is_tensor

TOLERANCE = 1e-4
"""Relative to an output's largest value: float32 sums in a different order."""
_ROUNDING = 4.0
"""A difference up to this multiple of the reference's own error (against the next wider dtype) counts as rounding."""
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_CACHES = ("past_key_values", "cache_params", "mems", "state")
_BESIDE_TEXT = {"pixel_values", "input_features", "input_values"}

Inputs = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """Inputs of a forward pass, and those of `generate`."""

    label: str
    forward: Inputs
    generate: Inputs

    @property
    def num_tokens(self) -> int:
        return self.forward["input_ids"].shape[1] if "input_ids" in self.forward else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The result of one prompt.

    Args:
        prompt: prompt text; for random inputs their names and shapes.
        prompt_tokens: prompt length, in tokens; 0 for inputs without text.
        forward_error: largest difference of an output, relative to that output's largest value.
        rounding: the reference's own error in its dtype against the next wider one; None if not computed because
            `forward_error` is within tolerance.
        new_tokens: number of tokens the reference generated.
        parted_at: index of the first new token that differs, from 0; None if all match.
        margin: difference between the reference's logits of the two tokens there, relative to its largest logit.
        outcome: "agrees"; "tie" (the texts diverge where the reference's two best tokens are within rounding); "forward
            differs"; "text differs" (although a forward pass over the same text agrees: caches, masks or positions).
    """

    prompt: str
    prompt_tokens: int
    forward_error: float
    rounding: float | None = None
    new_tokens: int = 0
    parted_at: int | None = None
    margin: float | None = None
    outcome: str = "agrees"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a forward pass first differs.

    Args:
        part: name of the first module with different outputs; "" for the model itself.
        part_class: class of that module.
        error: largest difference of its outputs, relative to their largest value.
        operation: the first torch operation in it with a different result; None if hfax runs other operations there (a patch).
        operation_error: relative error of that operation's result.
    """

    part: str
    part_class: str
    error: float
    operation: str | None
    operation_error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a comparison with plain transformers.

    Args:
        class_name: model class name.
        dtype: weight and compute dtype, on both sides.
        agrees: whether no prompt differs.
        prompts: one result per prompt.
        padded_error: largest logit difference with all prompts in one left-padded batch, relative to the largest logit; None for a
            single prompt, and for models that do not support it.
        not_verified: why images or audio were not verified beside the prompts; None if they were, or the model takes none.
        difference: location of the first forward difference; None if there is none.
        patches: names of the applied patches.
        versions: library versions.
    """

    class_name: str
    dtype: str
    agrees: bool
    prompts: tuple[PromptResult, ...]
    padded_error: float | None
    not_verified: str | None
    difference: Difference | None
    patches: tuple[str, ...]
    versions: dict[str, str]


def verify(
    model: JaxModel, tokenizer: Any = None, prompts: Sequence[str] = (), *, max_new_tokens: int = 32
) -> Verification:
    """Compare a model with plain transformers: forward pass and greedy generation.

    A model that takes images, audio or anything else besides text is also run on random inputs of the sizes in its config.

    Args:
        model: a model loaded from a folder, without quantization, a mesh or adapters.
        tokenizer: the checkpoint's tokenizer; None without prompts.
        prompts: prompts for a model that takes text.
        max_new_tokens: tokens to generate greedily per prompt, if the model generates.

    Returns:
        The comparison. A model that differs is a result, not an error.

    Raises:
        InvalidInputError: prompts for a model that takes no text, or none for a model that takes text alone.
        UnsupportedModelError: plain transformers cannot run the model, or random inputs cannot be made.
    """
    if model.quantization is not None or model.mesh is not None or model.folder is None:
        raise UnsupportedModelError(
            "Only an unmodified checkpoint on one device can be verified.",
            "Plain transformers has no counterpart for quantized or sharded weights.",
            "Load the model without quantization and parallelism.",
        )
    cls = type(model.module)
    if prompts and not takes_prompts(cls):
        raise InvalidInputError(
            f"{cls.__name__} does not take prompts.",
            f"It takes {', '.join(sorted(_beside_text(cls))) or model.main_input_name}, not text alone.",
            "Omit the prompts: it is verified on random inputs.",
        )
    reference = _Reference(model)
    calls = [_encode(tokenizer, reference.plain, prompt) for prompt in prompts]
    not_verified = None
    if not takes_prompts(cls) or _beside_text(cls):
        try:
            calls.append(_random_call(reference.plain))
        except UnsupportedModelError as error:
            if not calls:
                raise
            not_verified = error.why
    if not calls:
        raise InvalidInputError(
            "There is nothing to verify.", f"{type(model.module).__name__} takes text.", "Pass one or more prompts."
        )
    results = []
    first: Inputs | None = None
    for call in calls:
        result = _compare(model, reference, call, max_new_tokens)
        results.append(result)
        if result.outcome == "forward differs" and first is None:
            first = call.forward
    padded_error = None
    if len(prompts) > 1 and model.can_generate() and not reference.plain.config.is_encoder_decoder:
        batch = _positions(reference.plain, _left_padded([call.forward for call in calls[: len(prompts)]]))
        error, rounding = _forward_error(model, reference, batch)
        padded_error = error
        if not _is_rounding(error, rounding) and first is None:
            first = batch
    return Verification(
        class_name=type(model.module).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        agrees=first is None and all(r.outcome in ("agrees", "tie") for r in results),
        prompts=tuple(results),
        padded_error=padded_error,
        not_verified=not_verified,
        difference=None if first is None else _first_difference(model, reference, first),
        patches=tuple(sorted(model.patches_used)),
        versions={"transformers": transformers.__version__, "torch": torch.__version__, "jax": jax.__version__},
    )


def takes_prompts(model_class: Any) -> bool:
    """Whether a transformers class can be verified with text alone."""
    if model_class.main_input_name != "input_ids":
        return False
    return model_class.can_generate() or not _beside_text(model_class)


def _beside_text(model_class: Any) -> set[str]:
    """Its inputs of images and audio."""
    return _BESIDE_TEXT & set(inspect.signature(model_class.forward).parameters)


class _Reference:
    """The plain transformers model, and a lazily created copy in the next wider dtype."""

    def __init__(self, model: JaxModel) -> None:
        cls: Any = type(model.module)
        try:
            self.plain = cls.from_pretrained(model.folder, dtype=model.dtype).eval()
        except Exception as error:
            raise UnsupportedModelError(
                f"Plain transformers cannot load {cls.__name__} from {model.folder}.",
                f"{type(error).__name__}: {error}",
                "Run hfax doctor MODEL --check to compare a small copy instead.",
            ) from error
        self.plain.generation_config = model.generation_config

    @functools.cached_property
    def wider(self) -> torch.nn.Module:
        """The same weights in the next wider dtype."""
        return copy.deepcopy(self.plain).to(_WIDER[self.plain.dtype])


def _encode(tokenizer: Any, plain: Any, prompt: str) -> _Call:
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    given = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
    return _Call(label=prompt, forward=_with_start(plain, given), generate=given)


def _with_start(plain: Any, inputs: Inputs) -> Inputs:
    """The inputs of an encoder-decoder with the decoder's first token."""
    if not plain.config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(plain.forward).parameters:
        return inputs
    config = getattr(plain, "generation_config", None)
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "bos_token_id", None) if start is None else start
    rows = len(next(iter(inputs.values())))
    return {**inputs, "decoder_input_ids": torch.full((rows, 1), 0 if start is None else start)}


def _random_call(plain: Any) -> _Call:
    """Random inputs of the sizes in the model's config: two rows, with images or audio if it takes them.

    Raises:
        UnsupportedModelError: hfax has no rule for one of its inputs.
    """
    names = inspect.signature(plain.forward).parameters
    is_beside_text = {"input_ids", "pixel_values"} <= set(names) and not plain.config.is_encoder_decoder
    generates = plain.can_generate()
    mapping = "base" if not generates else "image-text-to-text" if is_beside_text else "speech-seq2seq"
    try:
        made = make_inputs(plain, mapping)
    except Exception as error:
        raise UnsupportedModelError(
            f"No random inputs can be made for {type(plain).__name__}.",
            f"{type(error).__name__}: {error}",
            "Run hfax doctor MODEL --check to compare a small copy with plain transformers.",
        ) from error
    if missing := _beside_text(type(plain)) - set(made.forward):
        raise UnsupportedModelError(
            f"No random inputs can be made for {type(plain).__name__}.",
            f"hfax has no rule for {', '.join(sorted(missing))}.",
            "Run hfax doctor MODEL --check to compare a small copy with plain transformers.",
        )
    forward = {n: _as_dtype(v, plain.dtype) for n, v in made.forward.items() if n != "decoder_input_ids"}
    shapes = ", ".join(f"{n} {tuple(v.shape)}" for n, v in forward.items() if isinstance(v, torch.Tensor))
    generate = {n: _as_dtype(v, plain.dtype) for n, v in made.generate.items()}
    return _Call(label=f"random {shapes}", forward=_with_start(plain, forward), generate=generate)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _left_padded(rows: Sequence[Inputs]) -> Inputs:
    """Prompts of different lengths as one left-padded batch."""
    width = max(row["input_ids"].shape[1] for row in rows)
    pads = [width - row["input_ids"].shape[1] for row in rows]
    ids = [torch.nn.functional.pad(row["input_ids"], (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    mask = torch.stack([(torch.arange(width) >= pad).long() for pad in pads])
    return {"input_ids": torch.cat(ids), "attention_mask": mask}


def _positions(plain: Any, inputs: Inputs) -> Inputs:
    """Add position ids that skip padding; plain forward passes do not compute them."""
    if "position_ids" not in inspect.signature(plain.forward).parameters or plain.config.is_encoder_decoder:
        return inputs
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return inputs
    return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _run_plain(plain: Any, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return _kept(plain(**{n: _as_dtype(v, plain.dtype) for n, v in inputs.items()}))


def _forward_error(model: JaxModel, reference: _Reference, inputs: Inputs) -> tuple[float, float | None]:
    """Largest error of the outputs over non-padding tokens: hfax's, and the reference's own if hfax's exceeds the tolerance."""
    expected = _run_plain(reference.plain, inputs)

    def largest(found: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> float:
        if len(found) != len(true):
            return float("inf")
        return max(relative_error(a, b, _mask_for(b, inputs)) for a, b in zip(found, true, strict=True))

    error = largest(_kept(model(**inputs)), expected)
    if error <= TOLERANCE:
        return error, None
    return error, largest(expected, _run_plain(reference.wider, inputs))


def _mask_for(output: torch.Tensor, inputs: Inputs) -> torch.Tensor | None:
    """The mask of tokens that are not padding, for an output with a value for each."""
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and output.shape[: mask.ndim] == mask.shape else None


def _is_rounding(error: float, rounding: float | None) -> bool:
    return error <= TOLERANCE or (rounding is not None and error <= _ROUNDING * rounding)


def _compare(model: JaxModel, reference: _Reference, call: _Call, max_new_tokens: int) -> PromptResult:
    error, rounding = _forward_error(model, reference, call.forward)
    result = PromptResult(prompt=call.label, prompt_tokens=call.num_tokens, forward_error=error, rounding=rounding)
    if not _is_rounding(error, rounding):
        return dataclasses.replace(result, outcome="forward differs")
    if not model.can_generate() or max_new_tokens < 1:
        return result
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        plain = reference.plain.generate(**call.generate, **options)
    written = torch.as_tensor(np.asarray(model.generate(**call.generate, **options).sequences))
    rows = [_compare_row(model, reference, call, result, plain, written, row) for row in range(len(plain.sequences))]
    return max(rows, key=lambda one: _SEVERITY.index(one.outcome))


_SEVERITY = ("agrees", "tie", "text differs", "forward differs")


def _compare_row(
    model: JaxModel,
    reference: _Reference,
    call: _Call,
    result: PromptResult,
    plain: Any,
    written: torch.Tensor,
    row: int,
) -> PromptResult:
    """The result with what a row of the generated text says.

    Args:
        model: hfax's.
        reference: the reference.
        call: the inputs.
        result: that of the forward pass.
        plain: what transformers' `generate` gave.
        written: [rows, length] what hfax wrote.
        row: the row to compare.
    """
    expected, found = plain.sequences[row], written[row]
    start = len(expected) - len(plain.scores)
    result = dataclasses.replace(result, new_tokens=len(plain.scores))
    width = min(len(expected), len(found))
    parted = torch.nonzero(expected[:width] != found[:width])
    if not len(parted) and len(expected) == len(found):
        return result
    place = int(parted[0]) if len(parted) else width
    result = dataclasses.replace(result, parted_at=place - start)
    if place >= width:  # one of them stopped
        return dataclasses.replace(result, outcome="text differs")
    scores = plain.scores[place - start][row].double()
    margin = float(scores[expected[place]] - scores[found[place]]) / float(scores[torch.isfinite(scores)].abs().max())
    if not math.isfinite(margin):
        return dataclasses.replace(result, outcome="text differs")
    result = dataclasses.replace(result, margin=margin)
    error, rounding = result.forward_error, result.rounding
    if len(plain.sequences) == 1 and set(call.generate) <= {
        "input_ids",
        "attention_mask",
    }:  # the text so far, in one pass
        error, rounding = _forward_error(model, reference, _extended(call.forward, expected[None, :place]))
        if not _is_rounding(error, rounding):
            return dataclasses.replace(result, outcome="forward differs")
    is_tie = margin <= 2 * max(TOLERANCE, error, rounding or 0.0)
    return dataclasses.replace(result, outcome="tie" if is_tie else "text differs")


def _extended(forward: Inputs, text: torch.Tensor) -> Inputs:
    """The inputs of a forward pass over a prompt and what was generated so far."""
    name = "decoder_input_ids" if "decoder_input_ids" in forward else "input_ids"
    if name == "decoder_input_ids" or "attention_mask" not in forward:
        return {**forward, name: text}
    mask = forward["attention_mask"]
    return {
        **forward,
        name: text,
        "attention_mask": torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1),
    }


def relative_error(mine: Any, theirs: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """The largest difference relative to the reference's largest value; infinite if shapes or infinities differ.

    Args:
        mine: a tensor or an array.
        theirs: the reference.
        mask: [batch, length] bool, positions to compare; None: all.
    """
    mine = mine if isinstance(mine, torch.Tensor) else torch.from_numpy(np.array(mine, np.float64))
    if tuple(mine.shape) != tuple(theirs.shape):
        return float("inf")
    if mask is not None:
        mine, theirs = mine[mask], theirs[mask]
    mine, theirs = mine.double(), theirs.double()
    finite = torch.isfinite(theirs)
    if not bool((torch.isfinite(mine) == finite).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = max(float(theirs[finite].abs().max()), 1e-30)
    return float((mine - theirs)[finite].abs().max()) / scale


def _first_difference(model: JaxModel, reference: _Reference, inputs: Inputs) -> Difference | None:
    """The first differing module, in the reference's return order, and its first differing operation."""
    names = dict(reference.plain.named_modules())
    expected, wider = (_plain_outputs(plain, inputs, _part_outputs) for plain in (reference.plain, reference.wider))
    mine = _traced_outputs(model, inputs, _part_outputs)
    for part, theirs in expected.items():
        if len(mine.get(part, ())) != len(theirs):
            continue  # a patch replaces its caller
        error, rounding = _largest_error(mine[part], theirs), _largest_error(theirs, wider[part])
        if not _is_rounding(error, rounding):
            operation = _first_operation(model, reference, inputs, part)
            return Difference(
                part=part,
                part_class=type(names[part]).__name__,
                error=error,
                operation=operation and operation[0],
                operation_error=operation and operation[1],
            )
    return None


def _first_operation(model: JaxModel, reference: _Reference, inputs: Inputs, part: str) -> tuple[str, float] | None:
    collecting = functools.partial(_operation_outputs, part=part)
    expected, wider = (_plain_outputs(plain, inputs, collecting) for plain in (reference.plain, reference.wider))
    mine = _traced_outputs(model, inputs, collecting)
    for (name, theirs), (own, arrays), widest in zip(expected.items(), mine.items(), wider.values(), strict=False):
        if own != name or len(arrays) != len(theirs):
            return None
        error, rounding = _largest_error(arrays, theirs), _largest_error(theirs, widest)
        if not _is_rounding(error, rounding):
            return name.partition(" ")[2], error
    return None


def _largest_error(mine: Sequence[Any], theirs: Sequence[torch.Tensor]) -> float:
    return max((relative_error(a, b) for a, b in zip(mine, theirs, strict=True)), default=0.0)


def _plain_outputs(plain: Any, inputs: Inputs, collecting: Any) -> dict[str, list[torch.Tensor]]:
    """Outputs that `collecting` records in a torch forward pass."""
    with torch.no_grad(), collecting(plain) as found:
        plain(**{n: _as_dtype(v, plain.dtype) for n, v in inputs.items()})
    return found


def _traced_outputs(model: JaxModel, inputs: Inputs, collecting: Any) -> dict[str, list[jax.Array]]:
    """Outputs that `collecting` records in hfax's forward pass, compiled for the model's device."""
    prepared = model.parts.traced.prepare({n: to_numpy(v) for n, v in inputs.items()})
    static = {n: v for n, v in prepared.items() if isinstance(v, HostArray)}
    given = {n: v for n, v in prepared.items() if n not in static}
    order: list[str] = []

    def forward(params: Any, arrays: Any) -> dict[str, list[jax.Array]]:
        outputs: dict[str, list[jax.Array]] = {}

        def look(module: torch.nn.Module, inputs: dict[str, Any]) -> None:
            with collecting(module) as found:
                module(**inputs)
            outputs.update({name: list(map(as_array, tensors)) for name, tensors in found.items()})

        model.parts.traced.inspect(params, look, arrays, static)
        order[:] = outputs
        return outputs

    with compiling_for(model.jax_device.platform):
        found = jax.jit(forward)(model.params, given)
    return {name: found[name] for name in order}


@contextlib.contextmanager
def _part_outputs(module: torch.nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record each module's output tensors on its first call, in return order."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(part: torch.nn.Module, args: Any, output: Any) -> None:  # a return value would replace the output
            if name not in found:
                found[name] = _kept(output)

        return hook

    hooks = [part.register_forward_hook(keep(name)) for name, part in module.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _operation_outputs(module: torch.nn.Module, part: str) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record each operation's output tensors in one module, in order, by index and name ("3 torch.nn.functional.linear")."""
    found: dict[str, list[torch.Tensor]] = {}
    is_inside = False

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = resolve_name(func) or getattr(func, "__name__", str(func))
            if is_inside and not name.endswith("__get__") and (kept := _kept(out)):
                found[f"{len(found)} {name}"] = kept
            return out

    def enter(*_: Any) -> None:
        nonlocal is_inside
        is_inside = not found

    def leave(*_: Any) -> None:
        nonlocal is_inside
        is_inside = False

    target = module.get_submodule(part)
    hooks = [target.register_forward_pre_hook(enter), target.register_forward_hook(leave)]
    try:
        with Recorder():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def _kept(output: Any) -> list[torch.Tensor]:
    """Copies of a result's tensors, without caches."""
    if isinstance(output, torch.Tensor) or is_tensor(output):
        return [output.clone()]
    if isinstance(output, Mapping):
        output = [v for n, v in output.items() if n not in (*_CACHES, "loss")]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in _kept(value)]
    return []
