"""One step of training as a pure, compiled, donated function.

Turns a model and an optax optimizer into `(state, batch) -> (state, metrics)`. What is trained is held in float32 beside the
model's own weights, which stay what they are; gradients and the optimizer's state lie over the mesh as the weights do. Where
batches come from, and how often anything is saved, is not known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, OutOfMemoryError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.kernels.target import compiling_for
from hfax.lora.adapters import trained_names
from hfax.phases import phase
from hfax.sharding.mesh import batch_axes
from hfax.tracing.adapters import SCALING
from hfax.tracing.structure import flatten, is_array, unflatten
from hfax.train.losses import Apply, Loss, count_of_labels, models_own_loss
from hfax.train.updates import apply_optimizer

Params = dict[str, jax.Array]
Trainable = Callable[[str], bool] | Iterable[str] | None
Metrics = dict[str, jax.Array]


_CPU_OPTIONS: dict[str, str | bool] = {"xla_disable_hlo_passes": "optimization-barrier-expander,cse_barrier_expander"}
"""XLA's CPU compiler otherwise removes barriers early. Without those of `jax.checkpoint` it computes all layers again at once: a
third more operations, and no less memory (docs/performance.md); without those of `hfax.train.updates` it copies the optimizer's
state."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a step changes.

    Args:
        step: steps taken, int32.
        params: the trained weights, in the master dtype, by name.
        opt_state: the optimizer's.
        key: of the steps to come, raw PRNG key data.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array


class TrainStep:
    """See `make_train_step`. Calling it takes one step.

    Attributes:
        trainable: names of the weights that it changes.
    """

    def __init__(
        self,
        model: JaxModel,
        optimizer: optax.GradientTransformation,
        loss: Loss | None = None,
        *,
        trainable: Trainable = None,
        gradient_accumulation_steps: int = 1,
        remat: bool = False,
        dropout: bool = True,
        master_dtype: Any = jnp.float32,
    ) -> None:
        if gradient_accumulation_steps < 1:
            raise InvalidInputError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}.",
                "A step has a part at least.",
                "Pass a positive number.",
            )
        self.model = model
        self.trainable = choose_trainable(model.params, trainable)
        self._optimizer = optimizer
        self._loss = loss or models_own_loss
        self._counts = count_of_labels(model) if loss is None else None
        self._parts = gradient_accumulation_steps
        self._remat, self._dropout = remat, dropout
        self._master = jnp.dtype(master_dtype)
        self._dtypes = {name: model.params[name].dtype for name in self.trainable}
        self._split = {name: model.params[name].sharding for name in self.trainable}
        self._programs: dict[Any, Any] = {}
        self._layout = model.parts.layout

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """The state before the first step.

        Args:
            seed: of dropout.
            copy: False: weights that are in the master dtype already are taken, not copied; steps then take their memory, and the
                model itself must not be used until `update_model`.

        Raises:
            OutOfMemoryError: it does not fit the device.
        """
        shardings = self._state_shardings()

        def make(weights: Params) -> TrainState:
            params = {name: array.astype(self._master) for name, array in weights.items()}
            params = jax.tree.map(jnp.copy, params) if copy else params  # the model's own must outlive the state
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=self._optimizer.init(params),
                key=jax.random.key_data(jax.random.key(seed)),
            )

        weights = {name: self.model.params[name] for name in self.trainable}
        with _explaining("the state of training"):
            return jax.jit(make, out_shardings=shardings, donate_argnums=() if copy else (0,))(weights)

    def __call__(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """Take a step.

        Args:
            state: from `init` or the step before; its memory is given to the new one.
            batch: the model's inputs by name, with labels; numpy, torch or jax arrays, of a multiple of
                `gradient_accumulation_steps` rows.

        Returns:
            The new state, and scalars: "loss", "grad_norm" and "is_finite" (where it is False, the weights and the optimizer's
            state stayed as they were), and what the loss function adds. They are not waited for.

        Raises:
            InvalidInputError: the rows do not divide.
            OutOfMemoryError: the step does not fit the device.
        """
        arrays, structure = self._place(batch)
        with _explaining("a step of training"):
            return self._program(structure, state, arrays)(state, self._frozen(), arrays)

    def compile(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """The compiled step for batches shaped as this one: its memory analysis and its text.

        Args:
            state: of `init`, or what `jax.eval_shape` and shardings say of it.
            batch: as a step takes it.
        """
        arrays, structure = self._place(batch)
        return self._program(structure, state, arrays)

    def evaluate(self, params: Params, batch: Mapping[str, Any]) -> Metrics:
        """The loss of a batch without dropout, and "weight": how many labels it is the mean of.

        Args:
            params: a state's, or the model's own.
            batch: as a step takes it.
        """
        return self.compute(self._measure, params, batch)

    def compute(
        self, function: Callable[[Apply, Mapping[str, Any]], Any], params: Params, batch: Mapping[str, Any]
    ) -> Any:
        """What a function of the model gives for a batch, without dropout: the outputs that a loss compares with, say.

        The model computes here as it does in a step. In half precision a program of `model.apply` alone rounds elsewhere, so
        that a model would differ from itself.

        Args:
            function: takes `apply` and the batch, as a loss does, and gives arrays in any structure. It is compiled once for
                each shape of a batch.
            params: a state's, or the model's own.
            batch: as a step takes it.
        """
        params = {name: params[name] for name in self.trainable}
        arrays, structure = self._place(batch, parts=1)
        key = (function, f"{structure!r} {_shapes([*params.values(), *arrays])}")
        if key not in self._programs:

            def run(params: Params, frozen: Params, arrays: list[Any]) -> Any:
                apply = self._apply(params, frozen, None)
                return function(apply, unflatten(structure, [a[0] for a in arrays]))

            self._programs[key] = self._compiled("evaluate", jax.jit(run), params, self._frozen(), arrays)
        with _explaining("a batch without gradients"):
            return self._programs[key](params, self._frozen(), arrays)

    def update_model(self, state: TrainState) -> None:
        """Give the model the state's weights, in the model's own dtypes. They are copies."""
        copied = lambda params: {n: jnp.copy(a.astype(self._dtypes[n])) for n, a in params.items()}  # noqa: E731
        cast = jax.jit(copied, out_shardings=self._split)
        self.model.params = {**self.model.params, **cast(state.params)}

    def described_state(self) -> TrainState:
        """What stands for a state: shapes, dtypes and how it is split, without arrays."""
        shardings = self._state_shardings()
        shapes = self._state_shapes()
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)

    # The step

    def _step(self, structure: Any, state: TrainState, frozen: Params, arrays: list[Any]) -> tuple[TrainState, Metrics]:
        key = jax.random.wrap_key_data(state.key)
        own, following = jax.random.split(key)
        grads, metrics = self._gradients(structure, state.params, frozen, own, arrays)
        norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        params, opt_state = apply_optimizer(self._optimizer, grads, state.opt_state, state.params, is_finite)
        new = TrainState(step=state.step + 1, params=params, opt_state=opt_state, key=jax.random.key_data(following))
        return new, {**metrics, "grad_norm": norm, "is_finite": is_finite}

    def _gradients(
        self, structure: Any, params: Params, frozen: Params, key: jax.Array, arrays: list[Any]
    ) -> tuple[Params, Metrics]:
        """Of the mean loss over all parts of a batch; [parts, rows, …] arrays."""
        keys = jax.random.split(key, self._parts)
        differentiate = jax.value_and_grad(self._loss_of, has_aux=True)

        def part(arrays: list[Any], key: jax.Array) -> tuple[Params, Metrics]:
            (loss, metrics), grads = differentiate(params, frozen, key, unflatten(structure, arrays))
            return self._split_as_weights(grads), {"loss": loss, **metrics}

        if self._parts == 1:
            return part([a[0] for a in arrays], keys[0])
        weights = jax.vmap(lambda arrays: self._weight(unflatten(structure, arrays)))(arrays)
        shares = weights / jnp.maximum(weights.sum(), 1.0)

        def add(total: Any, each: Any) -> tuple[Any, None]:
            arrays, key, share = each
            return jax.tree.map(lambda t, a: t + share * a.astype(t.dtype), total, part(arrays, key)), None

        like = jax.eval_shape(part, [a[0] for a in arrays], keys[0])
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), like)
        zeros = (self._split_as_weights(zeros[0]), zeros[1])
        return jax.lax.scan(add, zeros, (arrays, keys, shares))[0]

    def _loss_of(
        self, params: Params, frozen: Params, key: jax.Array | None, inputs: Mapping[str, Any]
    ) -> tuple[jax.Array, Metrics]:
        return self._found(self._apply(params, frozen, key), inputs)

    def _apply(self, params: Params, frozen: Params, key: jax.Array | None) -> Apply:
        """The model with these weights; in train mode if there is a key of dropout."""
        weights = {**frozen, **{name: array.astype(self._dtypes[name]) for name, array in params.items()}}
        dropout = key if self._dropout else None
        return functools.partial(self.model.apply, weights, dropout_rng=dropout, remat=self._remat)

    def _found(self, apply: Apply, inputs: Mapping[str, Any]) -> tuple[jax.Array, Metrics]:
        found = self._loss(apply, inputs)
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        return loss.astype(jnp.float32), metrics

    def _measure(self, apply: Apply, inputs: Mapping[str, Any]) -> Metrics:
        loss, metrics = self._found(apply, inputs)
        return {"loss": loss, "weight": self._weight(inputs), **metrics}

    def _weight(self, inputs: Mapping[str, Any]) -> jax.Array:
        """By how much a part counts: its labels; 1 for losses of a user's own."""
        return jnp.ones(()) if self._counts is None else self._counts(inputs)

    # Where things are

    def _frozen(self) -> Params:
        changed = set(self.trainable)
        return {**self.model.buffers, **{n: a for n, a in self.model.params.items() if n not in changed}}

    def _place(self, batch: Mapping[str, Any], parts: int | None = None) -> tuple[list[Any], Any]:
        """A batch's arrays, [parts, rows, …], on the devices; and its structure."""
        parts = self._parts if parts is None else parts
        prepared = self.model.prepare_inputs(batch)
        arrays, structure = flatten(prepared, is_array)
        counts = {np.shape(a)[0] if np.ndim(a) else 0 for a in arrays}
        if uneven := sorted(count for count in counts if count % parts or not count):
            raise InvalidInputError(
                f"A batch of {uneven[0]} rows cannot be divided into {parts} parts.",
                "Each of gradient_accumulation_steps parts has as many rows.",
                f"Give batches of a multiple of {parts} rows.",
            )
        if len(counts) > 1 and parts > 1:
            raise UnsupportedOptionError(
                f"Inputs of {sorted(counts)} rows cannot be accumulated.",
                "Which rows belong to which part is known only where every input has one for each example.",
                "Use gradient_accumulation_steps=1.",
            )
        return [self._put(a, parts) for a in arrays], structure

    def _put(self, array: Any, parts: int) -> Any:
        if isinstance(array, jax.ShapeDtypeStruct):
            shape, where = (parts, array.shape[0] // parts, *array.shape[1:]), self._rows(array.shape[0] // parts)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=where)
        split = array.reshape(parts, array.shape[0] // parts, *array.shape[1:])
        return self._layout.place(split, self._rows(split.shape[1]))

    def _rows(self, count: int) -> Sharding:
        mesh = self._layout.mesh
        return self._layout.replicated if mesh is None else NamedSharding(mesh, P(None, batch_axes(mesh, count)))

    def _split_as_weights(self, tree: Params) -> Params:
        if self._layout.mesh is None:
            return tree
        return {n: jax.lax.with_sharding_constraint(a, self._split[n]) for n, a in tree.items()}

    def _state_shapes(self) -> Any:
        params: Any = {n: jax.ShapeDtypeStruct(self.model.params[n].shape, self._master) for n in self.trainable}
        opt_state = jax.eval_shape(self._optimizer.init, params)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        step: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return TrainState(step=step, params=params, opt_state=opt_state, key=key)  # pyright: ignore[reportArgumentType]

    def _state_shardings(self) -> Any:
        """Arrays of the optimizer that stand under a weight's name, shaped as it is, lie as that weight does."""
        shapes: Any = self._state_shapes()
        whole: Any = self._layout.replicated
        own: Any = self._split

        def place(path: Any, array: Any) -> Any:
            name = getattr(path[-1], "key", None) if path else None
            return own[name] if name in own and array.shape == shapes.params[name].shape else whole

        opt_state = jax.tree_util.tree_map_with_path(place, shapes.opt_state)
        return TrainState(step=whole, params=own, opt_state=opt_state, key=whole)

    def _program(self, structure: Any, state: TrainState, arrays: list[Any]) -> Any:
        key = f"{structure!r} {_shapes(arrays)}"
        if key not in self._programs:
            shardings = self._state_shardings()
            step = jax.jit(functools.partial(self._step, structure), donate_argnums=0, out_shardings=(shardings, None))
            self._programs[key] = self._compiled("step", step, state, self._frozen(), arrays)
        return self._programs[key]

    def _compiled(self, name: str, function: Any, *args: Any) -> Any:
        device, mesh = self._layout.device, self._layout.mesh
        with phase("trace", name), compiling_for(device, mesh=mesh, pages=False, is_differentiated=True):
            lowered = function.lower(*args)
        with phase("compile", name), _explaining(f"the program of {name}"):
            return lowered.compile(compiler_options=_CPU_OPTIONS if device.platform == "cpu" else None)


def make_train_step(
    model: JaxModel,
    optimizer: optax.GradientTransformation,
    loss: Loss | None = None,
    *,
    trainable: Trainable = None,
    gradient_accumulation_steps: int = 1,
    remat: bool = False,
    dropout: bool = True,
    master_dtype: Any = jnp.float32,
    mesh: Any = None,
) -> TrainStep:
    """A compiled step of training on optax.

    Args:
        model: what is trained, over the mesh that it was loaded with. Its own arrays are not changed before `update_model`.
        optimizer: any of optax; its updates are in the master dtype.
        loss: takes `apply` (the model in train mode with the step's weights: inputs by name, the model's output) and the batch,
            and gives a scalar, or a scalar and a dict of further scalars. None: the model's own loss, of a batch with labels.
        trainable: names, with * for anything, or a function of a name; None: the active low-rank adapter if there is one, else
            all weights. All others are frozen: they take no gradients and no memory of the optimizer.
        gradient_accumulation_steps: parts of a batch that run one after another; gradients are those of the whole batch.
        remat: gradients keep each layer's input alone, and compute the layer again.
        dropout: False: the model stays in evaluation mode.
        master_dtype: in which what is trained, its gradients' sums and the optimizer's state are held. The model computes in the
            dtype that it was loaded with.
        mesh: sizes by axis or a `jax.sharding.Mesh`: the model is moved over these devices first. None: it stays where it is.

    Returns:
        The step; see `TrainStep.init` and `TrainStep.__call__`.

    Raises:
        InvalidInputError: a pattern that matches nothing, weights that are integers.

    Example:
        >>> step = make_train_step(model, optax.adamw(1e-4))  # doctest: +SKIP
        >>> state = step.init()  # doctest: +SKIP
        >>> state, metrics = step(state, {"input_ids": ids, "labels": ids})  # doctest: +SKIP
        >>> step.update_model(state)  # doctest: +SKIP
    """
    if mesh is not None:
        model.move_to(mesh)
    return TrainStep(
        model,
        optimizer,
        loss,
        trainable=trainable,
        gradient_accumulation_steps=gradient_accumulation_steps,
        remat=remat,
        dropout=dropout,
        master_dtype=master_dtype,
    )


def choose_trainable(params: Mapping[str, Any], trainable: Trainable) -> tuple[str, ...]:
    """The names that `trainable` stands for, see `make_train_step`.

    Raises:
        InvalidInputError: a pattern that matches nothing, or weights that are no floating-point numbers.
    """
    names = [name for name in params if not name.endswith(SCALING)]
    if trainable is None:
        chosen = trained_names(params)
    elif callable(trainable):
        chosen = [name for name in names if trainable(name)]
    else:
        patterns = [trainable] if isinstance(trainable, str) else list(trainable)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise InvalidInputError(
                    f"trainable={pattern!r} matches no weight.",
                    "Patterns are of names in `model.params`; * stands for anything.",
                    f"Names look like {', '.join(names[:3])}.",
                )
        chosen = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    packed = [name for name in chosen if isinstance(params[name], QuantizedArray)]
    if packed or not chosen:
        raise InvalidInputError(
            f"{len(packed)} of the weights to train are integers ({packed[0]}, …)."
            if packed
            else "Nothing is trained.",
            "Gradients are of floating-point numbers.",
            "Train an adapter (model.add_adapter) beside quantized weights, or load the model without quantization.",
        )
    return tuple(chosen)


def _shapes(arrays: list[Any]) -> str:
    return repr([(tuple(a.shape), str(a.dtype)) for a in arrays])


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Turns XLA's word for a full memory into hfax's."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"There is no memory for {what}.",
            str(error).splitlines()[0],
            "Use smaller batches with gradient_accumulation_steps, remat=True, an adapter, or more devices on fsdp.",
        ) from error
