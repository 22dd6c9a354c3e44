"""The model that `from_pretrained(backend="torch_xla")` returns: the torch module on a torch_xla device, and its methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np
import torch
from transformers import GenerationConfig

from hfax.backends.base_model import BaseModel
from hfax.backends.torch_xla import generation, runtime
from hfax.backends.torch_xla.sharding import Spread
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.generation.beam_config import num_beams
from hfax.generation.host_loop import Streamer, make_stop_check, run_generation
from hfax.generation.layer_outputs import asked_for
from hfax.generation.outputs import as_sequences
from hfax.known_words import missing_attribute
from hfax.load.skeleton import Skeleton
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.structure import flatten, is_array, unflatten
from hfax.tracing.traits import read_traits

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateNonBeamOutput

_ONLY_JAX = ("apply", "params", "compile", "map", "drive", "mesh", "jax_device")


class TorchXlaModel(BaseModel):
    """A transformers model on torch_xla.

    Attributes:
        module: the torch module, with its parameters on the device; hooks and debuggers work on it.
        xla_device: the device of the module.
    """

    backend = "torch_xla"

    def __init__(
        self,
        skeleton: Skeleton,
        device: torch.device,
        spread: Spread | None,
        *,
        generation_config: GenerationConfig,
        name_or_path: str,
        folder: Path | None,
        task: str | None,
    ) -> None:
        super().__init__(
            skeleton,
            read_traits(skeleton.module),
            generation_config=generation_config,
            name_or_path=name_or_path,
            folder=folder,
            task=task,
        )
        self.xla_device = device
        self._spread = spread

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ONLY_JAX:
            raise UnsupportedOptionError(
                f"The backend torch_xla has no {name}.",
                "It runs the torch module directly, without a pure function of JAX arrays.",
                f'Load the model with backend="jax" to use {name}.',
            )
        raise missing_attribute(type(self).__name__, name)

    def __repr__(self) -> str:
        where = f"torch_xla {runtime.kind()}"
        return (
            f"{type(self).__name__}({self.name_or_path!r}, {self.num_parameters():,} parameters, {self.dtype}, {where})"
        )

    def sharding_plan(self) -> ShardingPlan | None:
        """How each weight is sharded over the devices, and why; printed as a table. None for one device."""
        return None if self._spread is None else self._spread.plan

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, tied weights counted once. Takes transformers' arguments."""
        return self._skeleton.module.num_parameters(only_trainable, exclude_embeddings)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Size of the weights in bytes, and of the buffers if `return_buffers`."""
        return self._skeleton.module.get_memory_footprint(return_buffers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as tensors on the CPU, by transformers' names."""
        return {name: tensor.detach().cpu() for name, tensor in self._skeleton.module.state_dict().items()}

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run one forward pass as one program.

        Args:
            *args: positional arguments of the transformers class.
            **inputs: keyword arguments of the transformers class: torch tensors, numpy arrays and lists of numbers.

        Returns:
            The model's output, with tensors on the CPU, or on the device if an input was there.

        Raises:
            InvalidInputError: ids are outside the vocabulary, or forward does not use a given name.
        """
        inputs = self._by_name(args, inputs)
        arrays, _ = flatten(inputs)
        stays = any(isinstance(a, torch.Tensor) and a.device.type == "xla" for a in arrays)
        if not stays:
            inputs = {name: self._on_device(self.as_input(name, value)) for name, value in inputs.items()}
        with generation.patched(self.module, self.patches):
            outputs = self.module(**inputs)
        runtime.sync()
        if stays:
            return outputs
        arrays, structure = flatten(outputs, lambda value: isinstance(value, torch.Tensor))
        return unflatten(structure, [array.cpu() for array in arrays])

    forward = __call__
    """Alias of `__call__`, which transformers' pipelines call."""

    @overload
    def generate(
        self, inputs: Any = None, *, return_dict_in_generate: Literal[True], **options: Any
    ) -> GenerateNonBeamOutput: ...
    @overload
    def generate(
        self, inputs: Any = None, *, return_dict_in_generate: Literal[False] | None = None, **options: Any
    ) -> torch.Tensor: ...
    def generate(
        self,
        inputs: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Generate tokens after each prompt, with the same names, defaults and greedy tokens as the backend "jax".

        Args:
            inputs: prompts, [batch, length] token ids (torch, numpy or lists), left-padded; or pass `input_ids=`.
            generation_config: generation options; default: the model's.
            streamer: transformers' `TextStreamer` or `TextIteratorStreamer`, for one prompt.
            tokenizer: required with `stop_strings`.
            seed: sampling seed; None draws one from torch's generator. Reproducible on this backend, but samples differ from
                "jax".
            **options: the options of `JaxModel.generate`.

        Returns:
            [batch · num_return_sequences, prompt + new] ids, int64 torch; with `return_dict_in_generate=True`, transformers'
            output class.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
            UnsupportedOptionError: this backend does not implement an option.
            UnsupportedModelError: the model uses a custom generation loop.
        """
        if self.has_own_generate:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} overrides generate().",
                "The backend torch_xla only runs the general generation loop.",
                'Use backend="jax".',
            )
        request, _ = self._request(inputs, generation_config, options, seed)
        config = request.options.config
        if config.prompt_lookup_num_tokens is not None or options.get("assistant_model") is not None:
            raise UnsupportedOptionError(
                "The backend torch_xla does not support speculative decoding.",
                "Its loop generates one token per step.",
                'Remove prompt_lookup_num_tokens and assistant_model, or use backend="jax".',
            )
        if asked := asked_for(config):
            raise UnsupportedOptionError(
                f"{' and '.join(asked)}: the backend torch_xla does not return what layers compute.",
                "Its loop returns what the next token needs.",
                'Call the model itself on the finished text, or use backend="jax".',
            )
        if num_beams(config) > 1:
            raise UnsupportedOptionError(
                f"num_beams={config.num_beams}: the backend torch_xla does not support beam search.",
                "Its loop continues each sequence on its own. The number was passed to generate() or set in the checkpoint's "
                "generation_config.json.",
                'Pass num_beams=1, or use backend="jax".',
            )
        loop = generation.XlaGenerationLoop(
            self.module,
            self._traits,
            request.prompts,
            request.options,
            static=request.static,
            vocab_size=self.num_logits(),
            buckets=self._buckets,
            device=self.xla_device,
            place=self._place if self._spread is None else self._spread.place,
            used=self.patches,
        )
        generated = run_generation(
            loop,
            request.prompts.inputs,
            request.prompts,
            request.options,
            streamer=streamer,
            stop_check=make_stop_check(config.stop_strings, tokenizer),
        )
        return as_sequences(
            generated,
            request.prompts.given,
            num_return_sequences=config.num_return_sequences or 1,
            is_encoder_decoder=self._traits.is_encoder_decoder,
            as_dict=bool(config.return_dict_in_generate) or bool(request.options.keep),
            give=lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array),
        )

    def save_pretrained(self, folder: str | Path, *, max_shard_size: str = "50GB") -> None:
        """Write config, generation config and safetensors to a folder, which plain transformers loads bit for bit.

        Args:
            folder: created if it does not exist; an interrupted save leaves previous content unchanged.
            max_shard_size: maximum size of one file.
        """
        from hfax.load.folder import write_folder

        held = self.module.state_dict(keep_vars=True)
        tensors = {name: held[name].detach().cpu() for name in self._skeleton.shapes}
        write_folder(Path(folder), self.module, tensors, self.generation_config, max_shard_size)

    def _place(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor if tensor.device.type == "xla" else tensor.to(self.xla_device)

    def _on_device(self, value: Any) -> Any:
        arrays, structure = flatten(value, is_array)
        tensors = [torch.from_numpy(np.array(a)) for a in arrays]
        placed = [(t.long() if t.dtype == torch.int32 else t).to(self.xla_device) for t in tensors]
        return unflatten(structure, placed)
