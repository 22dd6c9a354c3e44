"""One row of the support matrix: compares a small random model of an architecture in plain transformers and in hfax.

Turns an `Architecture` into a `CaseResult`. Random weights are saved by transformers and loaded by hfax, so conversion, tying and
buffers are tested too. Runs in its own process: architectures may crash, hang or change torch's state.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import re
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

from hfax.matrix.architectures import Architecture, small_config
from hfax.matrix.variations import Variation, apply_changes, vary_inputs
from hfax.synthetic.inputs import GENERATING, CaseInputs, make_inputs

NEW_TOKENS = 16
TOLERANCE = 1e-4
"""Relative to the outputs' scale."""
_INSTALLED = re.compile(r"/[^ ()]*/(transformers|torch|jax|hfax)/")
"""Installation path prefix of a library, removed from messages."""
_ROUNDING = 4.0
"""A difference up to this multiple of the reference's own error against float64 counts as rounding."""
_MEANINGLESS = 1e-2
"""A reference whose own error is larger is not usable."""
_UNCACHED_REFERENCES = frozenset({"blt", "rwkv"})
"""Model types whose reference runs without a cache: transformers 5.23 cannot make Blt's, and its own RWKV decoding steps mix the
rows of a batch (`hfax.patches.steps`)."""
_WITH_SCORES = {"return_dict_in_generate": True, "output_scores": True}
_PERTURBED = 1e-6
"""Relative noise of the weights of a perturbed reference: about what float32 loses in another order of sums."""
_TIE = 1e-4
"""If the reference's two best logits are closer than this, its greedy token is a tie."""

HFAX_FAILS = ("forward fails", "forward differs", "generate fails", "generate differs", "train fails", "train differs")
"""Outcomes that are hfax failures, not failures of shrinking or transformers."""
_REFUSALS = ("UnsupportedModelError", "UnsupportedOptionError", "InvalidInputError")
"""hfax errors that reject unsupported input."""


@dataclasses.dataclass(kw_only=True)
class CaseResult:
    """The result for one architecture.

    Args:
        mapping, model_type, class_name: the architecture.
        outcome: "works"; "unbuilt" (no small model); "reference fails" (plain transformers cannot run it); "forward fails",
            "forward differs", "generate fails", "generate differs", "train fails", "train differs" (hfax).
        reason: first lines of the error, or the difference; "" if it works.
        generates: whether greedy tokens were compared.
        error: largest output difference, relative to the outputs' scale.
        gradient_error: largest difference of a gradient, relative to its scale; None: training was not compared.
        torch_cannot_train: why plain transformers has no gradients that could be compared; "" if it has.
        patches: names of the applied patches.
        num_parameters: parameter count of the small model.
        decode_traces: number of traces of the decoding step in one call.
        has_plan: whether the class has its own tensor parallelism plan; None if weights were not sharded.
        split: sharded share of the weight bytes; None if weights were not sharded.
        seconds: total time.
        variation: the random variation; None: the small config with default inputs.
    """

    mapping: str
    model_type: str
    class_name: str
    outcome: str = "works"
    reason: str = ""
    generates: bool = False
    error: float = 0.0
    gradient_error: float | None = None
    torch_cannot_train: str = ""
    patches: list[str] = dataclasses.field(default_factory=list)
    num_parameters: int = 0
    decode_traces: int = 0
    has_plan: bool | None = None
    split: float | None = None
    seconds: float = 0.0
    variation: Variation | None = None

    @property
    def verdict(self) -> str:
        """The outcome; "refused" for hfax's own errors."""
        is_refused = self.outcome in HFAX_FAILS and self.reason.partition(":")[0] in _REFUSALS
        return "refused" if is_refused else self.outcome


def run_case(
    architecture: Architecture, tensor: int = 1, variation: Variation | None = None, *, trains: bool = False
) -> CaseResult:
    """Build, run and compare one architecture, with its weights split over `tensor` devices; never raises.

    Args:
        architecture: the architecture.
        tensor: number of devices.
        variation: a random variation; None: the small config.
        trains: also compare a training step.
    """
    started = time.perf_counter()
    result = CaseResult(**dataclasses.asdict(architecture), variation=variation)
    stages = [("unbuilt", _build), ("reference fails", _reload), ("unbuilt", _make_inputs)]
    stages += [("reference fails", _run_reference), ("forward fails", _compare_forward)]
    stages += [("generate fails", _compare_generate)] if architecture.mapping in GENERATING else []
    stages += [("train fails", _compare_training)] if trains else []
    with tempfile.TemporaryDirectory() as folder:
        state: dict[str, Any] = {"architecture": architecture, "result": result, "folder": folder, "tensor": tensor}
        state["variation"] = variation or Variation(new_tokens=NEW_TOKENS)
        for outcome, stage in stages:
            try:
                stage(state)
            except _DiffersError as difference:
                result.outcome, result.reason = difference.outcome, str(difference)
            except ImportError as error:  # transformers requires a library that is not installed
                result.outcome, result.reason = "reference fails", _describe(error)
            except BaseException as error:
                result.outcome, result.reason = outcome, _describe(error)
            if result.outcome != "works":
                break
    result.seconds = round(time.perf_counter() - started, 1)
    return result


class _DiffersError(Exception):
    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


def _describe(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/hfax/matrix/" not in f.filename]
    where = ""
    modelling = [f for f in frames if "/transformers/models/" in f.filename]
    if modelling:
        where = f" [{modelling[-1].filename.rpartition('/')[2]}:{modelling[-1].lineno}]"
    elif frames:
        where = f" [{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}]"
    first = _INSTALLED.sub(r"\1/", " ".join(str(error).split()))[:400]
    return f"{type(error).__name__}: {first}{where}"


def _build(state: dict[str, Any]) -> None:
    architecture: Architecture = state["architecture"]
    model_class = getattr(transformers, architecture.class_name, None)
    if model_class is None:
        raise _DiffersError("reference fails", f"transformers exports no {architecture.class_name}")
    config = small_config(architecture)
    apply_changes(config, state["variation"].changes)
    torch.manual_seed(0)
    model = model_class._from_config(config) if hasattr(model_class, "_from_config") else model_class(config)
    model = model.eval()
    if getattr(model, "generation_config", None) is not None:
        # compare architectures under plain greedy decoding
        model.generation_config = transformers.GenerationConfig(
            **{n: v for n, v in vars(model.generation_config).items() if n.endswith("_token_id") and isinstance(v, int)}
        )
        if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 0
    draw_weights(model, state["variation"].seed)
    state["result"].num_parameters = sum(p.numel() for p in model.parameters())
    state["model"] = model


def _reload(state: dict[str, Any]) -> None:
    """Reload the reference with plain transformers: some configs change when saved to config.json."""
    written = state["model"]
    written.save_pretrained(state["folder"])
    model, report = type(written).from_pretrained(state["folder"], output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise RuntimeError(f"transformers does not reload what it saved: {sorted(report['missing_keys'])[:2]}")
    model.generation_config = getattr(written, "generation_config", None)
    model.set_experts_implementation("eager")  # torch's grouped products demand rows of whole 16 bytes
    state["model"] = model.eval()


def _make_inputs(state: dict[str, Any]) -> None:
    inputs = make_inputs(state["model"], state["architecture"].mapping)
    state["inputs"] = vary_inputs(state["model"], inputs, state["variation"])


def draw_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw random weights such that every layer affects the outputs: unit gain for matrices, noise added to vectors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                not parameter.is_floating_point() or not parameter.requires_grad
            ):  # frozen tables are computed, not learned
                continue
            if sum(size > 1 for size in parameter.shape) >= 2:
                fan_in = math.prod(parameter.shape[1:]) if parameter.ndim != 3 else parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(fan_in, 1) ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def _run_reference(state: dict[str, Any]) -> None:
    inputs: CaseInputs = state["inputs"]
    model = state["model"]
    with torch.no_grad():
        state["expected"] = model(**inputs.forward)
        if state["architecture"].mapping in GENERATING and model.can_generate():
            state["result"].generates = True
            state["expected_tokens"] = _generate_plain(state, model, inputs.generate, **_WITH_SCORES)


def _generate_plain(state: dict[str, Any], model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Greedy generation with transformers' own generate."""
    fixed = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0}
    fixed["use_cache"] = state["architecture"].model_type not in _UNCACHED_REFERENCES
    with _windows_of_one():
        return model.generate(**inputs, max_new_tokens=state["variation"].new_tokens, **fixed | options)


@contextlib.contextmanager
def _windows_of_one() -> Iterator[None]:
    """Within the block, caches of sliding windows of one token keep none: transformers 5.23 keeps all, and attends to them."""
    layer = transformers.cache_utils.DynamicSlidingWindowLayer
    update = layer.update

    def keep_none(self: Any, *args: Any, **kwargs: Any) -> Any:
        visible = update(self, *args, **kwargs)
        if self.sliding_window == 1:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]
        return visible

    with unittest.mock.patch.object(layer, "update", keep_none):
        yield


def _compare_forward(state: dict[str, Any]) -> None:
    from hfax import AutoModelForTPU

    result: CaseResult = state["result"]
    inputs: CaseInputs = state["inputs"]
    parallelism = {"tensor": state["tensor"]} if state["tensor"] > 1 else None
    ours = state["ours"] = AutoModelForTPU.from_pretrained(state["folder"], parallelism=parallelism)
    if (plan := ours.sharding_plan()) is not None:
        weights = list(plan.weights.values())
        split = sum(w.num_bytes for w in weights if w.bytes_per_device(plan.mesh) < w.num_bytes)
        result.split = split / max(sum(w.num_bytes for w in weights), 1)
        result.has_plan = bool(state["model"].tp_plan)
    out = ours(**inputs.forward)
    result.error, worst = _largest_error(out, state["expected"], inputs.mask)
    result.patches = sorted(ours.patches_used)
    if not result.error <= TOLERANCE:
        with torch.no_grad(), contextlib.suppress(_DiffersError):
            in_order = with_ties_in_order(lambda: state["model"](**inputs.forward))
            result.error = min(result.error, _largest_error(out, in_order, inputs.mask)[0])
    if not result.error <= TOLERANCE:
        noise = _noise(state)
        if not result.error <= _ROUNDING * noise:
            raise _DiffersError("forward differs", f"{worst}: {result.error:.2e} of its scale")
        if noise > _MEANINGLESS:
            raise _DiffersError(
                "reference fails", f"its own outputs vary by {noise:.1e} of their scale (random sampling or rounding)"
            )


def _compare_training(state: dict[str, Any]) -> None:
    from hfax.matrix.training import gradient_error, gradient_noise, torch_gradients

    result: CaseResult = state["result"]
    model, inputs = state["model"], state["inputs"]
    try:
        expected = torch_gradients(model, inputs)
    except Exception as error:
        result.torch_cannot_train = _describe(error)
        return
    result.gradient_error, worst = gradient_error(state["ours"], expected, inputs)
    if not result.gradient_error <= TOLERANCE:
        others = [_perturbed(model, seed) for seed in range(3)]
        noise = gradient_noise(model, others, inputs)
        with contextlib.suppress(RuntimeError):  # some models force float32 internally
            noise = max(noise, gradient_noise(model, [copy.deepcopy(model).double()], inputs))
        if not result.gradient_error <= _ROUNDING * noise:
            raise _DiffersError("train differs", f"gradient of {worst}: {result.gradient_error:.2e} of its scale")
        if noise > _MEANINGLESS:
            result.gradient_error = None
            result.torch_cannot_train = f"its own gradients vary by {noise:.1e} of their scale (rounding)"


def _largest_error(mine: Any, theirs: Any, mask: torch.Tensor | None) -> tuple[float, str]:
    """The largest relative error of two results' tensors, and the name of that output."""
    largest, worst = -1.0, ""
    for name, own, other in _pairs(mine, theirs, ""):
        error = _relative_error(own, other, mask)
        if not error <= largest:
            largest, worst = error, name
    if largest < 0:
        raise _DiffersError("forward differs", "no outputs to compare")
    return largest, worst


def _noise(state: dict[str, Any]) -> float:
    """How much the reference's outputs vary with another seed, perturbed weights and in float64, relative to their scale."""
    model, inputs = state["model"], state["inputs"]
    others = []
    with torch.no_grad():
        torch.manual_seed(1)
        others.append(model(**inputs.forward))
        others += [_perturbed(model, seed)(**inputs.forward) for seed in range(3)]
        double = copy.deepcopy(model).double()
        with contextlib.suppress(RuntimeError):  # some models force float32 internally
            others.append(double(**{n: _as_double(v) for n, v in inputs.forward.items()}))
    return max(_largest_error(other, state["expected"], inputs.mask)[0] for other in others)


def _perturbed(model: torch.nn.Module, seed: int) -> Any:
    """A copy with noise in its weights, to tell choices between almost equal scores (of experts, of keys) from errors."""
    noisy, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in noisy.parameters():
        if parameter.is_floating_point():
            parameter.data *= 1 + _PERTURBED * torch.randn(parameter.shape, generator=generator)
    return noisy


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _pairs(mine: Any, theirs: Any, name: str) -> Any:
    """Names and corresponding tensors of two results, without caches and the loss."""
    if isinstance(theirs, torch.Tensor):
        yield name, mine, theirs
    elif isinstance(theirs, dict) or hasattr(theirs, "items"):
        for key, value in theirs.items():
            if key in ("cache", "past_key_values", "mems", "state", "loss"):
                continue
            yield from _pairs(
                mine[key] if isinstance(mine, dict) or hasattr(mine, "items") else None, value, f"{name}.{key}"
            )
    elif isinstance(theirs, (list, tuple)):
        for index, value in enumerate(theirs):
            yield from _pairs(mine[index], value, f"{name}[{index}]")


def _relative_error(mine: Any, theirs: torch.Tensor, mask: torch.Tensor | None) -> float:
    if not isinstance(mine, torch.Tensor):
        mine = torch.from_numpy(np.array(mine))
    if mine.is_floating_point() and not theirs.is_floating_point():
        mine = mine.to(theirs.dtype)
    if tuple(mine.shape) != tuple(theirs.shape):
        raise _DiffersError("forward differs", f"shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}")
    if mask is not None and theirs.ndim >= 2 and theirs.shape[:2] == mask.shape:
        mine, theirs = mine[mask], theirs[mask]
    if theirs.numel() == 0:
        return 0.0
    if not theirs.is_floating_point():
        return float((mine != theirs).float().mean())
    mine, theirs = mine.double(), theirs.double()
    finite = torch.isfinite(theirs)
    if not bool((torch.isfinite(mine) == finite).all()):
        return math.inf
    if not bool(finite.any()):
        raise _DiffersError("reference fails", "its own outputs are not finite")
    scale = float(theirs[finite].abs().max())
    return float((mine - theirs)[finite].abs().max()) / max(scale, 1e-6)


def _compare_generate(state: dict[str, Any]) -> None:
    result: CaseResult = state["result"]
    if not result.generates:
        return
    from hfax import phases

    ours, inputs = state["ours"], state["inputs"]
    ours.generation_config.eos_token_id = None
    ours.generation_config.pad_token_id = 0
    traces: list[str] = []
    with phases.listen(
        lambda event: traces.append(event.detail) if event.name == "trace" and event.seconds is not None else None
    ):
        tokens = ours.generate(
            **inputs.generate,
            max_new_tokens=state["variation"].new_tokens,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
        ).sequences
    result.decode_traces = sum(1 for t in traces if "decode" in t)
    result.patches = sorted(set(result.patches) | set(ours.patches_used))
    expected = state["expected_tokens"]
    reference = expected.sequences
    width = min(tokens.shape[1], reference.shape[1])
    if tokens.shape[0] != reference.shape[0] or tokens.shape[1] != reference.shape[1]:
        raise _DiffersError("generate differs", f"shape {tuple(tokens.shape)}, expected {tuple(reference.shape)}")
    start = reference.shape[1] - len(expected.scores)
    for row in range(reference.shape[0]):
        for column in range(width):
            if int(tokens[row, column]) != int(reference[row, column]):
                best = expected.scores[max(column - start, 0)][row].topk(2).values
                if float(best[0] - best[1]) < _TIE * float(best[0].abs() + 1) or _says_nothing(state, row, column):
                    break  # a tie in the reference: everything after it may differ
                raise _DiffersError(
                    "generate differs",
                    f"row {row}, new token {column - start}: {int(tokens[row, column])}, expected "
                    f"{int(reference[row, column])} (margin {float(best[0] - best[1]):.1e})",
                )


def _says_nothing(state: dict[str, Any], row: int, column: int) -> bool:
    """Whether the reference's tokens or scores in a row are unstable up to this column.

    It is rerun in float64 (rounding), with perturbed weights, without a cache, and with `torch.topk` ties broken by index, since
    torch leaves their order undefined (in Doge's first layer, equal tokens tie as keys).
    """
    expected = state["expected_tokens"]
    start = expected.sequences.shape[1] - len(expected.scores)
    if "other_tokens" not in state:
        model, inputs = state["model"], state["inputs"].generate
        in_double = {n: _as_double(v) for n, v in inputs.items()}
        state["other_tokens"] = []
        for make in (
            lambda: _generate_plain(state, copy.deepcopy(model).double(), in_double, **_WITH_SCORES),
            *(
                functools.partial(_generate_plain, state, _perturbed(model, seed), inputs, **_WITH_SCORES)
                for seed in range(3)
            ),
            lambda: _generate_plain(state, model, inputs, use_cache=False, **_WITH_SCORES),
            lambda: with_ties_in_order(lambda: _generate_plain(state, model, inputs, **_WITH_SCORES)),
        ):
            with contextlib.suppress(Exception), torch.no_grad():  # the model may not run in float64 or without a cache
                state["other_tokens"].append(make())
    for other in state["other_tokens"]:
        if not torch.equal(other.sequences[row, : column + 1], expected.sequences[row, : column + 1]):
            return True
        pairs = zip(other.scores[: column - start + 1], expected.scores, strict=False)
        if any(_relative_error(mine[row], theirs[row], None) > _MEANINGLESS / 10 for mine, theirs in pairs):
            return True
    return False


def with_ties_in_order(run: Any) -> Any:
    """Call `run` with `torch.topk` breaking ties by index."""

    def topk(values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        found = values.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)))

    with unittest.mock.patch.object(torch, "topk", topk), unittest.mock.patch.object(torch.Tensor, "topk", topk):
        return run()


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


def first_line(reason: str) -> str:
    """A reason shortened to fit into a table."""
    return re.sub(r"\s+", " ", reason)[:160]
