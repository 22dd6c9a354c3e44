"""The object that `from_pretrained` gives on the JAX backend: weights, and the ways to run them.

Ties together a traced module, its weights on a device and its compiled programs. What each of them does is in `backends` and
`programs`; here is only what a user calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from transformers import GenerationConfig

from hfax.backends.base_model import BaseModel, Request, as_ids_tuple
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation import batches
from hfax.generation import generation_request as requests
from hfax.generation.generate import Loop, Streamer, open_loop, run_generation
from hfax.generation.host_loop import make_stop_check
from hfax.generation.outputs import as_sequences, as_torch_tree, give
from hfax.generation.overrides import has_own_generate, run_own_generate
from hfax.generation.sampling_config import make_sampling_spec
from hfax.generation.speculation import Speculation
from hfax.generation.warm_up import WarmedUp, warm_up
from hfax.kernels.quantized import QuantizedArray
from hfax.launch.driven import drive
from hfax.launch.together import agree
from hfax.load.host_arrays import to_numpy
from hfax.load.nnx_state import weights_of
from hfax.load.skeleton import Skeleton, with_dtype
from hfax.lora.adapters import Adapters, trained_names
from hfax.lora.methods import AdapterMethods
from hfax.parallelism import choose_layout
from hfax.programs.buckets import Buckets, Size
from hfax.programs.checks import raise_failed
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import ProgramCache
from hfax.sharding.layout import Layout
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.structure import flatten, has_torch, is_array, unflatten
from hfax.tracing.traced_model import TracedModel
from hfax.tracing.training import Training

_ASSISTANT_TOKENS = 5
"""Draft tokens a round of an assistant model, where the call names no number."""
_MAX_NGRAM = 3
"""Tokens at the text's end that prompt lookup looks for, at most, where the call names no number."""


class JaxModel(AdapterMethods, BaseModel):
    """A transformers model whose weights are `jax.Array`s and whose calls are compiled by XLA.

    Made by `AutoModelForTPU`. Calling it runs one forward pass, `generate` writes tokens, `apply` is the pure function.

    Attributes:
        params: weights by their names in the checkpoint; tied weights once. May be replaced by arrays of the same shapes.
        config: transformers' configuration.
        generation_config: defaults of `generate`.
        name_or_path: where the weights came from.
        folder: the checkpoint's files on this machine; None for random weights.
        task: the pipeline task it was loaded for, if one was given.
    """

    backend = "jax"

    def __init__(
        self,
        skeleton: Skeleton,
        params: dict[str, jax.Array],
        tied: Mapping[str, str],
        *,
        layout: Layout,
        generation_config: GenerationConfig,
        name_or_path: str,
        folder: Path | None,
        task: str | None,
        programs: Path | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self.params = params
        self.buffers = layout.put({name: to_numpy(b) for name, b in skeleton.buffers.items()})
        self._layout = layout
        self._tied = dict(tied)
        self._traced = TracedModel(skeleton, tied, self.buffers)
        self.adapters = Adapters(skeleton.module, layout, self._tied)
        super().__init__(
            skeleton,
            self._traced.traits,
            generation_config=generation_config,
            name_or_path=name_or_path,
            folder=folder,
            task=task,
            buckets=buckets,
        )
        self.patches = self._traced.patches_used
        self._programs = ProgramCache(self._traced.key, layout, bundled=programs)

    @property
    def jax_device(self) -> jax.Device:
        """Where the weights are and programs run; the first device of several."""
        return self._layout.device

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that the model is spread over; None for one."""
        return self._layout.mesh

    def sharding_plan(self) -> ShardingPlan | None:
        """How each weight is split over the devices, and why; its text is a table. None for one device.

        Example:
            >>> print(model.sharding_plan())  # doctest: +SKIP
        """
        return self._layout.plan

    @property
    def quantization(self) -> str | None:
        """ "int8" or "int4", if linear layers' matrices are such integers."""
        bits = {array.bits for array in self.params.values() if isinstance(array, QuantizedArray)}
        return f"int{min(bits)}" if bits else None

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the weights hold; tied ones once.

        Args:
            only_trainable: those of the active adapter alone, if there is one.
            exclude_embeddings: leave the embedding tables out.
        """
        left_out = set[str]()
        if only_trainable:
            left_out |= set(self.params) - set(trained_names(self.params))
        if exclude_embeddings:
            modules = self._skeleton.module.named_modules()
            left_out |= {f"{path}.weight" for path, part in modules if isinstance(part, torch.nn.Embedding)}
        return sum(p.size for name, p in self.params.items() if name not in left_out)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights, over all devices together, each weight once.

        Args:
            return_buffers: count buffers that no checkpoint holds, too.
        """
        arrays = [*self.params.values(), *(self.buffers.values() if return_buffers else ())]
        return sum(array.nbytes for array in arrays)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as torch tensors on the CPU, under the names of transformers' module, tied ones under each of their names.

        On a CPU device they share the arrays' memory: do not write to them.

        Raises:
            UnsupportedOptionError: weights are integers with scales, which no torch module loads.
        """
        if self.quantization is not None:
            raise UnsupportedOptionError(
                f"{type(self).__name__} has no state_dict(): its weights are quantized ({self.quantization}).",
                "No module of torch loads integers with hfax's scales.",
                "Use model.params, or load the checkpoint without quantization.",
            )
        own = self.params if self.adapters.active is None else self.adapters.without(self.params)
        names = list(own)
        found = dict(zip(names, as_torch_tree([own[name] for name in names]), strict=True))
        return found | {alias: found[name] for alias, name in self._tied.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {self.num_parameters():,} parameters, {self.dtype}, {self._where()})"

    def _where(self) -> str:
        if self.mesh is None:
            return str(self.jax_device)
        return ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items() if size > 1)

    @property
    def skeleton(self) -> Skeleton:
        """The module without weights, with the names and shapes of all that a checkpoint holds."""
        return self._skeleton

    @property
    def parts(self) -> ModelParts:
        """What programs of the model are made from; for whoever makes more of them."""
        return ModelParts(
            traced=self._traced,
            programs=self._programs,
            layout=self._layout,
            weights=self._arrays(),
            vocab_size=self._num_logits(),
            context=self._context(),
        )

    def apply(
        self,
        params: Mapping[str, jax.Array],
        *args: Any,
        dropout_rng: jax.Array | None = None,
        remat: bool = False,
        **inputs: Any,
    ) -> Any:
        """The forward pass as a pure function, for `jax.jit`, `jax.grad`, `jax.vmap` and `jax.checkpoint`.

        Args:
            params: weights by name, as `self.params`.
            *args: what the transformers class takes, by position.
            dropout_rng: a PRNG key; with it the model is in train mode, and its dropout draws from the key. The same key drops the
                same.
            remat: gradients keep of each layer its input alone, and compute the layer again.
            **inputs: the same by name; arrays (jax, numpy) are traced, all else is static.

        Returns:
            The model's own result (a `ModelOutput`, or a tuple with `return_dict=False`) with `jax.Array`s in it. Called outside
            of `jax.jit` it runs one operation at a time; call the model itself for a compiled pass.

        Example:
            >>> loss = lambda params: model.apply(params, input_ids=ids, labels=ids).loss  # doctest: +SKIP
            >>> gradients = jax.jit(jax.grad(loss))(model.params)  # doctest: +SKIP

        Raises:
            InvalidInputError: a name that forward makes no use of; whole numbers that do not fit into 32 bits.
        """
        self._reject_unknown(inputs)
        training = Training(key=dropout_rng, remat=remat, lora_dropout=self.adapters.dropout)
        return self._traced.apply(params, args, inputs, training)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """One compiled forward pass.

        Args:
            *args: what the transformers class takes, by position.
            **inputs: the same by name. torch tensors, numpy and jax arrays, and lists of numbers are traced:
                a call with other values of the same shapes compiles nothing. Everything else (`use_cache=False`,
                `output_hidden_states=True`, …) becomes part of the program. 64-bit numbers become 32-bit ones.

        Returns:
            The model's own result, with torch tensors if any input was one, else with jax arrays.

        Raises:
            InvalidInputError: ids outside of the vocabulary; images that do not fit the prompt's places for them; a name that
                forward makes no use of.
            OutOfMemoryError: the program does not fit the device.
        """
        inputs = self._by_name(args, inputs)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            raise InvalidInputError(
                f"{type(self).__name__} was called inside of a JAX transformation (jit, grad, vmap, …).",
                "Calling the model runs a compiled program of its own, whose weights would become constants of yours.",
                "Use the pure function: jax.jit(lambda params, ids: model.apply(params, input_ids=ids))(model.params, ids).",
            )
        to_torch = has_torch(inputs)
        arrays, structure = flatten(self.prepare_inputs(inputs), is_array)
        arrays = self._layout.put_rows(arrays)

        def forward(params: dict[str, jax.Array], arrays: list[jax.Array]) -> tuple[list[jax.Array], Any]:
            outputs = self._traced.apply_checked(params, (), unflatten(structure, arrays))
            return flatten(outputs, is_array)

        shapes = ", ".join(str(list(a.shape)) for a in arrays[:3])
        args = (self._arrays(), arrays)
        program = self._programs.get(f"forward {shapes}", structure, forward, args)
        outputs = program.run(*args)
        result, checks = unflatten(program.note, as_torch_tree(outputs) if to_torch else outputs)
        raise_failed(checks)
        return result

    forward = __call__
    """transformers' name for the same, which its pipelines call."""

    def generate(
        self,
        inputs: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        assistant_model: JaxModel | None = None,
        **options: Any,
    ) -> Any:
        """Write tokens after each prompt, with the names and defaults of `transformers.GenerationMixin.generate`.

        Args:
            inputs: prompts, [batch, length] token ids (torch, numpy, jax or lists), padded on the left; or pass `input_ids=`.
                For encoder-decoders the encoder's input.
            generation_config: options; else the model's own.
            streamer: `TextStreamer` or `TextIteratorStreamer` of transformers, for one prompt.
            tokenizer: needed with `stop_strings`.
            seed: of the random draws; None draws one from torch's generator, so `transformers.set_seed` decides.
            assistant_model: a smaller hfax model with the same vocabulary for speculative decoding: it drafts
                `num_assistant_tokens` at a time, which this model verifies in one step. `prompt_lookup_num_tokens` drafts from the
                text instead. Both change speed, not output. For one sequence.
            **options: any generation option by name, and the model's other inputs (`attention_mask`, `pixel_values`, …); beyond
                transformers': `presence_penalty` and `frequency_penalty` (subtracted from the logits of tokens already written,
                once and a time), and `output_log_probs=True` (the drawn tokens' log-probabilities as `log_probs`).

        Returns:
            [batch · num_return_sequences, prompt + new] ids, prompts first; int64 torch for torch prompts, else int32 jax. With
            `return_dict_in_generate=True` transformers' output class with `sequences`, `scores`, `logits`.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
            UnsupportedOptionError: an option that hfax does not implement; it is never ignored.
        """
        if has_own_generate(self._skeleton.module):
            if assistant_model is not None:
                options["assistant_model"] = assistant_model
            if generation_config is not None:
                options["generation_config"] = generation_config
            return self._by_own_generate(inputs, options, seed=seed, streamer=streamer, tokenizer=tokenizer)
        return self._generate(
            inputs,
            generation_config,
            options,
            seed=seed,
            streamer=streamer,
            tokenizer=tokenizer,
            assistant_model=assistant_model,
        )

    def _by_own_generate(self, prompt: Any, options: dict[str, Any], **rest: Any) -> Any:
        """The class's own `generate`, with torch tensors in it, whatever was given."""
        to_torch = has_torch([prompt, options])
        arrays, structure = flatten((prompt, options), is_array)
        prompt, options = unflatten(structure, [torch.as_tensor(self._host_array("inputs", a)) for a in arrays])

        def loop(inputs: Any, config: Any, options: dict[str, Any], timestamps: Any) -> Any:
            return self._generate(inputs, config, options, timestamps=timestamps, **rest)

        outputs = run_own_generate(
            self._skeleton.module,
            prompt,
            options,
            generation_config=self.generation_config,
            forward=self.__call__,
            loop=loop,
        )
        if to_torch:
            return outputs
        arrays, structure = flatten(outputs, is_array)
        return unflatten(structure, [self._layout.put(self._host_array("outputs", a)) for a in arrays])

    def _generate(
        self,
        inputs: Any,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        *,
        seed: int | None,
        streamer: Streamer | None,
        tokenizer: Any,
        timestamps: Mapping[str, int] | None = None,
        assistant_model: JaxModel | None = None,
    ) -> Any:
        request, to_torch = self._request(inputs, generation_config, options, seed, timestamps, assistant_model)
        generated = run_generation(
            *self._open(request),
            request.prompts,
            request.options,
            streamer=streamer,
            stop_check=make_stop_check(request.options.config.stop_strings, tokenizer),
        )
        config = request.options.config
        return as_sequences(
            generated,
            request.prompts.given,
            num_return_sequences=config.num_return_sequences or 1,
            is_encoder_decoder=self._traced.traits.is_encoder_decoder,
            as_dict=bool(config.return_dict_in_generate) or bool(request.options.keep),
            give=lambda array: give(array, to_torch),
        )

    def _agreed(self, value: Any) -> Any:
        return agree(value) if self._layout.spans_processes else value

    def _draft(self, assistant_model: JaxModel | None) -> Any:
        return None if assistant_model is None else (assistant_model._traced, assistant_model._arrays())

    def _speculation(
        self, config: GenerationConfig, prompts: requests.Prompts, assistant_model: JaxModel | None
    ) -> Speculation | None:
        lookup: int | None = config.prompt_lookup_num_tokens
        if lookup is None and assistant_model is None:
            return None
        vocabularies = None if assistant_model is None else (self._num_logits(), assistant_model._num_logits())
        requests.check_speculation(
            [self._traced.traits, *([assistant_model._traced.traits] if assistant_model is not None else [])],
            sequences=len(prompts.given) * (config.num_return_sequences or 1),
            inputs=set(prompts.inputs) | set(prompts.static),
            vocabularies=vocabularies,
            is_both=lookup is not None and assistant_model is not None,
        )
        if assistant_model is not None:
            return Speculation(num_tokens=config.num_assistant_tokens or _ASSISTANT_TOKENS, max_ngram=0)
        assert lookup is not None
        return Speculation(num_tokens=lookup, max_ngram=config.max_matching_ngram_size or _MAX_NGRAM)

    def compile(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_lengths: Sequence[int] = (64,),
        *,
        max_new_tokens: int = 64,
        progress: bool = True,
        **options: Any,
    ) -> list[WarmedUp]:
        """Make the programs of `generate` before they are needed: each combination writes two tokens after a prompt of its shape.

        Args:
            batch_sizes: numbers of prompts; those in between use the next power of two.
            prompt_lengths: tokens, of the encoder's input where there is one; those in between use the next power of two.
            max_new_tokens: that calls will ask for; it decides the cache's capacity with the prompt's length.
            progress: show a bar where stderr is a terminal.
            **options: generation options that calls will have: which are active (sampling, top_k, penalties, an assistant model)
                shapes the programs, their values do not.

        Returns:
            What was traced and compiled for each combination, and how long it took; nothing where programs were on disk.

        Raises:
            InvalidInputError: a size is not positive, or a prompt does not fit the model's context.
            UnsupportedOptionError: the model reads something else than token ids, whose shapes a prompt's length does not say.
        """
        if self._traced.traits.main_input != "input_ids":
            raise UnsupportedOptionError(
                f"compile() does not know the inputs of {type(self).__name__}.",
                "Its programs depend on more than a batch size and a prompt's length.",
                "Call generate() once with inputs of the shapes to come.",
            )
        if min([*batch_sizes, *prompt_lengths, max_new_tokens], default=0) < 1:
            raise InvalidInputError(
                f"compile() got batch_sizes={list(batch_sizes)}, prompt_lengths={list(prompt_lengths)} and "
                f"max_new_tokens={max_new_tokens}.",
                "Programs are made for one prompt of one token or more.",
                "Pass positive numbers.",
            )
        assistant = options.pop("assistant_model", None)

        def run(batch_size: int, prompt_length: int) -> Size:
            given = {**options, "max_new_tokens": max_new_tokens}
            prompt = self.example_prompt(batch_size, prompt_length)
            request, _ = self._request(prompt, None, given, 0, None, assistant)
            loop, inputs = self._open(request)
            state = loop.start(inputs)
            if max_new_tokens > 1:
                state = loop.advance(state, 2)
            jax.block_until_ready(state)
            return (*request.prompts.padded_shape, loop.capacity)

        return warm_up(run, batch_sizes, prompt_lengths, progress=progress)

    def drive(self, main: Callable[[Any], Any]) -> Any:
        """In a run of several processes: call `main(model)` in process 0 alone, while the others compute with it.

        Args:
            main: gets the model; its calls run in every process.

        Returns:
            What `main` returned, in process 0; None in the others.

        Example:
            >>> model.drive(lambda model: print(tokenizer.decode(model.generate(ids)[0])))  # doctest: +SKIP
        """
        return drive(self, main)

    def map(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int,
        tokenizer: Any = None,
        column: str = "text",
        output: str | Path | None = None,
        select: Callable[[Any], Mapping[str, Any]] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> list[Any]:
        """A whole data set through the model, batch by batch, over every device of the mesh's axes "data" and "fsdp".

        Args:
            dataset: texts, lists of token ids, or mappings that have either under `column` (rows of `datasets`, for instance).
            batch_size: rows at a time.
            tokenizer: for texts.
            column: where a mapping's text or ids are.
            output: a file of JSON lines, one a row, in order, written as results come; a run that finds it goes on behind its
                last whole line.
            select: takes the outputs of a forward pass and gives arrays by name, [batch, …]; for models that write, it makes map
                run the forward pass instead of `generate`.
            progress: show a bar where stderr is a terminal.
            **options: of `generate`, or of the forward pass.

        Returns:
            For each row, in order: of models that write, `{"text": …}` for texts and `{"tokens": […]}` for ids, what was written
            alone; of others the outputs' rows, by name.

        Raises:
            InvalidInputError: rows that are no text and no ids, or an output file of something else.

        Example:
            >>> model.map(texts, batch_size=64, tokenizer=tokenizer, output="out.jsonl", max_new_tokens=32)  # doctest: +SKIP
        """
        if batch_size < 1:
            raise InvalidInputError(
                f"batch_size={batch_size}.", "A batch has a row at least.", "Pass a positive number."
            )
        writes = select is None and self.can_generate()
        pad: Any = self.generation_config.pad_token_id
        is_left = writes and not self._traced.traits.is_encoder_decoder

        def run(rows: list[Any]) -> list[Any]:
            inputs = batches.encode(rows, column, tokenizer, is_left=is_left, pad_token_id=pad or 0)
            if not writes:
                outputs = self(**inputs, **options)
                return batches.as_rows(outputs if select is None else select(outputs), len(rows))
            sequences = np.asarray(self.generate(**inputs, **options))
            start = 1 if self._traced.traits.is_encoder_decoder else inputs["input_ids"].shape[1]
            ends = as_ids_tuple(options.get("eos_token_id", self.generation_config.eos_token_id))
            written = [_until(row[start:].tolist(), ends) for row in sequences]
            if tokenizer is None:
                return [{"tokens": row} for row in written]
            return [{"text": tokenizer.decode(row, skip_special_tokens=True)} for row in written]

        total = len(dataset) if isinstance(dataset, Sized) else None
        where = None if output is None else Path(output)
        found = batches.map_rows(dataset, run, batch_size=batch_size, output=where, total=total, progress=progress)
        return list(found)

    def update(self, weights: Any) -> None:
        """Take over trained weights.

        Args:
            weights: by name, as `params`, some or all; or the module of `hfax.to_nnx`, or its state. Arrays are taken, not copied.

        Raises:
            InvalidInputError: a name that the model does not have, or another shape.
        """
        weights = weights_of(weights)
        for name, array in weights.items():
            if name not in self.params or tuple(array.shape) != tuple(self.params[name].shape):
                raise InvalidInputError(
                    f"{name!r}, {tuple(array.shape)}, is no weight of {type(self).__name__}.",
                    f"It has {tuple(self.params[name].shape)} there."
                    if name in self.params
                    else "It has none of that name.",
                    "Give weights by the names of `model.params`.",
                )
        self.params = {**self.params, **{n: a.astype(self.params[n].dtype) for n, a in weights.items()}}

    def prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's inputs as programs take them: checked, arrays narrow and on the host, and what their values decide beside them.

        Args:
            inputs: by name; `jax.ShapeDtypeStruct`s stay what they are.

        Raises:
            InvalidInputError: ids outside of the vocabulary, rows of several lengths.
        """
        read = lambda name, value: value if _is_described(value) else self._as_input(name, value)  # noqa: E731
        return self._traced.prepare({name: read(name, value) for name, value in inputs.items()})

    def move_to(self, mesh: Any) -> None:
        """Spread the weights over other devices.

        Args:
            mesh: sizes by axis, or a `jax.sharding.Mesh`, as `from_pretrained(parallelism=…)` takes them.

        Raises:
            InvalidInputError: see `from_pretrained`; or an adapter is merged.
        """
        self._layout = choose_layout(self._skeleton, mesh, self.quantization, self._layout.device)  # pyright: ignore[reportArgumentType]
        self.params = {n: jax.device_put(a, self._layout.weight(n)) for n, a in self.params.items()}
        self.buffers = {n: jax.device_put(b, self._layout.replicated) for n, b in self.buffers.items()}
        self._traced.use_buffers(self.buffers)
        self.adapters.move_to(self._layout)
        self._programs = ProgramCache(self._traced.key, self._layout)

    def _cast(self, dtype: torch.dtype) -> None:
        if self.adapters.configs:
            raise UnsupportedOptionError(
                "A model with adapters cannot be cast.",
                "Their arrays have dtypes of their own.",
                "Cast it first, then add or load the adapters.",
            )
        self._skeleton = with_dtype(self._skeleton, dtype)
        wanted = {name: jnp.dtype(str(t.dtype).removeprefix("torch.")) for name, t in self._skeleton.shapes.items()}
        self.params = {
            name: dataclasses.replace(a, dtype=wanted[name])
            if isinstance(a, QuantizedArray)
            else a.astype(wanted[name])
            for name, a in self.params.items()
        }
        self._traced = TracedModel(self._skeleton, self._tied, self.buffers)
        self.patches = self._traced.patches_used
        self._programs = ProgramCache(self._traced.key, self._layout)

    def _arrays(self) -> dict[str, jax.Array]:
        """What programs get beside their inputs: JAX cannot keep a program on disk that closes over arrays."""
        return {**self.buffers, **self.params}

    def sampling_values(self, prompt_length: int, **options: Any) -> dict[str, Any]:
        """The arrays that programs of `generate` take for these options, by name; see `make_sampling_spec`."""
        request, _ = self._request(self.example_prompt(1, prompt_length), None, dict(options), 0, None, None)
        _, values = make_sampling_spec(
            request.options.config,
            vocab_size=self._num_logits(),
            prompt_length=request.prompts.padded_length,
            max_new_tokens=request.options.max_new_tokens,
            **request.options.extra_sampling,
        )
        return dict(values)

    def _open(self, request: Request) -> tuple[Loop, dict[str, jax.Array]]:
        return open_loop(
            self._traced,
            self._programs,
            self._arrays(),
            self._layout,
            request.prompts,
            request.options,
            static=request.static,
            vocab_size=self._num_logits(),
            buckets=self._buckets,
        )

    def save_pretrained(self, folder: str | Path, *, format: str = "safetensors", max_shard_size: str = "50GB") -> None:
        """Write config, generation config and weights into a folder; weights as they are without an adapter, unless it is merged.

        Args:
            folder: made if it is not there; an interrupted save leaves what was there before.
            format: "safetensors", which plain transformers loads back bit for bit; or "orbax": each process of the run writes
                what its own devices hold, and `from_pretrained` reads it onto any mesh, each process what its own devices need; or
                "flax", which transformers' Flax classes (before version 5) read.
            max_shard_size: of one file of safetensors.

        Raises:
            InvalidInputError: another format.
            HfaxError: the folder cannot be written, or the disk is full; what was there before stays.
        """
        from hfax.load.save_pretrained import save_model

        own = self.params if self.adapters.active is None else self.adapters.without(self.params)
        save_model(Path(folder), self._skeleton, own, self.generation_config, format, max_shard_size)


def _is_described(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _until(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens before the first that ends a text."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
