"""The model that `from_pretrained` returns on the JAX backend: weights and the methods that run them.

Combines a traced module, its weights on a device and its compiled programs, and has the methods that users call. What the methods
do is elsewhere: `forward` and `generating` run programs, `warming` compiles them ahead of use, `mapping` runs them over datasets,
`weights` works on the arrays, `hfax.lora` on adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from hfax.backends.base_model import BaseModel, Request
from hfax.backends.jax.draft_models import DraftModels
from hfax.backends.jax.forward import reject_traced, run_forward, run_padded
from hfax.backends.jax.generating import call_own_generate, open_request, run_request, with_drafts
from hfax.backends.jax.mapping import map_dataset
from hfax.backends.jax.results import without_black_images
from hfax.backends.jax.size_classes import size_classes_of
from hfax.backends.jax.warming import compile_generation, compile_request, reject_other_inputs
from hfax.backends.jax.weights import (
    as_state_dict,
    cast,
    count_numbers,
    moved,
    packed_layouts,
    quantization_of,
    replaced,
)
from hfax.errors import UnsupportedOptionError
from hfax.generation.generate import GenerationLoop
from hfax.generation.generation_request import Prompts
from hfax.generation.host_loop import Streamer
from hfax.generation.image_classes import PackedImages
from hfax.generation.kept_cache import KeptCache, resumed
from hfax.generation.layer_outputs import check_layer_outputs
from hfax.generation.seeds import draw_seed
from hfax.generation.warm_up import WarmedUp
from hfax.launch.driven import drive
from hfax.launch.together import agree
from hfax.load.host_arrays import to_numpy
from hfax.load.nnx_state import weights_of
from hfax.load.skeleton import Skeleton, with_dtype
from hfax.lora.adapters import Adapters
from hfax.lora.methods import AdapterMethods
from hfax.parallelism import choose_layout
from hfax.programs.buckets import Buckets
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import ProgramCache
from hfax.sharding.layout import Layout
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.attention_weights import are_asked_for
from hfax.tracing.geometry import HostArray
from hfax.tracing.prefixes import UnprovenError
from hfax.tracing.structure import has_torch
from hfax.tracing.traced_model import TracedModel
from hfax.tracing.training import Training

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateNonBeamOutput


class JaxModel(AdapterMethods, BaseModel):
    """A transformers model whose weights are `jax.Array`s and whose calls are compiled by XLA.

    Created by `AutoModelForTPU`. Calling it runs one forward pass, `generate` generates tokens, `apply` is the pure function.

    Attributes:
        params: weights by checkpoint name, tied weights once. May be replaced by arrays of the same shapes.
        config: transformers' configuration.
        generation_config: defaults of `generate`.
        name_or_path: source of the weights.
        folder: local folder of the checkpoint; None for random weights.
        task: the pipeline task passed when loading, if any.
        pads_inputs: calls pad tokens and rows to the end of their size class, where the model's trace proves that no output depends
            on it, and prompts of `generate` pad their images, so that many sizes share few programs; False: a program for each
            size of tokens or images.
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
        self._programs = ProgramCache(self._traced.key_parts, layout, bundled=programs)
        self._size_classes = size_classes_of(skeleton.module, self._traced.traits)
        self._packed_images = PackedImages()
        self._drafts = DraftModels()

    @property
    def jax_device(self) -> jax.Device:
        """The device of the weights and programs; the first one if there are several."""
        return self._layout.device

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that the model is sharded over; None for one device."""
        return self._layout.mesh

    def sharding_plan(self) -> ShardingPlan | None:
        """How each weight is sharded over the devices, and why; printed as a table. None for one device.

        Examples:
            >>> model.sharding_plan() is None  # on one device
            True
        """
        return self._layout.plan

    @property
    def quantization(self) -> str | None:
        """ "int8", "int4", "fp8" or "fp4" if the matrices of linear layers are quantized, else None."""
        return quantization_of(self.params)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, tied weights counted once, without buffers.

        Args:
            only_trainable: count only the active adapter's parameters, if there is one, else those that the class does not freeze.
            exclude_embeddings: exclude the embedding tables.
        """
        among = set(self.adapters.trained(self.params)) - self._skeleton.untrained if only_trainable else None
        return count_numbers(self.params, self.module, among=among, exclude_embeddings=exclude_embeddings)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Size of the weights in bytes, each weight counted once over all devices.

        Args:
            return_buffers: include buffers that are not in the checkpoint.
        """
        arrays = [*self.params.values(), *(self.buffers.values() if return_buffers else ())]
        return sum(array.nbytes for array in arrays)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as torch tensors on the CPU, by transformers' names, tied weights under each of their names.

        On a CPU device they share memory with the arrays: do not modify them.

        Raises:
            UnsupportedOptionError: the weights are quantized; no torch module loads integers with scales.
        """
        return as_state_dict(self._own_weights(), self._tied, type(self).__name__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {self.num_parameters():,} parameters, {self.dtype}, {self._where()})"

    def _where(self) -> str:
        if self.mesh is None:
            return str(self.jax_device)
        return ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items() if size > 1)

    @property
    def skeleton(self) -> Skeleton:
        """The module without weights, with the names and shapes of all checkpoint tensors."""
        return self._skeleton

    @property
    def parts(self) -> ModelParts:
        """The components from which programs of the model are built, for code that builds further ones."""
        return ModelParts(
            traced=self._traced,
            programs=self._programs,
            layout=self._layout,
            weights=self._arrays(),
            tied=self._tied,
            num_logits=self.num_logits,
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
            params: weights by name, like `self.params`.
            *args: positional arguments of the transformers class.
            dropout_rng: a PRNG key; enables train mode, with dropout sampled from the key. The same key gives the same dropout.
            remat: rematerialize: the backward pass keeps only the input of each layer, and recomputes the layer.
            **inputs: keyword arguments of the transformers class; arrays (jax, numpy) are traced, everything else is static.

        Returns:
            The model's output (a `ModelOutput`, or a tuple with `return_dict=False`) with `jax.Array`s. Outside `jax.jit` it runs
            one operation at a time; call the model directly for a compiled pass.

        Examples:
            >>> def loss(params):
            ...     return model.apply(params, input_ids=ids, labels=ids).loss
            >>> gradients = jax.jit(jax.grad(loss))(model.params)
            >>> gradients.keys() == model.params.keys()
            True

        Raises:
            InvalidInputError: forward does not use a given name, or integers do not fit into 32 bits.
        """
        self._reject_unknown(inputs)
        training = Training(key=dropout_rng, remat=remat, lora_dropout=self.adapters.dropout)
        return self._traced.apply(params, args, inputs, training)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """One compiled forward pass.

        Args:
            *args: positional arguments of the transformers class.
            **inputs: keyword arguments of the transformers class. torch tensors, numpy and jax arrays, and lists of numbers are
                traced: other values of the same shapes do not recompile. Everything else (`use_cache=False`,
                `output_hidden_states=True`, …) becomes part of the program. 64-bit values become 32-bit ones.

        Tokens and rows share programs with other sizes, see `pads_inputs` and `why_not_padded`.

        Returns:
            The model's output, with torch tensors if any input was one, else with jax arrays.

        Raises:
            InvalidInputError: ids are outside the vocabulary, images do not match the prompt's placeholders, or forward does not
                use a given name.
            OutOfMemoryError: the program does not fit the device.
        """
        inputs = self._by_name(args, inputs)
        reject_traced(inputs, type(self).__name__)
        given = self.prepare_inputs(inputs)
        is_exact = given.get("return_dict") is False or are_asked_for(self.config, given)
        prepared = given if is_exact else self.in_image_classes(given)
        return without_black_images(self._run(prepared, to_torch=has_torch(inputs)), given, prepared)

    def _run(self, prepared: dict[str, Any], *, to_torch: bool) -> Any:
        parts = (self._traced, self._programs, self._layout, self._arrays())
        for call in self._size_classes.calls(prepared) if self.pads_inputs else ():
            try:
                return run_padded(*parts, call, to_torch=to_torch)
            except UnprovenError as error:
                self._size_classes.refuse(call, str(error))
        return run_forward(*parts, prepared, to_torch=to_torch)

    @property
    def why_not_padded(self) -> tuple[str, ...]:
        """Why calls so far were compiled for their own size: where an output may depend on padding. Empty if none was."""
        return tuple(dict.fromkeys(self._size_classes.refused.values()))

    forward = __call__
    """Alias of `__call__`, which transformers' pipelines call."""

    @overload
    def generate(
        self, inputs: Any = None, *, return_dict_in_generate: Literal[True], **options: Any
    ) -> GenerateNonBeamOutput: ...
    @overload
    def generate(
        self, inputs: torch.Tensor, *, return_dict_in_generate: Literal[False] | None = None, **options: Any
    ) -> torch.Tensor: ...
    @overload
    def generate(
        self,
        inputs: np.ndarray | jax.Array | Sequence[Sequence[int]],
        *,
        return_dict_in_generate: Literal[False] | None = None,
        **options: Any,
    ) -> jax.Array: ...
    @overload
    def generate(
        self, inputs: None = None, *, return_dict_in_generate: Literal[False] | None = None, **options: Any
    ) -> torch.Tensor | jax.Array: ...
    def generate(
        self,
        inputs: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        assistant_model: JaxModel | PreTrainedModel | None = None,
        **options: Any,
    ) -> Any:
        """Generate tokens after each prompt, with the names and defaults of `transformers.GenerationMixin.generate`.

        Args:
            inputs: prompts, [batch, length] token ids (torch, numpy, jax or lists), left-padded; or pass `input_ids=`. For
                encoder-decoders, the encoder input.
            generation_config: generation options; default: the model's.
            streamer: transformers' `TextStreamer` or `TextIteratorStreamer`, for one prompt.
            tokenizer: required with `stop_strings`.
            seed: sampling seed; None draws one from torch's generator, so `transformers.set_seed` applies.
            assistant_model: a smaller model with the same vocabulary for speculative decoding, of hfax or of plain transformers
                (whose weights are copied to the device at its first call): it drafts `num_assistant_tokens` at a time, which this
                model verifies in one step. `prompt_lookup_num_tokens` drafts from the text instead. Both change speed, not output,
                and support one sequence.
            **options: any generation option by name; `logits_processor`, `prefix_allowed_tokens_fn` and `stopping_criteria`, as in
                transformers (what is neither transformers' own nor an `hfax.device_processor` runs on the host after every token);
                `negative_prompt_ids` and `negative_prompt_attention_mask` for `guidance_scale`; and further model
                inputs (`attention_mask`, `inputs_embeds`, `pixel_values`, …). In addition to transformers': `presence_penalty`
                (subtracted from the logits of tokens already generated), `frequency_penalty` (once per occurrence), and
                `output_log_probs=True` (log-probabilities of the new tokens as `log_probs`). `past_key_values` is the `cache` that
                an earlier call returned: the prompts begin with its texts, and only the tokens after them are read.
                `kv_cache_dtype="fp8"` rounds cached keys and values to float8_e4m3fn, as in vLLM without calibrated scales.

        Returns:
            [batch · num_return_sequences, prompt + new] ids, prompts first; int64 torch for torch prompts, else int32 jax. With
            `return_dict_in_generate=True`, transformers' output class with `sequences`, `scores`, `logits`, and the outputs of
            layers (`output_hidden_states`, `output_attentions`), for which the finished text is read once more; of a beam search
            `beam_indices` and `sequences_scores`; and for other calls of decoders `cache`: an opaque `KeptCache`, which holds
            memory of the device for as long as it exists.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
            UnsupportedOptionError: hfax does not implement an option; options are never ignored.
        """

        def run(prompt: Any, config: Any, options: dict[str, Any], assistant: Any = None) -> Any:
            request, to_torch = self._read_request(prompt, config, options, seed, assistant)
            return run_request(
                *self.open_loop(request),
                request,
                streamer=streamer,
                tokenizer=tokenizer,
                traits=self._traced.traits,
                forward=self.__call__,
                to_torch=to_torch,
            )

        if not self.has_own_generate:
            return run(inputs, generation_config, options, assistant_model)
        named = {"generation_config": generation_config, "assistant_model": assistant_model}
        return call_own_generate(
            self.module,
            inputs,
            {**options, **{name: given for name, given in named.items() if given is not None}},
            generation_config=self.generation_config,
            forward=self.__call__,
            loop=run,
            as_host=self._host_array,
            put=self._layout.put,
        )

    def read_request(
        self, inputs: Any, *, seed: int = 0, assistant_model: JaxModel | PreTrainedModel | None = None, **options: Any
    ) -> Request:
        """The checked and padded call of `generate`, for code that runs its loop step by step.

        Args:
            inputs: as in `generate`.
            seed: as in `generate`.
            assistant_model: as in `generate`.
            **options: as in `generate`, without a streamer.
        """
        return self._read_request(inputs, None, options, seed, assistant_model)[0]

    def open_loop(self, request: Request) -> tuple[GenerationLoop, dict[str, jax.Array]]:
        """The loop of `generate` before its first step, and the inputs of its `start`.

        Args:
            request: from `read_request`.
        """
        return open_request(self.parts, request, self._buckets)

    def open_call(self, inputs: Any, **options: Any) -> tuple[GenerationLoop, dict[str, jax.Array], Prompts]:
        """The loop of a call of `generate` before its first step, the inputs of its `start`, and the padded prompts.

        Args:
            inputs: as in `generate`.
            **options: as in `generate`, without a streamer.
        """
        request = self.read_request(inputs, **options)
        return *self.open_loop(request), request.prompts

    def _read_request(
        self,
        inputs: Any,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        seed: int | None,
        assistant_model: JaxModel | PreTrainedModel | None,
    ) -> tuple[Request, bool]:
        """The checked call of `generate`, with a seed shared by all processes, and whether its inputs are torch tensors."""
        seeds = draw_seed
        if self._layout.spans_processes:  # a given one, too: a command draws it in each process
            seed, seeds = None if seed is None else agree(seed), lambda: agree(draw_seed())
        request, to_torch = self._request(inputs, generation_config, options, seed, seeds)
        check_layer_outputs(request.prompts, request.options, request.static)
        parts = self.parts
        return with_drafts(request, parts, self._drafts.parts_of(assistant_model, parts)), to_torch

    def _resumed(self, kept: Any, prompts: Prompts, inputs: Mapping[str, Any]) -> Prompts:
        if not isinstance(kept, KeptCache):
            raise UnsupportedOptionError(
                f"past_key_values is a {type(kept).__name__}.",
                "hfax's programs read caches of their own layout.",
                "Pass the `cache` that an earlier generate(..., return_dict_in_generate=True) of this model returned.",
            )
        return resumed(kept, prompts, inputs, self._traced.key)

    def compile(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_lengths: Sequence[int] = (64,),
        *,
        max_new_tokens: int = 64,
        progress: bool = True,
        **options: Any,
    ) -> list[WarmedUp]:
        """Compile the programs of `generate` ahead of use, without running them; on one device, those of a combination in parallel.

        Args:
            batch_sizes: numbers of prompts, rounded up to a power of two.
            prompt_lengths: prompt lengths in tokens (of the encoder input, if there is one), rounded up to a power of two.
            max_new_tokens: value that later calls will use; with the prompt length it determines the cache capacity.
            progress: show a progress bar if stderr is a terminal.
            **options: generation options that later calls will use. Which ones are active (sampling, top_k, penalties, an
                assistant model) shapes the programs; their values do not.

        Returns:
            What was traced and compiled for each combination, and how long it took; empty if the programs were on disk.

        Raises:
            InvalidInputError: a size is not positive, or a prompt does not fit the model's context.
            UnsupportedOptionError: the model's main input is not token ids, so a prompt length does not determine its shapes.
        """
        reject_other_inputs(self._traced.traits.main_input, type(self).__name__)
        given = {**options, "max_new_tokens": max_new_tokens}

        def read(batch_size: int, prompt_length: int) -> Request:
            return self.read_request(self.example_prompt(batch_size, prompt_length), **given)

        sizes = {"max_new_tokens": max_new_tokens, "progress": progress}
        return compile_generation(read, self.open_loop, batch_sizes, prompt_lengths, **sizes)

    def compile_call(self, inputs: Any, *, tokenizer: Any = None, **options: Any) -> None:
        """Compile the programs of `generate(inputs, **options)`, without running them; another thread may generate meanwhile.

        Args:
            inputs: as in `generate`; only their shapes matter.
            tokenizer: as in `generate`; no program depends on it.
            **options: as in `generate`, without a streamer.

        Raises:
            InvalidInputError: as in `generate`.
            UnsupportedOptionError: as in `generate`.
            OutOfMemoryError: a program does not fit the device.
        """
        compile_request(self.read_request(inputs, **options), self.open_loop)

    def drive(self, main: Callable[[Any], Any]) -> Any:
        """In a multi-process run, call `main(model)` in process 0 only, while the other processes compute with it.

        Args:
            main: takes the model; its model calls run in every process.

        Returns:
            The result of `main` in process 0; None in the others.

        Examples:
            >>> model.drive(lambda model: model.generate(ids, max_new_tokens=2).shape)
            (1, 6)
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
        """Run the model over a dataset, batch by batch, on all devices of the mesh axes "data" and "fsdp".

        For forward passes, rows of similar length make a batch: those of 16 batches are sorted and written together.

        Args:
            dataset: texts, lists of token ids, or mappings with either under `column` (such as rows of `datasets`).
            batch_size: rows per batch.
            tokenizer: required for texts.
            column: key of the text or ids in a mapping.
            output: a JSON Lines file, one line per row in order, written as results are produced; if it exists, the run resumes
                after its last complete line.
            select: maps the outputs of a forward pass to arrays by name, [batch, …]; with it, generative models run the forward
                pass instead of `generate`.
            progress: show a progress bar if stderr is a terminal.
            **options: options of `generate` or of the forward pass.

        Returns:
            One result per row, in order. Generative models return only the new tokens: `{"text": …}` for texts and
            `{"tokens": […]}` for ids; other models return the row of each output, by name.

        Raises:
            InvalidInputError: rows are neither texts nor ids, or the output file belongs to another dataset.

        Examples:
            >>> rows = model.map(["Return a", "Raise"], batch_size=2, tokenizer=tokenizer, max_new_tokens=2)
            >>> [sorted(row) for row in rows]
            [['text'], ['text']]
        """
        return map_dataset(
            dataset,
            self.__call__,
            self.generate if select is None and self.can_generate() else None,
            options,
            generation_config=self.generation_config,
            is_encoder_decoder=self._traced.traits.is_encoder_decoder,
            batch_size=batch_size,
            tokenizer=tokenizer,
            column=column,
            output=None if output is None else Path(output),
            select=select,
            progress=progress,
        )

    def update(self, weights: Any) -> None:
        """Replace weights, for example by trained ones.

        Args:
            weights: some or all weights by name, like `params`; or the module from `hfax.to_nnx`, or its state. Arrays are not
                copied.

        Raises:
            InvalidInputError: the model has no weight of a given name, or its shape differs.
        """
        self.params = replaced(self.params, weights_of(weights), type(self).__name__)

    def prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs in the form that programs take: checked, 32-bit host arrays, plus inputs derived from their values.

        Args:
            inputs: inputs by name; `jax.ShapeDtypeStruct`s are unchanged.

        Raises:
            InvalidInputError: ids are outside the vocabulary, or rows differ in length.
        """
        read = {
            name: value if isinstance(value, jax.ShapeDtypeStruct) else self.as_input(name, value)
            for name, value in inputs.items()
        }
        return self._traced.prepare(read)

    def in_image_classes(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs with packed images padded to a size class, so that images of many sizes share few programs.

        Args:
            inputs: from `prepare_inputs`. They are unchanged if `pads_inputs` is off, and for a model that reads sizes of images in
                a way of its own: it has a program for each mix of sizes.
        """
        ids = inputs.get("input_ids")
        if not self.pads_inputs or not isinstance(ids, np.ndarray):
            return dict(inputs)
        arrays = {n: v.array if isinstance(v, HostArray) else v for n, v in inputs.items()}
        padded = {**inputs, **self._packed_images.padded(self.config, ids, arrays)}
        return padded if self._traced.packs_images(self.params, padded) else dict(inputs)

    def move_to(self, mesh: Any) -> None:
        """Reshard the weights over other devices.

        Args:
            mesh: sizes by axis, or a `jax.sharding.Mesh`, as in `from_pretrained(parallelism=…)`.

        Raises:
            InvalidInputError: `mesh` is invalid for `from_pretrained`, or an adapter is merged.
        """
        self._layout = choose_layout(self._skeleton, mesh, packed_layouts(self.params), self._layout.device)
        self.params = {n: moved(a, self._layout.weight(n)) for n, a in self.params.items()}
        self.buffers = {n: jax.device_put(b, self._layout.replicated) for n, b in self.buffers.items()}
        self._traced.use_buffers(self.buffers)
        self.adapters.move_to(self._layout)
        self._programs = ProgramCache(self._traced.key_parts, self._layout)

    def _cast(self, dtype: torch.dtype) -> None:
        self.adapters.reject_cast()
        self._skeleton = with_dtype(self._skeleton, dtype)
        self.params = cast(self.params, self._skeleton, dtype)
        self._traced = TracedModel(self._skeleton, self._tied, self.buffers)
        self.patches = self._traced.patches_used
        self._programs = ProgramCache(self._traced.key_parts, self._layout)

    def described(self, programs: ProgramCache) -> JaxModel:
        """An abstract copy of the model, with array shapes instead of arrays, which compiles programs without running them.

        Args:
            programs: the program cache of the copy.
        """
        other = copy.copy(self)
        other._layout, other._programs = self._layout.described(), programs
        other.params, other.buffers = other._layout.put(self.params), other._layout.put(self.buffers)
        return other

    def _takes_packed_images(self, inputs: Mapping[str, np.ndarray]) -> bool:
        return self._traced.takes_packed_images(self.params, inputs)

    def _own_weights(self) -> dict[str, jax.Array]:
        """The weights without the arrays of an active adapter."""
        return self.params if self.adapters.active is None else self.adapters.without(self.params)

    def _arrays(self) -> dict[str, jax.Array]:
        """The arrays that programs take besides inputs: JAX cannot serialize a program that closes over arrays."""
        return {**self.buffers, **self.params}

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        format: str = "safetensors",
        max_shard_size: str = "50GB",
        dequantize: bool = False,
    ) -> None:
        """Write config, generation config and weights to a folder; adapter weights are included only if merged.

        Args:
            folder: created if it does not exist; an interrupted save leaves previous content unchanged.
            format: "safetensors", which plain transformers loads bit for bit unless weights are quantized; "compressed-tensors" for
                models with `quantization` "int8" or "int4" and most quantized checkpoints: transformers and vLLM load it, with the
                embedding table and output head in the model's dtype; "orbax", where each process writes the shards of its own
                devices, and `from_pretrained` loads onto any mesh, each process reading only the shards it needs; or "flax", for
                transformers' Flax classes (before version 5).
            max_shard_size: maximum size of one safetensors file.
            dequantize: write quantized weights as numbers of the model's dtype, for every library.

        Raises:
            InvalidInputError: the format is unknown, or cannot express the weights.
            HfaxError: the folder cannot be written, or the disk is full; previous content is kept.
        """
        from hfax.load.save_pretrained import save_model

        save_model(
            Path(folder),
            self._skeleton,
            self._own_weights(),
            self.generation_config,
            format,
            max_shard_size,
            dequantize=dequantize,
        )
