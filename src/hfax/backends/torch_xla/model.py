"""What `from_pretrained(backend="torch_xla")` gives: the model's own torch module on a torch_xla device, and ways to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import GenerationConfig

from hfax.backends.base_model import BaseModel
from hfax.backends.torch_xla import generation, runtime
from hfax.backends.torch_xla.sharding import Spread
from hfax.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError
from hfax.generation.host_loop import Streamer, make_stop_check
from hfax.generation.outputs import as_sequences
from hfax.generation.overrides import has_own_generate
from hfax.known_words import missing_attribute
from hfax.load.skeleton import Skeleton
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.structure import flatten, is_array, unflatten
from hfax.tracing.traits import read_traits

_ONLY_JAX = ("apply", "params", "compile", "map", "drive", "mesh", "jax_device")


class TorchXlaModel(BaseModel):
    """A transformers model on torch_xla.

    Attributes:
        module: the torch module itself, its parameters on the device; hooks and debuggers work on it.
        xla_device: where it is.
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
                "It runs the torch module itself; there is no pure function of JAX's arrays behind it.",
                f'Load the model with backend="jax" for {name}.',
            )
        raise missing_attribute(type(self).__name__, name)

    def __repr__(self) -> str:
        where = f"torch_xla {runtime.kind()}"
        return (
            f"{type(self).__name__}({self.name_or_path!r}, {self.num_parameters():,} parameters, {self.dtype}, {where})"
        )

    def sharding_plan(self) -> ShardingPlan | None:
        """How each weight is split over the devices, and why; its text is a table. None for one device."""
        return None if self._spread is None else self._spread.plan

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the weights hold; tied ones once. The arguments are transformers'."""
        return self._skeleton.module.num_parameters(only_trainable, exclude_embeddings)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights, and of the buffers if they are counted."""
        return self._skeleton.module.get_memory_footprint(return_buffers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as tensors on the CPU, under the names of transformers' module."""
        return {name: tensor.detach().cpu() for name, tensor in self._skeleton.module.state_dict().items()}

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """One forward pass, as one program.

        Args:
            *args: what the transformers class takes, by position.
            **inputs: the same by name; torch tensors, numpy arrays and lists of numbers.

        Returns:
            The model's own result, its tensors on the CPU; on the device if an input was there.

        Raises:
            InvalidInputError: ids outside of the vocabulary; a name that forward makes no use of.
        """
        inputs = self._by_name(args, inputs)
        arrays, _ = flatten(inputs)
        stays = any(isinstance(a, torch.Tensor) and a.device.type == "xla" for a in arrays)
        if not stays:
            inputs = {name: self._on_device(self._as_input(name, value)) for name, value in inputs.items()}
        with generation.patched(self.module, self.patches):
            outputs = self.module(**inputs)
        runtime.sync()
        if stays:
            return outputs
        arrays, structure = flatten(outputs, lambda value: isinstance(value, torch.Tensor))
        return unflatten(structure, [array.cpu() for array in arrays])

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
        **options: Any,
    ) -> Any:
        """Write tokens after each prompt: the same names, defaults and greedy tokens as on the backend "jax".

        Args:
            inputs: prompts, [batch, length] token ids (torch, numpy or lists), padded on the left; or pass `input_ids=`.
            generation_config: options; else the model's own.
            streamer: `TextStreamer` or `TextIteratorStreamer` of transformers, for one prompt.
            tokenizer: needed with `stop_strings`.
            seed: of the random draws; None draws one from torch's generator. It repeats on this backend, and draws otherwise
                than on "jax".
            **options: as `JaxModel.generate` takes them.

        Returns:
            [batch · num_return_sequences, prompt + new] ids, int64 torch; with `return_dict_in_generate=True` transformers'
            output class.

        Raises:
            InvalidInputError: a prompt or an option is out of range.
            UnsupportedOptionError: an option that this backend does not implement.
            UnsupportedModelError: the model writes in a way of its own.
        """
        if has_own_generate(self.module):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} has a generate of its own.",
                "The backend torch_xla runs the general loop alone.",
                'Use backend="jax".',
            )
        request, _ = self._request(inputs, generation_config, options, seed, None, None)
        config = request.options.config
        if config.prompt_lookup_num_tokens is not None or options.get("assistant_model") is not None:
            raise UnsupportedOptionError(
                "The backend torch_xla does not support speculative decoding.",
                "Its loop draws one token a step.",
                'Leave prompt_lookup_num_tokens out, or use backend="jax".',
            )
        if streamer is not None and len(request.prompts.given) * (config.num_return_sequences or 1) > 1:
            raise InvalidInputError(
                "A streamer was given for several sequences.",
                "A streamer prints one text.",
                "Generate one prompt at a time, or leave the streamer out.",
            )
        loop = generation.Loop(
            self.module,
            self._traits,
            request.prompts,
            request.options,
            static=request.static,
            vocab_size=self._num_logits(),
            buckets=self._buckets,
            device=self.xla_device,
            place=self._place if self._spread is None else self._spread.place,
            used=self.patches,
        )
        stop_check = make_stop_check(config.stop_strings, tokenizer)
        generated = generation.run(loop, streamer=streamer, stop_check=stop_check)
        return as_sequences(
            generated,
            request.prompts.given,
            num_return_sequences=config.num_return_sequences or 1,
            is_encoder_decoder=self._traits.is_encoder_decoder,
            as_dict=bool(config.return_dict_in_generate) or bool(request.options.keep),
            give=lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array),
        )

    def save_pretrained(self, folder: str | Path, *, max_shard_size: str = "50GB") -> None:
        """Write a folder that plain transformers loads back bit for bit: config, generation config, safetensors.

        Args:
            folder: made if it is not there; an interrupted save leaves what was there before.
            max_shard_size: of one file.
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
