"""What calls give back: torch or jax, bare ids or transformers' output classes; and the check for stop strings.

Plain conversions at the edge between programs and people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hfax.backends.structure import flatten
from hfax.errors import InvalidInputError
from hfax.programs.generate import Generated
from hfax.sharding.layout import to_host


def has_torch(value: Any) -> bool:
    """Whether any array in nested arguments is a torch tensor."""
    arrays, _ = flatten(value)
    return any(type(a).__module__.split(".")[0] == "torch" for a in arrays)


def as_torch_tree(arrays: list[jax.Array]) -> list[Any]:
    """jax arrays as torch tensors on the CPU: without a copy from a CPU device, int32 as torch's usual int64."""
    import torch

    def convert(array: jax.Array) -> Any:
        here = jax.local_devices(backend="cpu")[0]
        if len(array.sharding.device_set) > 1:
            array = jax.device_put(to_host(array), here)
        host = jax.device_put(array, here) if next(iter(array.devices())).platform != "cpu" else array
        tensor = torch.from_dlpack(host)
        return tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor

    return [convert(a) for a in arrays]


def as_sequences(
    generated: Generated,
    given: np.ndarray,
    *,
    num_return_sequences: int,
    is_encoder_decoder: bool,
    as_dict: bool,
    to_torch: bool,
) -> Any:
    """Prompts and new tokens as `generate` returns them.

    Args:
        generated: from `run_generation`.
        given: [batch, length], the prompts as the user gave them.
        num_return_sequences: sequences a prompt.
        is_encoder_decoder: chooses the output class.
        as_dict: transformers' output class instead of the ids alone.
        to_torch: torch tensors instead of jax arrays.
    """
    from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

    prompts = np.repeat(given, num_return_sequences, axis=0)
    sequences = _give(np.concatenate([prompts, generated.new_tokens], axis=1), to_torch)
    if not as_dict:
        return sequences
    cls = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
    steps: Callable[[np.ndarray | None], Any] = lambda r: (  # noqa: E731
        None if r is None else tuple(_give(row, to_torch) for row in r)
    )
    output = cls(sequences=sequences, scores=steps(generated.scores), logits=steps(generated.logits))
    if generated.log_probs is not None:
        output["log_probs"] = _give(generated.log_probs.astype(np.float32), to_torch)
    return output


def _give(array: np.ndarray, to_torch: bool) -> Any:
    if to_torch:
        import torch

        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)
    return jax.device_put(array)


def make_stop_check(stop_strings: str | list[str] | None, tokenizer: Any) -> Callable[[np.ndarray], bool] | None:
    """A function that says whether a stop string stands in the text of the ids drawn so far; None without stop strings.

    Raises:
        InvalidInputError: no tokenizer to decode with, or an empty stop string.
    """
    if not stop_strings:
        return None
    wanted = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if tokenizer is None:
        raise InvalidInputError(
            "stop_strings were given without a tokenizer.",
            "Strings are looked for in the decoded text.",
            "Pass tokenizer=… as well.",
        )
    if any(not isinstance(s, str) or not s for s in wanted):
        raise InvalidInputError(
            f"stop_strings={wanted!r} holds an empty or non-string entry.",
            "An empty string stands in every text.",
            "Pass strings of at least one character.",
        )
    longest = max(len(s.encode()) for s in wanted)

    def check(ids: np.ndarray) -> bool:
        # A token gives at least one byte of text, so a string that the last token completes lies within as many tokens.
        text = tokenizer.decode([int(i) for i in ids[-longest - 4 :]], skip_special_tokens=False)
        return any(s in text for s in wanted)

    return check
