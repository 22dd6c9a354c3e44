"""torch code in a trace, as a function of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from hfax.tracing import torchax as tracing


def traced(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """What `function` of torch tensors gives (one, or a tuple or list of them) when it runs inside of a compiled trace.

    Args:
        function: torch code.
        arrays: its arguments; whole numbers have 32 bits in a trace.
    """

    def call(*values: jax.Array) -> list[jax.Array]:
        def inside(_: torch.nn.Module) -> list[jax.Array]:
            out = function(*(tracing.wrap(v) for v in values))
            return [tracing.unwrap(o) for o in (out if isinstance(out, (tuple, list)) else (out,))]

        return tracing.call_module(torch.nn.Identity(), {}, inside)

    given = (a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays)
    return [np.array(o) for o in jax.jit(call)(*given)]
