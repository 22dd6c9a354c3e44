"""A stored program runs in a process that has lowered nothing, whatever library of the host it calls."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from torch_free import run_script

_PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fft": lambda a: jnp.abs(jnp.fft.fft(a)),
    "triangular solve": lambda a: jax.scipy.linalg.solve_triangular(jnp.tril(a), a, lower=True),
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.T),
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "eigenvalues": lambda a: jnp.linalg.eigvalsh(a + a.T),
    "singular values": lambda a: jnp.linalg.svd(a, compute_uv=False),
}
_SCRIPT = """
import json, pickle, sys
import jax, numpy as np
from hfax.programs.executables import load_executable
from hfax.sharding.layout import Layout
layout = Layout.on(jax.devices("cpu")[0])
with open(sys.argv[1], "rb") as file:
    array, programs = pickle.load(file)
found = {}
for name, program in programs.items():
    print(name, file=sys.stderr, flush=True)
    found[name] = np.asarray(load_executable(*program, layout)(jax.device_put(array))).tolist()
print(json.dumps(found))
"""


def test_programs_run_that_call_libraries_of_the_host(tmp_path: Path) -> None:
    """Programs with a triangular system, as those of Qwen3.5, ended the process with a segmentation fault."""
    array = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32) + 3 * np.eye(6, dtype=np.float32)
    compiled = {name: jax.jit(function).lower(array).compile() for name, function in _PROGRAMS.items()}
    expected = {name: np.asarray(program(array)).tolist() for name, program in compiled.items()}
    packed = {name: serialize_executable.serialize(program) for name, program in compiled.items()}
    (path := tmp_path / "programs").write_bytes(pickle.dumps((array, packed)))
    assert json.loads(run_script(_SCRIPT, str(path), JAX_PLATFORMS="cpu")) == expected
