"""A checkpoint beside plain transformers on this machine: the same numbers and the same text, or where they part.

Turns a loaded model and prompts into a `Verification`. The reference is transformers' own class with the same weights and dtype,
run by torch on the CPU. Where the two differ by more than rounding, both run again with what every part of the model returns, and
then with what every operation of the first differing part returns.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode, resolve_name

from hfax.backends.jax.model import JaxModel
from hfax.errors import UnsupportedModelError
from hfax.kernels.target import compiling_for
from hfax.tracing.geometry import HostArray
from hfax.tracing.torchax import as_array, is_tensor

TOLERANCE = 1e-4
"""Of an output's largest value: float32 sums in another order."""
_ROUNDING = 4.0
"""A difference of so many times the reference's own from the next wider dtype is rounding."""
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_CACHES = ("past_key_values", "cache_params", "mems", "state")

Inputs = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What came of one prompt.

    Args:
        prompt: its text.
        prompt_tokens: how long it is.
        forward_error: largest difference of the logits, over their largest value.
        rounding: the same of the reference in its own dtype from the next wider one; None where `forward_error` is within
            the tolerance and it was not looked for.
        new_tokens: how many tokens were written by the reference.
        parted_at: the first new token that differs, from 0; None if all are the same.
        margin: how far apart the reference's logits of the two tokens are there, over its largest logit.
        outcome: "agrees"; "tie" (the text parts where the reference's two best tokens are as near as rounding); "forward
            differs"; "text differs" (though a forward pass over the same text agrees: caches, masks or positions).
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
        part: name of the module in the model, "" for the model itself; the first to return something else.
        part_class: of that module.
        error: largest difference of what it returns, over its largest value.
        operation: the first torch operation in it whose result differs; None if hfax runs other operations there (a patch).
        operation_error: of that operation's result.
    """

    part: str
    part_class: str
    error: float
    operation: str | None
    operation_error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What a comparison with plain transformers found.

    Args:
        class_name: of the model.
        dtype: of the weights and the computation, on both sides.
        agrees: no prompt's outcome is a difference.
        prompts: one result a prompt.
        padded_error: largest difference of the logits where all prompts are one batch with padding on the left, over their largest
            value; None for one prompt, and for models that are not run so.
        difference: where the first forward pass that differs does so; None if none does.
        patches: names of the patches that ran.
        versions: of the libraries.
    """

    class_name: str
    dtype: str
    agrees: bool
    prompts: tuple[PromptResult, ...]
    padded_error: float | None
    difference: Difference | None
    patches: tuple[str, ...]
    versions: dict[str, str]


def verify(model: JaxModel, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 32) -> Verification:
    """Run a model beside plain transformers, forward and greedily.

    Args:
        model: the model, with the weights of a folder; without quantization, a mesh or adapters.
        tokenizer: the checkpoint's.
        prompts: texts, one at least.
        max_new_tokens: greedy tokens for each, where the model generates.

    Returns:
        What was found. A model that differs is a result, not an error.

    Raises:
        UnsupportedModelError: the model reads no text, or plain transformers cannot run it.
    """
    if model.quantization is not None or model.mesh is not None or model.folder is None:
        raise UnsupportedModelError(
            "Only a checkpoint as it is, on one device, can be verified.",
            "Plain transformers has nothing to compare quantized or split weights with.",
            "Load the model without quantization and parallelism.",
        )
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{type(model.module).__name__} cannot be verified with prompts.",
            f"It reads {model.main_input_name}, not text.",
            "hfax doctor MODEL --check runs a small copy of any model beside plain transformers.",
        )
    reference = _Reference(model)
    encoded = [_encode(tokenizer, reference.plain, prompt) for prompt in prompts]
    results = []
    first: Inputs | None = None
    for prompt, inputs in zip(prompts, encoded, strict=True):
        result = _compare(model, reference, prompt, inputs, max_new_tokens)
        results.append(result)
        if result.outcome == "forward differs" and first is None:
            first = inputs
    padded_error = None
    if len(prompts) > 1 and model.can_generate() and not reference.plain.config.is_encoder_decoder:
        batch = _left_padded(encoded)
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
        difference=None if first is None else _first_difference(model, reference, first),
        patches=tuple(sorted(model.patches_used)),
        versions={"transformers": transformers.__version__, "torch": torch.__version__, "jax": jax.__version__},
    )


class _Reference:
    """Plain transformers' model, and a copy in the next wider dtype once it is asked for."""

    def __init__(self, model: JaxModel) -> None:
        cls: Any = type(model.module)
        try:
            self.plain = cls.from_pretrained(model.folder, dtype=model.dtype).eval()
        except Exception as error:
            raise UnsupportedModelError(
                f"Plain transformers does not load {cls.__name__} from {model.folder}.",
                f"{type(error).__name__}: {error}",
                "There is nothing to compare with; hfax doctor MODEL --check compares a small copy.",
            ) from error
        self.plain.generation_config = model.generation_config

    @functools.cached_property
    def wider(self) -> torch.nn.Module:
        """The same weights in the next wider dtype."""
        return copy.deepcopy(self.plain).to(_WIDER[self.plain.dtype])


def _encode(tokenizer: Any, plain: Any, prompt: str) -> Inputs:
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    inputs = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
    if plain.config.is_encoder_decoder:
        start = plain.generation_config.decoder_start_token_id
        inputs["decoder_input_ids"] = torch.full(
            (1, 1), plain.generation_config.bos_token_id if start is None else start
        )
    return inputs


def _left_padded(rows: Sequence[Inputs]) -> Inputs:
    """Prompts of several lengths as one batch."""
    width = max(row["input_ids"].shape[1] for row in rows)
    pads = [width - row["input_ids"].shape[1] for row in rows]
    ids = [torch.nn.functional.pad(row["input_ids"], (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    mask = torch.stack([(torch.arange(width) >= pad).long() for pad in pads])
    return {"input_ids": torch.cat(ids), "attention_mask": mask}


def _main_output(outputs: Any) -> torch.Tensor:
    return next(v for n, v in outputs.items() if isinstance(v, torch.Tensor) and n not in (*_CACHES, "loss"))


def _positions(plain: Any, inputs: Inputs) -> Inputs:
    """Positions among the real tokens, which plain forward passes do not count themselves."""
    if "position_ids" not in inspect.signature(plain.forward).parameters or plain.config.is_encoder_decoder:
        return inputs
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return inputs
    return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _run_plain(plain: Any, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return _main_output(plain(**inputs))


def _forward_error(model: JaxModel, reference: _Reference, inputs: Inputs) -> tuple[float, float | None]:
    """Of the main output over real tokens: hfax's difference, and the reference's own where the first is not small."""
    inputs = _positions(reference.plain, inputs)
    expected = _run_plain(reference.plain, inputs)
    mask = (
        inputs["attention_mask"].bool()
        if expected.shape[:2] == inputs.get("attention_mask", expected[0]).shape
        else None
    )
    error = relative_error(_main_output(model(**inputs)), expected, mask)
    if error <= TOLERANCE:
        return error, None
    return error, relative_error(expected, _run_plain(reference.wider, inputs), mask)


def _is_rounding(error: float, rounding: float | None) -> bool:
    return error <= TOLERANCE or (rounding is not None and error <= _ROUNDING * rounding)


def _compare(model: JaxModel, reference: _Reference, prompt: str, inputs: Inputs, max_new_tokens: int) -> PromptResult:
    error, rounding = _forward_error(model, reference, inputs)
    result = PromptResult(
        prompt=prompt, prompt_tokens=inputs["input_ids"].shape[1], forward_error=error, rounding=rounding
    )
    if not _is_rounding(error, rounding):
        return dataclasses.replace(result, outcome="forward differs")
    if not model.can_generate() or max_new_tokens < 1:
        return result
    given = {n: v for n, v in inputs.items() if n != "decoder_input_ids"}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        expected = reference.plain.generate(**given, **options)[0]
    written = torch.as_tensor(np.asarray(model.generate(**given, **options))[0])
    start = 1 if "decoder_input_ids" in inputs else inputs["input_ids"].shape[1]
    result = dataclasses.replace(result, new_tokens=len(expected) - start)
    width = min(len(expected), len(written))
    parted = torch.nonzero(expected[:width] != written[:width])
    if not len(parted) and len(expected) == len(written):
        return result
    place = int(parted[0]) if len(parted) else width
    if place >= width:  # one of them stopped
        return dataclasses.replace(result, parted_at=place - start, outcome="text differs")
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    so_far: dict[str, torch.Tensor] = {**inputs, name: expected[None, :place]}
    if name == "input_ids" and "attention_mask" in inputs:
        so_far["attention_mask"] = torch.ones(1, place, dtype=torch.long)
    logits = _run_plain(reference.plain, so_far)[0, -1].double()
    scale = float(logits.abs().max())
    margin = float(logits[expected[place]] - logits[written[place]]) / scale
    error, rounding = _forward_error(model, reference, so_far)
    if not _is_rounding(error, rounding):
        return dataclasses.replace(result, parted_at=place - start, margin=margin, outcome="forward differs")
    is_tie = margin <= 2 * max(TOLERANCE, error, rounding or 0.0)
    return dataclasses.replace(
        result, parted_at=place - start, margin=margin, outcome="tie" if is_tie else "text differs"
    )


def relative_error(mine: Any, theirs: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """The largest difference over the largest value of the reference; infinite where shapes or infinities differ.

    Args:
        mine: a tensor or an array.
        theirs: the reference.
        mask: [batch, length] bool, the positions that count; None: all.
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
    """The first part, by the order in which the reference's parts return, and the first operation in it."""
    inputs = _positions(reference.plain, inputs)

    names = dict(reference.plain.named_modules())
    expected, wider = (_plain_outputs(plain, inputs, _part_outputs) for plain in (reference.plain, reference.wider))
    mine = _traced_outputs(model, inputs, _part_outputs)
    for part, theirs in expected.items():
        if len(mine.get(part, ())) != len(theirs):
            continue  # a patch stands for what calls it
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
    """What `collecting` finds in a forward pass of torch."""
    with torch.no_grad(), collecting(plain) as found:
        plain(**inputs)
    return found


def _traced_outputs(model: JaxModel, inputs: Inputs, collecting: Any) -> dict[str, list[jax.Array]]:
    """What `collecting` finds in hfax's forward pass, compiled for the device of the model."""
    prepared = model.parts.traced.prepare({n: v.numpy().astype(np.int32) for n, v in inputs.items()})
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
    """The tensors that each part returns when it is first called, in the order in which the calls end."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(part: torch.nn.Module, args: Any, output: Any) -> None:  # a result would stand for the output
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
    """The tensors that each operation in one part returns, in order, by number and name ("3 torch.nn.functional.linear")."""
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
    """The tensors of a result, as they are now; those of caches are left out."""
    if isinstance(output, torch.Tensor) or is_tensor(output):
        return [output.clone()]
    if isinstance(output, Mapping):
        output = [v for n, v in output.items() if n not in _CACHES]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in _kept(value)]
    return []
