"""The part of a model shared by all backends: traits, input checks, and the request of `generate`.

No backend is imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import GenerationConfig, PretrainedConfig

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation import generation_request as requests
from hfax.generation.custom_processors import Place, read_processors, reject_beside_beams
from hfax.generation.generation_request import GenerationOptions, as_ids_tuple
from hfax.generation.image_classes import ImagePadding, image_padding
from hfax.generation.layer_outputs import asked_for
from hfax.generation.overrides import has_own_generate, without_dropped
from hfax.generation.seeds import draw_seed
from hfax.generation.stopping import end_tokens, read_stopping
from hfax.known_words import missing_attribute
from hfax.kv_cache.dtypes import cache_dtype_of
from hfax.load.host_arrays import narrow, to_numpy
from hfax.load.skeleton import FLOAT_DTYPES, Skeleton, resolve_dtype
from hfax.patches import registry
from hfax.programs.buckets import Buckets
from hfax.tracing import geometry
from hfax.tracing.forward_arguments import known_arguments, reject_unknown
from hfax.tracing.structure import flatten, has_torch, is_array, is_of_jax, unflatten
from hfax.tracing.traits import ModelTraits

_ID_INPUTS = ("input_ids", "decoder_input_ids")
_NOT_CONFIGURED = (
    *("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "past_key_values", "cache", "kv_cache_dtype"),
)
"""Arguments of `generate` that are neither in GenerationConfig nor inputs of a model."""
_SAMPLING_EXTRAS = ("presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked call of `generate`.

    Args:
        prompts: the padded prompts.
        options: the resolved options.
        static: forward arguments that are not arrays.
        given: of an encoder-decoder, forward's arrays by name as the caller gave them.
    """

    prompts: requests.Prompts
    options: GenerationOptions
    static: dict[str, Any]
    given: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class BaseModel:
    """A transformers model on a backend.

    Attributes:
        config: transformers' configuration.
        generation_config: defaults of `generate`.
        name_or_path: source of the weights.
        folder: local folder of the checkpoint; None for random weights.
        task: the pipeline task passed when loading, if any.
        patches: names of hfax's patches used so far.
    """

    backend = ""
    """The backend's name."""
    pads_inputs = True
    """Whether inputs are padded to size classes where that changes nothing."""

    def __init__(
        self,
        skeleton: Skeleton,
        traits: ModelTraits,
        *,
        generation_config: GenerationConfig,
        name_or_path: str,
        folder: Path | None,
        task: str | None,
        buckets: Buckets | None = None,
    ) -> None:
        self.config: PretrainedConfig = skeleton.module.config
        self.generation_config = generation_config
        self.name_or_path = name_or_path
        self.folder = folder
        self.task = task
        self.patches: set[str] = set()
        self._skeleton = skeleton
        self._traits = traits
        self._buckets = buckets or Buckets()

    @property
    def patches_used(self) -> frozenset[str]:
        """Names of hfax's patches used when the model was traced in this process; empty before the first call."""
        return frozenset(self.patches)

    @property
    def device(self) -> torch.device:
        """The device of torch inputs and results: always the CPU. For transformers' pipelines."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floating-point weights."""
        return self._skeleton.module.dtype

    def to(self, device: Any = None, dtype: Any = None) -> Self:
        """Cast the weights, in place.

        Args:
            device: "cpu", which has no effect (torch inputs and outputs are on the CPU, and pipelines call it); or a dtype.
            dtype: "float32", "bfloat16" or "float16", or a torch dtype.

        Returns:
            The model itself.

        Raises:
            UnsupportedOptionError: the device is not "cpu" (weights are placed at loading), or the model cannot be cast.
            InvalidInputError: the dtype is not supported.
        """
        if isinstance(device, torch.dtype) or device in FLOAT_DTYPES:
            device, dtype = None, device
        if device is not None and str(device).split(":")[0] != "cpu":
            raise UnsupportedOptionError(
                f"An hfax model cannot be moved to {device}.",
                "Its weights stay on the device they were loaded to; torch inputs and outputs are on the CPU.",
                "Remove device; set JAX_PLATFORMS or PJRT_DEVICE before loading the model to select the platform.",
            )
        if dtype is not None and (wanted := resolve_dtype(dtype, self.config, None)) != self._skeleton.dtype:
            self._cast(wanted)
        return self

    def half(self) -> Self:
        """Cast the weights to float16, in place; see `to`."""
        return self.to(dtype=torch.float16)

    def bfloat16(self) -> Self:
        """Cast the weights to bfloat16, in place; see `to`."""
        return self.to(dtype=torch.bfloat16)

    def float(self) -> Self:
        """Cast the weights to float32, in place; see `to`."""
        return self.to(dtype=torch.float32)

    def _cast(self, dtype: torch.dtype) -> None:
        raise UnsupportedOptionError(
            f"The backend {self.backend} cannot cast a loaded model.",
            "Its weights are already on the device.",
            f'Load it with dtype="{str(dtype).removeprefix("torch.")}".',
        )

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(type(self).__name__, name)

    def compute_transition_scores(
        self, sequences: Any, scores: Any, beam_indices: Any = None, normalize_logits: bool = False
    ) -> torch.Tensor:
        """The score of each generated token, as `transformers.GenerationMixin.compute_transition_scores` computes it.

        Args:
            sequences: [batch, length] ids, from `generate(..., return_dict_in_generate=True, output_scores=True)`.
            scores: [batch, vocab] per step, from the same output.
            beam_indices: as in transformers.
            normalize_logits: apply the log-softmax first.

        Returns:
            [batch, steps] float32 torch tensor.
        """
        given = torch.from_numpy(self._host_array("sequences", sequences)).long()
        steps = tuple(torch.from_numpy(np.array(self._host_array("scores", step))) for step in scores)
        if beam_indices is not None:
            beam_indices = torch.from_numpy(self._host_array("beam_indices", beam_indices)).long()
        return self._skeleton.module.compute_transition_scores(given, steps, beam_indices, normalize_logits)  # pyright: ignore[reportCallIssue]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **options: Any,
    ) -> str:
        """Save the model with `save_pretrained` and upload it to the Hugging Face Hub.

        Args:
            repo_id: "owner/name"; created if it does not exist.
            commit_message: commit message.
            private: visibility of a newly created repository; None: the account's default.
            token: Hub token; None uses the one from `hf auth login`.
            revision: branch; None: the main branch.
            create_pr: open a pull request instead of committing to the branch.
            **options: options of `save_pretrained`.

        Returns:
            The URL of the commit.

        Raises:
            CheckpointAccessError: the token has no write access, or the Hub cannot be reached.
        """
        from hfax.load.hub import upload_folder

        with tempfile.TemporaryDirectory(prefix="hfax-upload-") as folder:
            self.save_pretrained(folder, **options)
            return upload_folder(
                Path(folder),
                repo_id,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
            )

    def eval(self) -> BaseModel:
        """Return the model; it is always in evaluation mode."""
        return self

    @property
    def module(self) -> torch.nn.Module:
        """The transformers module without weights: its structure and code."""
        return self._skeleton.module

    @property
    def vocabulary_size(self) -> int | None:
        """Rows of the embedding table; None if there is no single table."""
        return self._vocab_size()

    @property
    def context_length(self) -> int | None:
        """Maximum positions of the text model; None if unbounded."""
        return self._context()

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return self._traits.is_encoder_decoder

    @property
    def has_own_generate(self) -> bool:
        """Whether the class replaces transformers' general `generate`, as Whisper's does."""
        return has_own_generate(self._skeleton.module)

    def can_generate(self) -> bool:
        """Whether `generate` works on this class."""
        return bool(self._skeleton.module.can_generate())

    def config_value(self, name: str) -> Any:
        """A value of the text model's config; None if it has none of this name.

        Args:
            name: such as "pad_token_id".
        """
        return self.config.get_text_config().to_dict().get(name)

    def default_option(self, name: str) -> Any:
        """The value of a generation option in `generation_config`; None for transformers' default."""
        return getattr(self.generation_config, name, None)

    def generate_and_keep(self, inputs: Any = None, **options: Any) -> tuple[np.ndarray, Any]:
        """`generate` for a text that a later call continues.

        Args:
            inputs: as in `generate`.
            **options: as in `generate`.

        Returns:
            [batch, prompt + new] ids on the host, and the `past_key_values` of the next call; None if there is none.
        """
        result = self.generate(inputs, return_dict_in_generate=True, **options)
        return np.asarray(result["sequences"]), result.get("cache")

    @property
    def main_input_name(self) -> str:
        """The name of the first input."""
        return self._traits.main_input

    @property
    def input_modalities(self) -> Any:
        """Input modalities of the class according to transformers ("text", "image", …)."""
        return self._skeleton.module.input_modalities

    @property
    def output_modalities(self) -> Any:
        """Output modalities of the class according to transformers."""
        return self._skeleton.module.output_modalities

    def _request(
        self,
        inputs: Any,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        seed: int | None,
        draw_seed: Callable[[], int] = draw_seed,
    ) -> tuple[Request, bool]:
        """The checked call of `generate`, and whether its inputs are torch tensors."""
        given = options.pop("input_ids", None)
        prompt = given if inputs is None else inputs
        keep_log_probs = bool(options.pop("output_log_probs", False))
        extras = {n: options.pop(n) for n in _SAMPLING_EXTRAS if options.get(n) is not None}
        started, further = time.time(), {n: options.pop(n, None) for n in _NOT_CONFIGURED}
        config, model_inputs = requests.resolve_generation_config(self.generation_config, generation_config, options)
        known = set(inspect.signature(self._skeleton.module.forward).parameters)
        mask = model_inputs.get("attention_mask")
        if mask is not None and "attention_mask" not in known:
            requests.reject_padding(mask, type(self._skeleton.module).__name__)
            del model_inputs["attention_mask"]  # every tokenizer returns one; without padding it has no effect
        requests.reject_unknown(model_inputs, known)
        requests.reject_not_taken(model_inputs)
        model_inputs.pop("labels", None)  # as in transformers' generate: they are for a loss
        to_torch = has_torch([prompt, model_inputs])
        arrays = {n: self._host_array(n, v) for n, v in model_inputs.items() if is_array(v) or isinstance(v, list)}
        static = {n: v for n, v in model_inputs.items() if n not in arrays and v is not None}
        arrays = registry.prepare_inputs(self._skeleton.module, arrays, self.patches, self.backend)
        as_given = self._as_given(prompt, arrays) if self._traits.is_encoder_decoder else {}
        kept = further["past_key_values"] if further["cache"] is None else further["cache"]
        prompts = self._prompts(prompt, arrays, config)
        prompts = prompts if kept is None else self._resumed(kept, prompts, {**arrays, **static})
        width = prompts.given.shape[1]
        stopping = read_stopping(further["stopping_criteria"], config, width, started)
        most = requests.resolve_max_new_tokens(config, prompts.longest, self._context())
        place = Place(prompt_length=width, max_length=width + most)
        custom = read_processors(
            further["logits_processor"],
            further["prefix_allowed_tokens_fn"],
            config,
            place,
            self.config.get_text_config().vocab_size,
        )
        extras["encoder_ids"] = prompts.encoder_ids
        negative = [
            None if further[n] is None else self._host_array(n, further[n])
            for n in ("negative_prompt_ids", "negative_prompt_attention_mask")
        ]
        reject_beside_beams(custom, stopping.criteria, config)
        eos_ids = as_ids_tuple(config.eos_token_id)
        ends = end_tokens(further["stopping_criteria"])
        keep = [n for n, on in (("scores", config.output_scores), ("logits", config.output_logits)) if on]
        options_resolved = GenerationOptions(
            config=config,
            max_new_tokens=most,
            seed=int(seed) if seed is not None else draw_seed() if config.do_sample else 0,
            eos_token_ids=eos_ids if ends is None else ends,
            pad_token_id=config.pad_token_id if config.pad_token_id is not None else (eos_ids or (0,))[0],
            keep=(*keep, *(("log_probs",) if keep_log_probs else ())),
            extra_sampling=extras,
            custom=custom,
            stopping=stopping,
            cache_dtype=cache_dtype_of(further["kv_cache_dtype"]),
            negative=requests.read_negative(
                *negative, config=config, prompts=prompts, traits=self._traits, vocab_size=self._vocab_size()
            ),
        )
        return Request(prompts=prompts, options=options_resolved, static=static, given=as_given), to_torch

    def _as_given(self, prompt: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        main = self._traits.main_input
        return {**arrays, **({main: self._host_array(main, prompt)} if prompt is not None else {})}

    def _resumed(self, kept: Any, prompts: requests.Prompts, inputs: Mapping[str, Any]) -> requests.Prompts:
        """The prompts of which a cache holds the beginning."""
        raise UnsupportedOptionError(
            f"The backend {self.backend} does not take past_key_values.",
            "Its loop reads every prompt from the beginning.",
            'Pass the whole text without it, or use backend="jax".',
        )

    @functools.cached_property
    def _known_arguments(self) -> tuple[frozenset[str], tuple[str, ...]]:
        return known_arguments(self._skeleton.module)

    def _reject_unknown(self, inputs: Mapping[str, Any]) -> None:
        """Raise for names that forward would ignore."""
        reject_unknown(type(self._skeleton.module).__name__, inputs, self._known_arguments)

    def _by_name(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
        """Forward arguments by name.

        Raises:
            InvalidInputError: an argument is passed twice, there are too many, or forward does not use one.
        """
        self._reject_unknown(inputs)
        names = list(inspect.signature(self._skeleton.module.forward).parameters)
        twice = sorted(set(names[: len(args)]) & set(inputs))
        if twice or len(args) > len(names):
            raise InvalidInputError(
                f"{len(args)} inputs were passed by position; also passed by name: {', '.join(twice) or 'none'}.",
                f"Each input can be passed once, and the model takes {len(names)}.",
                f"Pass inputs by name: {', '.join(names)}.",
            )
        return {**dict(zip(names, args, strict=False)), **inputs}

    def read_prompt(self, prompt: Any, inputs: Mapping[str, Any], buckets: Buckets) -> requests.Prompts:
        """A prompt in the form that programs take.

        Args:
            prompt: [1, length] token ids; for encoder-decoders, the encoder input.
            inputs: further model inputs, by name.
            buckets: how the length is rounded up.

        Raises:
            InvalidInputError: ids are outside the vocabulary, or inputs do not match each other.
        """
        arrays = {name: self._host_array(name, value) for name, value in inputs.items()}
        arrays = registry.prepare_inputs(self._skeleton.module, arrays, self.patches, self.backend)
        config, _ = requests.resolve_generation_config(self.generation_config, None, {})
        return self._prompts(prompt, arrays, config, buckets)

    def example_prompt(self, rows: int, length: int) -> np.ndarray:
        """[rows, length] ids that are not padding."""
        return np.full((rows, length), int(self.generation_config.pad_token_id == 0), np.int32)

    def _prompts(
        self, prompt: Any, arrays: dict[str, np.ndarray], config: GenerationConfig, buckets: Buckets | None = None
    ) -> requests.Prompts:
        traits, buckets = self._traits, buckets or self._buckets
        if traits.is_encoder_decoder:
            if requests.EMBEDS in arrays:
                raise UnsupportedOptionError(
                    f"generate() of an encoder-decoder does not take {requests.EMBEDS}.",
                    "The encoder reads token ids, which are embedded inside the program.",
                    f"Pass {traits.main_input}, or generate with plain transformers.",
                )
            main, encoder = traits.main_input, self._as_given(prompt, arrays)
            decoder = encoder.pop("decoder_input_ids", None)
            if main not in encoder:
                raise InvalidInputError(
                    f"generate() got no {main}.",
                    f"{type(self._skeleton.module).__name__} is an encoder-decoder: it generates from its encoder input.",
                    f"Pass {main}=… (the tokenizer's or processor's output).",
                )
            if decoder is None:
                decoder = requests.decoder_start(config, len(encoder[main]))
            else:
                decoder = self._from_decoder_start(config, decoder)
            return requests.pad_encoder_inputs(
                encoder,
                decoder,
                main_input=main,
                vocab_size=self._vocab_size(),
                pad_token_id=config.pad_token_id,
                buckets=buckets,
            )
        embeds, known = arrays.get(requests.EMBEDS), prompt is not None
        if embeds is not None:
            prompt = requests.ids_of_embeds(embeds, None if prompt is None else self._host_array("input_ids", prompt))
            arrays = {"attention_mask": np.ones(embeds.shape[:2], np.int32), **arrays} if not known else arrays
        if prompt is None:
            if config.bos_token_id is None:
                raise InvalidInputError(
                    "generate() got no prompt.",
                    "The model has no BOS token to start from.",
                    "Pass input_ids=… of shape [batch, length].",
                )
            prompt = np.full((1, 1), config.bos_token_id)
        ids = self._host_array("input_ids", prompt)
        arrays = without_dropped(self._skeleton.module, ids, arrays)
        images = None if asked_for(config) else self._image_padding(np.atleast_2d(ids), arrays, buckets)
        prompts = requests.pad_decoder_prompts(
            ids,
            arrays.pop("attention_mask", None),
            vocab_size=self._vocab_size() if embeds is None or known else None,
            pad_token_id=config.pad_token_id,
            eos_token_ids=as_ids_tuple(config.eos_token_id),
            context=self._context(),
            buckets=buckets,
            is_exact=traits.counts_padding,
            extras=arrays,
            traced_geometry=traits.traced_geometry,
            more=0 if images is None else len(images.tokens),
        )
        if traits.takes_position_ids and "position_ids" not in prompts.inputs:
            positions = geometry.prompt_positions(self._skeleton.module, {**prompts.inputs, **prompts.static})
            if positions is not None:
                prompts.inputs["position_ids"] = positions
        prompts = prompts if images is None else images.applied(prompts)
        return prompts if embeds is None or known else dataclasses.replace(prompts, given=prompts.given[:, :0])

    def _image_padding(
        self, ids: np.ndarray, arrays: Mapping[str, np.ndarray], buckets: Buckets
    ) -> ImagePadding | None:
        """What fills the images' size class; None: there are none, or each mix of their sizes is a program of its own."""
        if not self.pads_inputs or self._traits.counts_padding or requests.EMBEDS in arrays:
            return None
        (rows, length), context = ids.shape, self._context()
        padding = image_padding(self._skeleton.module, ids, arrays)
        if padding is None or not buckets.have_room(rows, length, len(padding.tokens), context and context - 1):
            return None
        needs_no_patch = padding.arrays.keys() == {"pixel_values"}
        return padding if needs_no_patch or self._takes_packed_images({"input_ids": ids, **padding.arrays}) else None

    def _takes_packed_images(self, inputs: Mapping[str, np.ndarray]) -> bool:
        """Whether programs of prompts can take the grids of images, as `image_padding` makes them, as arguments."""
        return False

    def _from_decoder_start(self, config: GenerationConfig, decoder: np.ndarray) -> np.ndarray:
        """The decoder ids, preceded by the start token unless a row begins with it; Whisper and Donut have their own start."""
        start: Any = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        names = (type(self._skeleton.module).__name__, getattr(getattr(self.config, "encoder", None), "model_type", ""))
        if self.config.model_type == "whisper" or any("donut" in n.lower() for n in names) or start is None:
            return decoder
        decoder = np.atleast_2d(decoder)
        starts = np.broadcast_to(np.reshape(start, (-1, 1)), (len(decoder), 1)).astype(decoder.dtype)
        return np.concatenate([starts, decoder], axis=1) if (decoder[:, :1] != starts).all() else decoder

    def output(self, name: str, **inputs: Any) -> Any:
        """One output of a forward pass, such as "logits". After an earlier run of the same sizes it imports no modelling code.

        Args:
            name: a field of the model's output class.
            **inputs: as in a call of the model.

        Raises:
            InvalidInputError: as a call of the model; or there is no such output.
        """
        model: Any = self
        outputs = model(**inputs)
        if (found := getattr(outputs, name, None)) is None:
            raise InvalidInputError(
                f"{type(self).__name__} returns no {name!r}.",
                f"Its outputs for these inputs: {', '.join(outputs)}.",
                "Use one of them.",
            )
        return found

    def as_input(self, name: str, value: Any) -> Any:
        """A forward argument with its arrays on the host (jax arrays stay), and lists of numbers as arrays."""
        if isinstance(value, list) and value and _is_numeric(value):
            value = self._host_array(name, value)
        arrays, structure = flatten(value, is_array)
        arrays = [a if is_of_jax(a) else self._host_array(name, a) for a in arrays]
        if name in _ID_INPUTS:
            for array in arrays:
                requests.check_vocabulary(name, np.asarray(array), self._vocab_size())
        return unflatten(structure, arrays)

    def _host_array(self, name: str, value: Any) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            return narrow(value.numpy()) if value.dtype in (torch.int64, torch.uint64) else to_numpy(value)
        try:
            return narrow(np.asarray(value))
        except ValueError as error:
            raise InvalidInputError(
                f"{name} is not rectangular.", str(error), "Pad its rows to one length and pass an attention_mask."
            ) from error

    def _vocab_size(self) -> int | None:
        """Rows of the embedding table, the exclusive bound of ids; XLA would silently clamp larger ids."""
        with contextlib.suppress(NotImplementedError, AttributeError):
            if (table := self._skeleton.module.get_input_embeddings()) is not None:
                return getattr(table, "num_embeddings", None)
        return self._named_vocab_size

    @functools.cached_property
    def _named_vocab_size(self) -> int | None:
        """The config's `vocab_size`, if a table has as many rows: for classes of the user's own, with names of their own."""
        named = getattr(self.config.get_text_config(decoder=True), "vocab_size", None)
        tables = (part for part in self._skeleton.module.modules() if isinstance(part, torch.nn.Embedding))
        return named if any(table.num_embeddings == named for table in tables) else None

    def num_logits(self) -> int:
        """Number of logits for each token, which may exceed the tokenizer's vocabulary.

        Raises:
            UnsupportedOptionError: the model has no language-modelling head.
        """
        head = self._skeleton.module.get_output_embeddings()
        size = getattr(head, "out_features", None) or self._vocab_size()
        if size is None:
            raise UnsupportedOptionError(
                f"{type(self._skeleton.module).__name__} cannot generate.",
                "It has no language-modelling head.",
                'Pass task="text-generation" when loading if the checkpoint has one.',
            )
        return int(size)

    def _context(self) -> int | None:
        """Maximum positions of the text model; None if unbounded (T5, Mamba)."""
        config: Any = self.config.get_text_config(decoder=True)
        names = ["max_position_embeddings"]
        if self._traits.is_encoder_decoder:
            names.insert(0, "max_target_positions")
        bounds = (getattr(config, name, None) for name in names)
        return next((b for b in bounds if isinstance(b, int) and b > 0), None)


def _is_numeric(value: list[Any]) -> bool:
    return all(_is_numeric(v) if isinstance(v, list) else isinstance(v, (int, float, np.number)) for v in value)
