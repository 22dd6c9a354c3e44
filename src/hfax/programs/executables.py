"""Loads compiled programs that another process serialized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental import serialize_executable
from jaxlib import lapack

if TYPE_CHECKING:
    import jax

    from hfax.sharding.layout import Layout


def load_executable(payload: bytes, in_tree: Any, out_tree: Any, layout: Layout) -> jax.stages.Compiled:
    """A program that is ready to run on the devices of a layout.

    On CPU, XLA calls LAPACK (for triangular systems, say) through pointers that jaxlib sets when such a call is lowered. In this
    process nothing may have been, and `deserialize_and_load` does not set them: the call would end the process.

    Args:
        payload: from `serialize_executable.serialize`.
        in_tree: structure of the arguments.
        out_tree: structure of the results.
        layout: the devices.
    """
    if b"lapack_" in payload:
        lapack.prepare_lapack_call("trsm_ffi", np.dtype(np.float32))
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=layout.device.client, execution_devices=list(layout.devices)
    )
