"""A training step as a pure, compiled function with donated state.

Turns a model and an optax optimizer into `(state, batch) -> (state, metrics)`. Trained weights are float32 master copies; the
model's own weights do not change. Gradients and optimizer state are sharded like the weights. Data loading and checkpointing are
handled elsewhere.
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
from hfax.errors import InvalidInputError, OutOfMemoryError, UnsupportedModelError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.kernels.target import compiler_options, compiling_for
from hfax.phases import phase
from hfax.programs.lowered import compile_stored
from hfax.sharding.layout import to_host
from hfax.sharding.mesh import batch_axes
from hfax.tracing.adapters import SCALING
from hfax.tracing.host_reads import VALUE_NEEDED, Answers, ValueNeededError, key_of, reading, until_read
from hfax.tracing.structure import flatten, is_array, unflatten
from hfax.train.labels import labels_of
from hfax.train.losses import Apply, Loss, models_own_loss
from hfax.train.neftune import noisy_embeddings
from hfax.train.reference import check_reference, weights_of_reference
from hfax.train.updates import ByWeight, apply_optimizer

Params = dict[str, jax.Array]
Trainable = Callable[[str], bool] | Iterable[str] | None
Metrics = dict[str, jax.Array]


_AGREES = "values read agree"
"""A metric within a step: whether modelling code found the values that were read before it; if not, no weight changes."""
_REFERENCE = "reference/"
"""Precedes the names of the reference's weights among the arguments of programs."""
_CPU_OPTIONS: dict[str, str | bool] = {"xla_disable_hlo_passes": "optimization-barrier-expander,cse_barrier_expander"}
"""XLA's CPU compiler otherwise removes optimization barriers early. Without those of `jax.checkpoint` it recomputes all layers at
once: 28% more operations and no memory saved (docs/log/training.md). Without those of `hfax.train.updates` it copies the
optimizer state."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state that a step updates.

    Args:
        step: steps taken, int32.
        params: trained weights by name, in the master dtype.
        opt_state: optimizer state.
        key: raw PRNG key data for the next steps.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array


class TrainStep:
    """A compiled training step, see `make_train_step`. Call it to take one step.

    Attributes:
        trainable: names of the trained weights.
    """

    def __init__(
        self,
        model: JaxModel,
        optimizer: optax.GradientTransformation | ByWeight,
        loss: Loss | None = None,
        *,
        trainable: Trainable = None,
        gradient_accumulation_steps: int = 1,
        remat: bool = False,
        dropout: bool = True,
        master_dtype: Any = jnp.float32,
        ref_model: JaxModel | None = None,
        neftune_noise_alpha: float | None = None,
    ) -> None:
        if neftune_noise_alpha is not None and not dropout:
            raise InvalidInputError(
                f"neftune_noise_alpha={neftune_noise_alpha} does not go with dropout=False.",
                "Noise is added in train mode, and dropout=False trains in eval mode.",
                "Leave one of them out.",
            )
        if gradient_accumulation_steps < 1:
            raise InvalidInputError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} is too small.",
                "A step needs at least one micro-batch.",
                "Pass 1 or more.",
            )
        if isinstance(optimizer, ByWeight) and model.mesh is not None and model.mesh.size > 1:
            raise UnsupportedOptionError(
                f"Optimizers with 8-bit moments run on one device, and the model is on {model.mesh.size}.",
                "XLA would gather whole weights on each device to round blocks of their moments.",
                "Use one with float32 moments, which are split over devices like the weights.",
            )
        self.model = model
        weights = {n: a for n, a in model.params.items() if n not in model.skeleton.untrained}
        self.trainable = choose_trainable(weights, trainable, model.adapters.trained(weights))
        self._optimizer = optimizer
        self._loss = loss or models_own_loss
        is_over_labels = self._loss is models_own_loss or getattr(self._loss, "is_mean_over_labels", False)
        self._labels = labels_of(model) if is_over_labels else None
        self._needed: tuple[str, ...] = getattr(self._loss, "reference_names", ())
        check_reference(model, ref_model, needed=bool(self._needed))
        self._reference = ref_model or model
        self._reference_weights = weights_of_reference(self._reference) if self._needed else {}
        self._parts = gradient_accumulation_steps
        self._remat, self._dropout = remat, dropout
        self._noise = neftune_noise_alpha
        self._master = jnp.dtype(master_dtype)
        self._dtypes = {name: model.params[name].dtype for name in self.trainable}
        self._split = {name: model.params[name].sharding for name in self.trainable}
        self._programs: dict[Any, Any] = {}
        self._layout = model.parts.layout

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """The state before the first step.

        Args:
            seed: dropout seed.
            copy: False: reuse weights already in the master dtype without a copy. Steps then donate their memory, and the model
                must not be used until `update_model`.

        Raises:
            InvalidInputError: `copy=False`, but the loss compares with the model's own weights.
            OutOfMemoryError: the state does not fit on the device.
        """
        if not copy and self._needed and self._reference is self.model:
            raise InvalidInputError(
                "copy=False does not go with a loss that has a reference.",
                "The reference is the model's own weights, which steps would overwrite.",
                "Leave copy=False out, or pass ref_model.",
            )
        shardings = self._state_shardings()

        def make(weights: Params) -> TrainState:
            params = {name: array.astype(self._master) for name, array in weights.items()}
            params = (
                jax.tree.map(jnp.copy, params) if copy else params
            )  # the model's own weights must outlive the state
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=self._optimizer.init(params),
                key=jax.random.key_data(jax.random.key(seed)),
            )

        weights = {name: self.model.params[name] for name in self.trainable}
        with _explaining("the training state"):
            return jax.jit(make, out_shardings=shardings, donate_argnums=() if copy else (0,))(weights)

    def __call__(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """Take a step.

        Args:
            state: from `init` or the previous step; donated to the new state.
            batch: model inputs by name, with labels; numpy, torch or jax arrays. The number of rows must be a multiple of
                `gradient_accumulation_steps`.

        Returns:
            The new state, and scalars: "loss", "grad_norm", "is_finite" (if False, weights and optimizer state are unchanged),
            and metrics from the loss function. The call does not wait for them.

        Raises:
            InvalidInputError: the number of rows is not divisible; or, for the model's own loss, a label is no class of the model,
                or all are ignored. Labels on a device are copied to the host for this check, as ids are.
            OutOfMemoryError: the step does not fit on the device.
        """
        arrays, structure = self._place(batch, is_step=True)
        with _explaining("a training step"):
            return self._program(structure, state, arrays)(state, self._frozen(), arrays)

    def compile(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """The compiled step for batches of this shape, for its memory analysis and HLO text.

        Args:
            state: from `init`, or an abstract state with shardings.
            batch: a training batch, see `__call__`.
        """
        arrays, structure = self._place(batch)
        return self._program(structure, state, arrays)

    def evaluate(
        self,
        params: Params,
        batch: Mapping[str, Any],
        outputs: Callable[[Apply, Mapping[str, Any]], Any] | None = None,
    ) -> Metrics:
        """A batch's loss without dropout, and "weight", the number of labels it is averaged over; 0 and 0 if it has none.

        Args:
            params: weights from a state, or the model's own.
            batch: a training batch, see `__call__`.
            outputs: a function as in `compute`, whose result is added as "outputs"; in the same program.
        """
        if outputs is not None:

            def both(apply: Apply, reference: Apply, inputs: Mapping[str, Any]) -> Any:
                return {**self._measure(apply, reference, inputs), "outputs": outputs(apply, inputs)}

            return self._computed(("loss", outputs), both, params, batch)
        return self._computed("loss", self._measure, params, batch)

    def compute(
        self, function: Callable[[Apply, Mapping[str, Any]], Any], params: Params, batch: Mapping[str, Any]
    ) -> Any:
        """Evaluate a function of the model on a batch without dropout, for example reference outputs for a loss.

        The model computes exactly as in a step. In half precision, a program with only `model.apply` would round differently.

        Args:
            function: takes `apply` and the batch, like a loss, and returns a pytree of arrays. Compiled once per batch shape.
            params: weights from a state, or the model's own.
            batch: a training batch, see `__call__`.
        """
        return self._computed(function, lambda apply, _, inputs: function(apply, inputs), params, batch)

    def reference(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """What the loss reads of the reference for a batch: a step does not compute it again for batches that have it.

        Args:
            batch: a training batch, see `__call__`.
        """
        loss: Any = self._loss
        return self._computed("reference", lambda _, reference, inputs: loss.reference(reference, inputs), {}, batch)

    def update_model(self, state: TrainState) -> None:
        """Copy the state's weights to the model, in the model's dtypes."""
        copied = lambda params: {n: jnp.copy(a.astype(self._dtypes[n])) for n, a in params.items()}  # noqa: E731
        cast = jax.jit(copied, out_shardings=self._split)
        self.model.params = {**self.model.params, **cast(state.params)}

    def described_state(self) -> TrainState:
        """An abstract state: shapes, dtypes and shardings, without arrays."""
        shardings = self._state_shardings()
        shapes = self._state_shapes()
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)

    # The step

    def _step(
        self, structure: Any, answers: Answers, state: TrainState, frozen: Params, arrays: list[Any]
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.wrap_key_data(state.key)
        own, following = jax.random.split(key)
        grads, metrics = self._gradients(structure, answers, state.params, frozen, own, arrays)
        norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm) & metrics.pop(_AGREES, True)
        params, opt_state = apply_optimizer(self._optimizer, grads, state.opt_state, state.params, is_finite)
        new = TrainState(step=state.step + 1, params=params, opt_state=opt_state, key=jax.random.key_data(following))
        return new, {**metrics, "grad_norm": norm, "is_finite": is_finite}

    def _gradients(
        self,
        structure: Any,
        answers: Answers,
        params: Params,
        frozen: Params,
        key: jax.Array,
        arrays: list[Any],
    ) -> tuple[Params, Metrics]:
        """Gradients and metrics of the mean loss over a batch's micro-batches; arrays are [parts, rows, …]."""
        keys = jax.random.split(key, self._parts)
        differentiate = jax.value_and_grad(functools.partial(self._loss_given, answers), has_aux=True)

        def part(arrays: list[Any], key: jax.Array) -> tuple[Params, Metrics]:
            (loss, metrics), grads = differentiate(params, frozen, key, unflatten(structure, arrays))
            return self._split_as_weights(grads), {"loss": loss, **metrics}

        if self._parts == 1:
            return part([a[0] for a in arrays], keys[0])
        weights = jax.vmap(lambda arrays: self._weight(unflatten(structure, arrays)))(arrays)
        shares = weights / weights.sum()

        def add(total: Any, each: Any) -> tuple[Any, None]:
            arrays, key, share = each

            def weighted(total: jax.Array, of_part: jax.Array) -> jax.Array:
                """A part without labels has no share, and a loss of NaN."""
                return total + jnp.where(share == 0, 0, share * of_part.astype(total.dtype))

            return jax.tree.map(weighted, total, part(arrays, key)), None

        like = jax.eval_shape(part, [a[0] for a in arrays], keys[0])
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), like)
        zeros = (self._split_as_weights(zeros[0]), zeros[1])
        return jax.lax.scan(add, zeros, (arrays, keys, shares))[0]

    def _loss_of(
        self, params: Params, frozen: Params, key: jax.Array | None, inputs: Mapping[str, Any]
    ) -> tuple[jax.Array, Metrics]:
        return self._found(self._apply(params, frozen, key), self._apply_reference(frozen), inputs)

    def _loss_given(self, answers: Answers, *args: Any) -> tuple[jax.Array, Metrics]:
        """`_loss_of` with the values that modelling code reads, and whether they are the ones of this step, too."""
        with reading(answers) as found:
            loss, metrics = self._loss_of(*args)
            # a layer that is computed again keeps its values to itself
            agreement = {_AGREES: found.agrees()} if answers and not self._remat else {}
            return loss, {**metrics, **agreement}

    def _apply(self, params: Params, frozen: Params, key: jax.Array | None) -> Apply:
        """The model with these weights; in train mode if a dropout key is given."""
        own = {name: array for name, array in frozen.items() if not name.startswith(_REFERENCE)}
        weights = {**own, **{name: array.astype(self._dtypes[name]) for name, array in params.items()}}
        dropout = key if self._dropout else None

        def apply(*args: Any, **inputs: Any) -> Any:
            with noisy_embeddings(self.model, self._noise):
                return self.model.apply(weights, *args, dropout_rng=dropout, remat=self._remat, **inputs)

        return apply

    def _apply_reference(self, frozen: Params) -> Apply:
        weights = {n.removeprefix(_REFERENCE): a for n, a in frozen.items() if n.startswith(_REFERENCE)}
        return functools.partial(self._reference.apply, weights)

    def _found(self, apply: Apply, reference: Apply, inputs: Mapping[str, Any]) -> tuple[jax.Array, Metrics]:
        loss: Any = self._loss
        if any(name not in inputs for name in self._needed):
            inputs = {**inputs, **jax.lax.stop_gradient(loss.reference(reference, inputs))}
        found = loss(apply, inputs)
        value, metrics = found if isinstance(found, tuple) else (found, {})
        return value.astype(jnp.float32), metrics

    def _measure(self, apply: Apply, reference: Apply, inputs: Mapping[str, Any]) -> Metrics:
        loss, metrics = self._found(apply, reference, inputs)
        weight = self._weight(inputs)
        return {"loss": jnp.where(weight == 0, 0, loss), "weight": weight, **metrics}

    def _weight(self, inputs: Mapping[str, Any]) -> jax.Array:
        """A micro-batch's weight: its label count if the loss is a mean over labels, else its number of rows."""
        if self._labels is not None:
            return self._labels.count(inputs)
        return jnp.float32(next((a.shape[0] for a in flatten(inputs, is_array)[0] if a.ndim), 1))

    def _computed(
        self,
        key: Any,
        function: Callable[[Apply, Apply, Mapping[str, Any]], Any],
        params: Params,
        batch: Mapping[str, Any],
    ) -> Any:
        """A function of the model, its reference and a batch, without dropout; compiled once per key and batch shape."""
        params = {name: params[name] for name in self.trainable if name in params}
        arrays, structure = self._place(batch, parts=1)

        def run(params: Params, frozen: Params, arrays: list[Any]) -> Any:
            inputs = unflatten(structure, [a[0] for a in arrays])
            return function(self._apply(params, frozen, None), self._apply_reference(frozen), inputs)

        args, answers = (params, self._frozen(), arrays), ()
        key = (key, f"{structure!r} {_shapes([*params.values(), *arrays])}")
        with _explaining("a forward pass"):
            while True:
                results, agrees, note = self._until_read("evaluate", key, run, answers, args)
                if not agrees:
                    return run(*args)  # operation by operation
                if note != VALUE_NEEDED:
                    return results
                answers = (*answers, to_host(results[0]))

    def _until_read(
        self, name: str, key: Any, function: Callable[..., Any], answers: Answers, args: tuple[Any, ...]
    ) -> tuple[Any, bool, Any]:
        """What a program of `function` returns, or the next value that modelling code reads, see `host_reads.until_read`."""
        key = (key, key_of(answers))
        if key not in self._programs:
            notes: list[Any] = []

            def run(*args: Any) -> Any:
                results, note = until_read(lambda: (function(*args), None), answers)()
                notes.append(note)
                return results

            self._programs[key] = self._compiled(name, jax.jit(run), *args), notes
        program, notes = self._programs[key]
        if not answers:
            return program(*args), True, notes[-1]
        results, agrees = program(*args)
        return results, bool(to_host(agrees)), notes[-1]

    # Where things are

    def _frozen(self) -> Params:
        changed = set(self.trainable)
        own = {**self.model.buffers, **{n: a for n, a in self.model.params.items() if n not in changed}}
        return {**own, **{f"{_REFERENCE}{n}": a for n, a in self._reference_weights.items()}}

    def _place(
        self, batch: Mapping[str, Any], parts: int | None = None, is_step: bool = False
    ) -> tuple[list[Any], Any]:
        """A batch's arrays on the devices, [parts, rows, …], and its structure."""
        parts = self._parts if parts is None else parts
        prepared = self.model.in_image_classes(self.model.prepare_inputs(batch))
        if self._labels is not None:
            self._labels.check(prepared)
            if is_step:
                self._labels.check_any(prepared)
        arrays, structure = flatten(prepared, is_array)
        counts = {np.shape(a)[0] if np.ndim(a) else 0 for a in arrays}
        if uneven := sorted(count for count in counts if count % parts or not count):
            raise InvalidInputError(
                f"A batch of {uneven[0]} rows cannot be divided into {parts} parts.",
                "All gradient_accumulation_steps parts have the same number of rows.",
                f"Use batches with a multiple of {parts} rows.",
            )
        if len(counts) > 1 and parts > 1:
            raise UnsupportedOptionError(
                f"Inputs with {sorted(counts)} rows cannot be accumulated.",
                "Splitting a batch requires one row per example in every input.",
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
        """Optimizer arrays with a weight's name and shape are sharded like that weight."""
        shapes: Any = self._state_shapes()
        whole: Any = self._layout.replicated
        own: Any = self._split

        def place(path: Any, array: Any) -> Any:
            name = getattr(path[-1], "key", None) if path else None
            return own[name] if name in own and array.shape == shapes.params[name].shape else whole

        opt_state = jax.tree_util.tree_map_with_path(place, shapes.opt_state)
        return TrainState(step=whole, params=own, opt_state=opt_state, key=whole)

    def _program(self, structure: Any, state: TrainState, arrays: list[Any]) -> Any:
        """The program of a step; values that modelling code reads are read by forward passes first, and are constants in it."""
        key, answers = f"{structure!r} {_shapes(arrays)}", ()
        while True:
            found = (key, key_of(answers))
            try:
                if found not in self._programs:
                    step = functools.partial(self._step, structure, answers)
                    step = jax.jit(step, donate_argnums=0, out_shardings=(self._state_shardings(), None))
                    self._programs[found] = self._compiled("step", step, state, self._frozen(), arrays)
                if (program := self._programs[found]) is not None:
                    return program
            except ValueNeededError:
                self._programs[found] = None
            answers = (*answers, self._next_value(key, structure, state, arrays, answers))

    def _next_value(
        self, key: str, structure: Any, state: TrainState, arrays: list[Any], answers: Answers
    ) -> np.ndarray:
        """The value that the modelling code reads after `answers`, from a forward pass that ends there."""
        if self._parts > 1 or any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
            raise UnsupportedModelError(
                f"{type(self.model.skeleton.module).__name__} reads values of tensors in a training step of several micro-batches, "
                "or of shapes alone.",
                "Values are read from a batch before its step is compiled, and each micro-batch has its own.",
                "Use gradient_accumulation_steps=1, and a batch of arrays.",
            )

        def forward(params: Params, frozen: Params, key: jax.Array, arrays: list[Any]) -> Any:
            own, _ = jax.random.split(jax.random.wrap_key_data(key))
            inputs = unflatten(structure, [a[0] for a in arrays])
            return self._loss_of(params, frozen, jax.random.split(own, 1)[0], inputs)

        args = (state.params, self._frozen(), state.key, arrays)
        remat, self._remat = self._remat, False  # a value in a part to be recomputed cannot be returned
        try:
            results, _, note = self._until_read("read", ("read", key), forward, answers, args)
        finally:
            self._remat = remat
        assert note == VALUE_NEEDED
        return to_host(results[0])

    def _compiled(self, name: str, function: Any, *args: Any) -> Any:
        device, mesh = self._layout.device, self._layout.mesh
        with phase("trace", name), compiling_for(device, mesh=mesh, pages=False, is_differentiated=True):
            lowered = function.lower(*args)
        with _explaining(f"the program of {name}"):
            options = _CPU_OPTIONS if device.platform == "cpu" else compiler_options(device, has_few_rows=False)
            return compile_stored(name, lowered, self._layout, options)


def make_train_step(
    model: JaxModel,
    optimizer: optax.GradientTransformation | ByWeight,
    loss: Loss | None = None,
    *,
    trainable: Trainable = None,
    gradient_accumulation_steps: int = 1,
    remat: bool = False,
    dropout: bool = True,
    master_dtype: Any = jnp.float32,
    ref_model: JaxModel | None = None,
    neftune_noise_alpha: float | None = None,
    mesh: Any = None,
) -> TrainStep:
    """A compiled training step with optax.

    Args:
        model: the model to train, on the mesh it was loaded with. Its own arrays do not change until `update_model`.
        optimizer: any optax optimizer; updates are in the master dtype.
        loss: takes `apply` (the model in train mode with the step's weights; maps inputs by name to the model's output) and the
            batch, and returns a scalar, or a scalar and a dict of metrics. None: the model's own loss, from a batch with labels.
        trainable: weight name patterns with * wildcards, or a predicate on names; None: the active adapter if any, else all
            weights. Other weights are frozen: no gradients and no optimizer state. So are always buffers (BART's
            `final_logits_bias`, running statistics) and parameters that the class freezes (Whisper's encoder positions).
        gradient_accumulation_steps: micro-batches that run in sequence; gradients are those of the whole batch.
        remat: keep only each layer's input and recompute the layer in the backward pass.
        dropout: False: the model stays in eval mode.
        master_dtype: dtype of the trained weights, accumulated gradients and optimizer state. The model computes in the dtype it
            was loaded with.
        ref_model: the model that a loss with a reference compares with (`DPOLoss`, `KTOLoss`; the teacher of `DistillationLoss`).
            None: this model as it is now, without its adapter.
        neftune_noise_alpha: noise on the input embeddings in training, at most alpha / sqrt(length · width); None: none.
        mesh: mesh sizes by axis or a `jax.sharding.Mesh` to move the model to first. None: do not move it.

    Returns:
        The step; see `TrainStep.init` and `TrainStep.__call__`.

    Raises:
        InvalidInputError: a pattern matches nothing, a weight is quantized, or `ref_model` does not fit the loss or the model.

    Examples:
        >>> step = make_train_step(model, optax.adamw(1e-4))
        >>> state = step.init()
        >>> state, metrics = step(state, {"input_ids": ids, "labels": ids})
        >>> bool(metrics["loss"] > 0)
        True
        >>> step.update_model(state)
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
        ref_model=ref_model,
        neftune_noise_alpha=neftune_noise_alpha,
    )


def choose_trainable(params: Mapping[str, Any], trainable: Trainable, default: list[str]) -> tuple[str, ...]:
    """The weight names that `trainable` selects, see `make_train_step`; `default` for None.

    Raises:
        InvalidInputError: a pattern matches nothing, or a weight is not floating-point.
    """
    names = [name for name in params if not name.endswith(SCALING)]
    if trainable is None:
        chosen = default
    elif callable(trainable):
        chosen = [name for name in names if trainable(name)]
    else:
        patterns = [trainable] if isinstance(trainable, str) else list(trainable)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise InvalidInputError(
                    f"trainable={pattern!r} matches no weight.",
                    "Patterns match names in `model.params`; * is a wildcard.",
                    f"Use names like {', '.join(names[:3])}.",
                )
        chosen = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    packed = [name for name in chosen if isinstance(params[name], QuantizedArray)]
    if packed or not chosen:
        raise InvalidInputError(
            f"{len(packed)} of the weights to train are quantized ({packed[0]}, …)."
            if packed
            else "Nothing is trained.",
            "Only floating-point weights have gradients.",
            "Train an adapter (model.add_adapter) on top of quantized weights, or load the model without quantization.",
        )
    return tuple(chosen)


def _shapes(arrays: list[Any]) -> str:
    return repr([(tuple(a.shape), str(a.dtype)) for a in arrays])


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Convert XLA's out-of-memory error to OutOfMemoryError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"Not enough memory for {what}.",
            str(error).splitlines()[0],
            "Use smaller batches with gradient_accumulation_steps, remat=True, an adapter, or more devices on fsdp.",
        ) from error
