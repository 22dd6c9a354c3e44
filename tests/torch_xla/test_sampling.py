"""The logits processors on the device, against transformers' own: the table of contracts that JAX's processors obey."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from processor_contracts import CASES, NOT_ON_TORCH_XLA, NOT_OPTIONS, VOCAB, Batch, check, spec_of

from hfax.backends.torch_xla import runtime, sampling
from hfax.errors import UnsupportedOptionError
from hfax.generation.sampling_config import SamplingSpec

SUPPORTED = [name for name, case in CASES.items() if not set(spec_of(case)[0].active) & set(NOT_ON_TORCH_XLA)]


def put(array: Any) -> torch.Tensor:
    """A tensor on the device; integers as int64, as in `XlaGenerationLoop`."""
    tensor = torch.as_tensor(np.asarray(array))
    return (tensor.long() if tensor.dtype == torch.int32 else tensor).to(runtime.device())


def scores_of_steps(spec: SamplingSpec, values: Mapping[str, np.ndarray], batch: Batch) -> np.ndarray:
    """A `ScoresOf`."""
    width = batch.prompts.shape[1]
    first = batch.mask.argmax(axis=1)
    options = {name: put(value) for name, value in values.items()}
    memory = sampling.remember(spec, VOCAB, put(batch.prompts), put(batch.mask.astype(np.int32)))
    found = []
    for step, logits in enumerate(batch.logits):
        at = {
            "tokens": put(batch.tokens_at(step)),
            "step": put(np.int64(step)),
            "end": put(np.int64(width + step)),
            "first": put(first),
            "lengths": put(width - first + step),
            "prompt_lengths": put(width - first),
            **memory,
        }
        found.append(sampling.process(spec, options, at, put(logits)).cpu().numpy())
        memory = sampling.remember_drawn(memory, put(batch.drawn[:, step]))
    return np.stack(found)


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_row_of_a_left_padded_batch_scores_as_transformers_scores_it_alone(name: str) -> None:
    check(name, scores_of_steps)


def test_every_processor_is_in_the_table_of_contracts() -> None:
    active = {name for case in SUPPORTED for name in spec_of(CASES[case])[0].active}
    assert active | set(NOT_OPTIONS) == set(sampling.PROCESSORS)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SUPPORTED])
def test_a_processor_that_only_jax_has_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match='use backend="jax"'):
        sampling.check_supported(spec_of(CASES[name])[0])
