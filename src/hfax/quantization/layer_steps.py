"""A decoder's layers, one at a time: their outputs, and the moments of what their linear modules read.

Runs the model's own forward with all layers but one passing their hidden states through, so that the layer gets the masks, rotary
angles and other arguments that its model makes for it. XLA drops what is not needed: a program reads the weights of its layer and
those outside of the layers. It does not know how weights are quantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from hfax.errors import UnsupportedModelError
from hfax.kernels.target import compiling_for
from hfax.patches.patch import forwards_replaced
from hfax.tracing.torchax import unwrap, wrap
from hfax.tracing.traced_model import TracedModel

Weights = Mapping[str, Any]
"""By name: those of the layer that runs, and those outside of the layers."""
_HIDDEN = "hidden_states"


class LayerSteps:
    """The layers of a decoder as functions.

    Args:
        traced: the model.
        device: that runs them.

    Raises:
        UnsupportedModelError: the model is no decoder with a list of layers.
    """

    def __init__(self, traced: TracedModel, device: jax.Device) -> None:
        self._traced, self._device = traced, device
        self.layers = _find_layers(traced.module, is_decoder=not traced.traits.is_encoder_decoder)
        """Modules by name, in order."""
        self._length: int | None = None
        """Of the tuple that a layer returns; None: it returns a tensor, as far as is known."""
        self._layer_calls: dict[tuple[str, str], Callable[..., Any]] = {}
        self._programs: dict[str, Any] = {}
        """Compiled, by their text: layers of one structure share theirs."""
        self._loss_program = self._compiled(self._loss)

    def layer_of(self, weight: str) -> str | None:
        """The name of the layer that a weight belongs to; None: it is outside of them."""
        return next((name for name in self.layers if weight.startswith(f"{name}.")), None)

    def run(self, name: str, weights: Weights, ids: jax.Array, hidden: jax.Array | None) -> jax.Array:
        """A layer's output, [batch, length, width].

        Args:
            name: of the layer.
            weights: of the program.
            ids: [batch, length] int32, texts without padding.
            hidden: [batch, length, width], the layer's input; None for the first layer.

        Raises:
            UnsupportedModelError: the model computes something between its layers.
        """
        return self._of_layer(name, self._running)(weights, ids, hidden)

    def observe(
        self, name: str, weights: Weights, ids: jax.Array, hidden: jax.Array | None
    ) -> dict[tuple[str, ...], jax.Array]:
        """The moments of what a layer's linear modules read.

        Args:
            name: of the layer.
            weights: of the program.
            ids: as in `run`.
            hidden: as in `run`.

        Returns:
            By the names of the modules that read the same input: its sum over tokens of outer products, [in, in] float32. Of
            experts behind transformers' experts interface, by the names of their weights: the first matrices' inputs are those of
            all tokens, whichever experts these chose; the last matrices' are each expert's own, [experts, in, in].

        Raises:
            UnsupportedModelError: the model computes something between its layers.
        """
        return self._of_layer(name, self._observing)(weights, ids, hidden)

    def losses(self, weights: Weights, ids: jax.Array, hidden: jax.Array) -> jax.Array:
        """The negative log-likelihood of every token but the first, from the last layer's output, as [batch, length - 1] float32.

        Args:
            weights: those outside of the layers.
            ids: [batch, length] int32.
            hidden: [batch, length, width].
        """
        return self._loss_program(weights, ids, hidden)

    def _loss(self, weights: Weights, ids: jax.Array, hidden: jax.Array) -> jax.Array:
        last = [*self.layers][-1]
        logits = self._forward(weights, ids, last, lambda *_: wrap(hidden)).logits
        log_probs = jax.nn.log_softmax(unwrap(logits)[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]

    def _of_layer(self, name: str, make: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
        """A compiled function of a layer. Those of other layers are dropped: each layer is passed once."""
        self._layer_calls = {key: call for key, call in self._layer_calls.items() if key[0] == name}
        key = (name, make.__name__)
        if key not in self._layer_calls:
            self._layer_calls[key] = self._compiled(make(name))
        return self._layer_calls[key]

    def _running(self, name: str) -> Callable[..., jax.Array]:
        def compute(weights: Weights, ids: jax.Array, hidden: jax.Array | None) -> jax.Array:
            found: list[jax.Array] = []

            def layer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                found.append(unwrap(self._call(forward, args, kwargs, hidden)))

            self._forward(weights, ids, name, layer)
            return found[0]

        return compute

    def _observing(self, name: str) -> Callable[..., dict[tuple[str, ...], jax.Array]]:
        def compute(weights: Weights, ids: jax.Array, hidden: jax.Array | None) -> dict[tuple[str, ...], jax.Array]:
            inputs: dict[int, torch.Tensor] = {}
            read_by: dict[str, tuple[int, ...]] = {}

            def noting(part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
                def run(given: torch.Tensor) -> Any:
                    inputs[id(given)] = given
                    read_by[part] = (*read_by.get(part, ()), id(given))
                    return forward(given)

                return run

            of_experts: dict[str, jax.Array] = {}

            def noting_experts(part: str, module: Any) -> Callable[..., Any]:
                forward = module.forward

                def run(given: torch.Tensor, chosen: torch.Tensor, *rest: Any) -> Any:
                    of_experts[f"{name}.{part}.gate_up_proj"] = _moment(given)
                    with _gate_replaced(module) as gated:
                        out = forward(given, chosen, *rest)
                    of_experts[f"{name}.{part}.down_proj"] = _moments_of_experts(
                        gated[0], chosen, len(module.down_proj)
                    )
                    return out

                return run

            def layer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                parts = list(self.layers[name].named_modules())
                new = [(m, noting(part, m.forward)) for part, m in parts if isinstance(m, torch.nn.Linear)]
                new += [(m, noting_experts(part, m)) for part, m in parts if has_observed_experts(m)]
                with forwards_replaced(new):
                    self._call(forward, args, kwargs, hidden)

            self._forward(weights, ids, name, layer)
            readers: dict[tuple[int, ...], list[str]] = {}
            for part, read in read_by.items():
                readers.setdefault(read, []).append(f"{name}.{part}")
            found: Any = {tuple(parts): sum(_moment(inputs[i]) for i in read) for read, parts in readers.items()}
            return found | {(weight,): moment for weight, moment in of_experts.items()}

        return compute

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        programs: dict[Any, tuple[Any, Any]] = {}

        def call(*arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            form = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if form not in programs:
                of_result: list[Any] = []

                def flat(*leaves: jax.Array) -> list[jax.Array]:  # without the names of a layer's weights
                    out, tree = jax.tree.flatten(function(*structure.unflatten(leaves)))
                    of_result.append(tree)
                    return out

                with compiling_for(self._device):
                    lowered = jax.jit(flat, keep_unused=True).lower(*leaves)
                    text = lowered.as_text()
                    if text not in self._programs:
                        self._programs[text] = lowered.compile()
                programs[form] = self._programs[text], of_result[-1]
            program, tree = programs[form]
            return tree.unflatten(program(*leaves))

        return call

    def _forward(self, weights: Weights, ids: jax.Array, name: str, run: Callable[..., Any]) -> Any:
        """The model's outputs, where the layers pass their inputs through.

        Args:
            weights: of the program.
            ids: [batch, length] int32.
            name: of a layer.
            run: is called with that layer's forward, and its arguments; if it returns a tensor, this is the layer's output.
        """
        outputs: list[Any] = []
        before: list[Any] = []

        def passing(part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def pass_on(*args: Any, **kwargs: Any) -> Any:
                given = args[0] if args else kwargs[_HIDDEN]
                if before and given is not before[-1]:
                    raise self._unlike_a_stack()
                found = run(forward, args, kwargs) if part == name else None
                before.append(given if found is None else found)
                return before[-1] if self._length is None else (before[-1], *[None] * (self._length - 1))

            return pass_on

        def look(module: torch.nn.Module, inputs: dict[str, Any]) -> None:
            before.clear()
            with forwards_replaced((layer, passing(part, layer.forward)) for part, layer in self.layers.items()):
                outputs.append(module(**inputs))

        try:
            self._traced.inspect(weights, look, {"input_ids": ids}, {"use_cache": False})
        except _LearnedLength:  # the layers before did not return what this one does
            self._traced.inspect(weights, look, {"input_ids": ids}, {"use_cache": False})
        return outputs[-1]

    def _call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hidden: jax.Array | None
    ) -> torch.Tensor:
        """A layer's hidden states, for other ones than those that it was given."""
        if hidden is not None:
            args, kwargs = (wrap(hidden), *args[1:]), {n: v for n, v in kwargs.items() if n != _HIDDEN}
        found = forward(*args, **kwargs)
        length = len(found) if isinstance(found, tuple) else None
        if length != self._length:
            self._length = length
            raise _LearnedLength
        return found[0] if isinstance(found, tuple) else found

    def _unlike_a_stack(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self._traced.module).__name__} cannot be quantized layer by layer.",
            "It computes something between its layers, or a layer reads more than the one before it wrote.",
            'Load it with quantization="int4", which needs no calibration data, and save_pretrained it.',
        )


def has_observed_experts(module: Any) -> bool:
    """Whether the module has experts whose inputs are observed: gated ones, [experts, out, in]."""
    return getattr(module, "is_transposed", None) is False and bool(getattr(module, "has_gate", False))


@contextlib.contextmanager
def _gate_replaced(module: Any) -> Iterator[list[jax.Array]]:
    """Within the block, what the gate of experts gives is noted: the inputs of their last matrices."""
    gate, found = module._apply_gate, []

    def noting(given: torch.Tensor) -> torch.Tensor:
        out = gate(given)
        found.append(unwrap(out))
        return out

    module._apply_gate = noting
    try:
        yield found
    finally:
        del module._apply_gate


def _moments_of_experts(rows: jax.Array, chosen: torch.Tensor, num_experts: int) -> jax.Array:
    """The moment of each expert's rows, [experts, in, in].

    Args:
        rows: [tokens · k, in].
        chosen: [tokens, k], the expert of each row.
        num_experts: how many there are.
    """
    expert = unwrap(chosen).reshape(-1, 1)
    return jax.lax.map(lambda number: _outer(jnp.where(expert == number, rows, 0)), jnp.arange(num_experts))


def _moment(given: torch.Tensor) -> jax.Array:
    rows = unwrap(given)
    return _outer(rows.reshape(-1, rows.shape[-1]))


def _outer(rows: jax.Array) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.matmul(rows.T, rows, precision=exact, preferred_element_type=jnp.float32)


class _LearnedLength(BaseException):
    """A layer returns a tuple of a length that was not known; the trace begins again."""


def _find_layers(module: Any, *, is_decoder: bool) -> dict[str, torch.nn.Module]:
    """The longest list of layers of the decoder."""
    decoder = module.get_decoder() if is_decoder else None
    lists = [
        part
        for part in (decoder.modules() if isinstance(decoder, torch.nn.Module) else ())
        if isinstance(part, torch.nn.ModuleList) and all(isinstance(m, GradientCheckpointingLayer) for m in part)
    ]
    longest = max(lists, key=len, default=())
    if not len(longest):
        raise UnsupportedModelError(
            f"{type(module).__name__} is no decoder with a list of layers.",
            "Calibration goes through a decoder's layers, one after the other.",
            'Load it with quantization="int4" or "int8", which need no calibration data.',
        )
    return {name: part for name, part in module.named_modules() if any(part is layer for layer in longest)}
