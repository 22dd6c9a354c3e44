"""Results of calls: torch tensors or jax arrays, and transformers' output classes for generated sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hfax.generation.host_loop import Generated
from hfax.sharding.layout import to_host


def as_torch_tree(arrays: list[jax.Array]) -> list[Any]:
    """jax arrays as torch tensors on the CPU: zero-copy from a CPU device, int32 as torch's usual int64."""
    import torch

    def convert(array: jax.Array) -> Any:
        here = jax.local_devices(backend="cpu")[0]
        if len(array.sharding.device_set) > 1:
            array = jax.device_put(to_host(array), here)
        host = jax.device_put(array, here) if next(iter(array.devices())).platform != "cpu" else array
        tensor = torch.from_dlpack(host)
        return tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor

    return [convert(a) for a in arrays]


def give(array: np.ndarray, to_torch: bool) -> Any:
    """A host array as a torch tensor, int32 as torch's usual int64, or as a jax array."""
    if to_torch:
        import torch

        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)
    return jax.device_put(array)


def as_sequences(
    generated: Generated,
    given: np.ndarray,
    *,
    num_return_sequences: int,
    is_encoder_decoder: bool,
    as_dict: bool,
    give: Callable[[np.ndarray], Any],
) -> Any:
    """Prompts and new tokens in the form that `generate` returns.

    Args:
        generated: from `run_generation`.
        given: [batch, length], the prompts as passed by the user.
        num_return_sequences: sequences per prompt.
        is_encoder_decoder: selects the output class.
        as_dict: return transformers' output class instead of only the ids.
        give: converts a host array to the returned type.
    """
    from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

    prompts = np.repeat(given, num_return_sequences, axis=0)
    sequences = give(np.concatenate([prompts, generated.new_tokens], axis=1))
    if not as_dict:
        return sequences
    cls = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
    steps: Callable[[np.ndarray | None], Any] = lambda r: (  # noqa: E731
        None if r is None else tuple(give(row) for row in r)
    )
    output = cls(sequences=sequences, scores=steps(generated.scores), logits=steps(generated.logits))
    if generated.log_probs is not None:
        output["log_probs"] = give(generated.log_probs.astype(np.float32))
    return output
