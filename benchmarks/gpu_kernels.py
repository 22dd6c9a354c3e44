"""hfax's kernels for NVIDIA GPUs beside what XLA makes of the same operation, on the GPU of this machine, for published shapes.

    python benchmarks/gpu_kernels.py --json-file benchmarks/results/gpu-kernels.json     # two minutes, most of it compilation

Each is first compared with float32 results. Times are those of the GPU's kernels in a profile, launches not counted; of one
operation among several of a program, each with arrays of its own, so that weights come from memory. The bound is the larger of the
bytes that must be read over the measured bandwidth and the operations over the measured rate of bfloat16 products.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.bench import limits
from hfax.kernels.encodings import BITS, STORED, Encoding
from hfax.kernels.gpu import cudnn, experts, flash, quantized, ranges
from hfax.kernels.quantized import QuantizedArray

BYTES = 250 << 20
"""Of all operands of a program together: several times the largest cache of a GPU."""
MOST = 8
"""Operations of a program."""

LINEAR = {"up of 8B": (14336, 4096), "down of 8B": (4096, 14336), "down of 1B": (2048, 8192)}
ROWS = (1, 8, 64, 128)
FORMS: dict[str, tuple[Encoding, int]] = {
    "int8": ("int8", 128),
    "int4": ("int4", 128),
    "fp8": ("fp8", 128),
    "fp4": ("fp4", 32),
    "fp4 in groups of 16": ("fp4", 16),
}
"""Encodings, and columns that share a scale."""


def drawn(index: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers, made on the device."""
    return jax.random.normal(jax.random.key(index), shape, dtype)


def packed(index: int, form: str, shape: tuple[int, ...]) -> QuantizedArray:
    """A weight with random codes and scales."""
    encoding, group = FORMS[form]
    key, stored = jax.random.key(index), (*shape[:-1], shape[-1] * BITS[encoding] // 8)
    codes = jax.random.randint(key, stored, 0, 127 if encoding == "fp8" else 256, jnp.int32).astype(jnp.uint8)
    return QuantizedArray(
        values=jax.lax.bitcast_convert_type(codes, jnp.dtype(STORED[encoding])),
        scale=jax.random.uniform(key, (*shape[:-1], shape[-1] // group), jnp.bfloat16, 0.5, 1.0) * 0.02,
        encoding=encoding,
        dtype=jnp.dtype("bfloat16"),
    )


class Operation:
    """An operation with its ways of being computed.

    Args:
        name: in the table.
        make: arrays of one call, from an index.
        ways: by name, functions of those arrays.
        reads: bytes that a call must read and write.
        does: floating-point operations of a call.
        reference: a function of the arrays with the expected result, in float32.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], tuple[Any, ...]],
        ways: dict[str, Callable[..., jax.Array]],
        *,
        reads: float,
        does: float,
        reference: Callable[..., jax.Array],
    ) -> None:
        self.name, self.make, self.ways = name, make, ways
        self.reads, self.does, self.reference = reads, does, reference


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's product with float32 accumulation."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32).astype(x.dtype)


def exact_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """In float32."""
    return jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32).T, precision="highest")


def linear_operations(rows_of: tuple[int, ...]) -> Iterator[Operation]:
    """Products of a few rows with packed weights, beside bfloat16 ones."""
    for name, (out, width) in LINEAR.items():
        for rows in rows_of:
            does = 2.0 * rows * out * width
            yield Operation(
                f"{name}, {rows} rows, bfloat16",
                lambda i, r=rows, o=out, w=width: (drawn(i, r, w), drawn(i + 1000, o, w)),
                {"xla": dot},
                reads=2.0 * out * width,
                does=does,
                reference=exact_dot,
            )
            for form, (encoding, group) in FORMS.items():

                def own(x: jax.Array, weight: QuantizedArray) -> jax.Array:
                    return quantized.linear(x, weight.values, weight.scale, encoding=weight.encoding, out_dtype=x.dtype)

                has_kernel = quantized.fits(rows, (out, width), encoding, group)
                yield Operation(
                    f"{name}, {rows} rows, {form}",
                    lambda i, r=rows, o=out, w=width, f=form: (drawn(i, r, w), packed(i, f, (o, w))),
                    ({"hfax": own} if has_kernel else {}) | {"xla": lambda x, weight: dot(x, weight.dequantize())},
                    reads=out * width * (BITS[encoding] / 8 + 2 / group),
                    does=does,
                    reference=lambda x, weight: exact_dot(x, weight.dequantize()),
                )


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """All scores at once, [batch, queries, heads, head_dim]."""
    batch, heads, queries, width = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], queries, width)
    scores = jnp.einsum("bkgqd,bksd->bkgqs", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    shares = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -1e30)).astype(value.dtype)
    out = jnp.einsum("bkgqs,bksd->bqkgd", shares, value, preferred_element_type=jnp.float32)
    return out.reshape(batch, queries, heads, width).astype(query.dtype)


def attention_operations() -> Iterator[Operation]:
    """Prompts and decoding steps of Llama-3-8B's heads."""
    heads, kv_heads, width = 32, 8, 128
    scale = width**-0.5
    for batch, length in ((1, 512), (1, 2048), (1, 8192)):

        def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            length = query.shape[2]
            return plain_attention(query, key, value, jnp.tril(jnp.ones((1, 1, length, length), jnp.bool_)))

        yield Operation(
            f"prompt {batch} x {length}",
            lambda i, b=batch, n=length: (
                drawn(i, b, heads, n, width),
                drawn(i + 1, b, kv_heads, n, width),
                drawn(i + 2, b, kv_heads, n, width),
            ),
            {
                "hfax": functools.partial(flash.flash_attention, scale=scale),
                "cudnn": functools.partial(cudnn.prompt_attention, is_real=None, scale=scale, window=None),
                "xla": causal,
            },
            reads=2.0 * batch * length * width * (2 * heads + 2 * kv_heads),
            does=2.0 * batch * heads * length * length * width,
            reference=lambda *arrays: causal(*(array.astype(jnp.float32) for array in arrays)),
        )
    for batch, capacity, seen in ((1, 8192, 4096), (1, 32768, 30000), (8, 8192, 4096), (32, 4096, 2048)):

        def step(i: int, b: int = batch, c: int = capacity, s: int = seen) -> tuple[jax.Array, ...]:
            mask = jnp.broadcast_to(jnp.arange(c) < s, (b, 1, 1, c))
            keys = (b, kv_heads, c, width)
            return drawn(i, b, heads, 1, width), drawn(i + 1, *keys), drawn(i + 2, *keys), mask

        yield Operation(
            f"step {batch} x {seen} of {capacity}",
            step,
            {
                "hfax": functools.partial(ranges.cache_attention, scale=scale, is_contiguous=True),
                "xla": plain_attention,
            },
            reads=2.0 * 2 * batch * kv_heads * seen * width,
            does=4.0 * batch * heads * seen * width,
            reference=lambda q, k, v, m: plain_attention(*(a.astype(jnp.float32) for a in (q, k, v)), m),
        )


def expert_operations() -> Iterator[Operation]:
    """Qwen3-30B-A3B's experts: 128 of [768, 2048], eight for a token."""
    num_experts, out, width = 128, 1536, 2048
    for tokens in (1, 16, 512):
        rows = 8 * tokens
        used = min(rows, num_experts)

        def make(i: int, r: int = rows) -> tuple[jax.Array, ...]:
            chosen = jax.random.randint(jax.random.key(i), (r,), 0, num_experts, jnp.int32)
            return drawn(i, r, width), drawn(i + 1, num_experts, out, width), chosen

        def by_xla(x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
            from hfax.kernels.experts import _ragged_product

            return _ragged_product(x, weight, chosen, False)

        def by_gathering(x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
            def one(row: jax.Array, expert: jax.Array) -> jax.Array:
                return jnp.matmul(row.astype(jnp.float32), weight[expert].astype(jnp.float32).T, precision="highest")

            return jax.lax.map(lambda pair: one(*pair), (x, chosen))

        yield Operation(
            f"experts, {tokens} tokens, bfloat16",
            make,
            {"hfax": experts.grouped_linear, "xla": by_xla},
            reads=2.0 * used * out * width,
            does=2.0 * rows * out * width,
            reference=by_gathering,
        )

        for form in ("int4", "fp4"):

            def make_packed(i: int, r: int = rows, f: str = form) -> tuple[Any, ...]:
                x, _, chosen = make(i, r)
                return x, packed(i, f, (num_experts, out, width)), chosen

            def own(x: jax.Array, weight: QuantizedArray, chosen: jax.Array) -> jax.Array:
                return experts.grouped_linear_packed(x, weight.values, weight.scale, chosen, encoding=weight.encoding)

            yield Operation(
                f"experts, {tokens} tokens, {form}",
                make_packed,
                {"hfax": own},
                reads=used * out * width * (0.5 + 2 / FORMS[form][1]),
                does=2.0 * rows * out * width,
                reference=lambda x, weight, chosen: by_gathering(x, weight.dequantize(), chosen),
            )


def seconds_of(way: Callable[..., jax.Array], sets: list[tuple[Any, ...]], rounds: int) -> float:
    """The time that the GPU's kernels take for one call, in a program that makes one for each set of arrays."""

    @jax.jit
    def program(sets: list[tuple[Any, ...]]) -> list[jax.Array]:
        return [way(*arrays) for arrays in sets]

    jax.block_until_ready(program(sets))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(program(sets))
        (found,) = Path(folder).rglob("*.xplane.pb")
        planes = [p for p in jax.profiler.ProfileData.from_file(str(found)).planes if "GPU" in p.name]
        events = [event for p in planes for line in p.lines if "Stream" in line.name for event in line.events]
        return sum(event.duration_ns for event in events) / 1e9 / rounds / len(sets)


def measure(operation: Operation, bandwidth: float, rate: float, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"operation": operation.name}
    bound = row["bound_us"] = 1e6 * max(operation.reads / bandwidth, operation.does / rate)
    one = jax.jit(operation.make)(0)
    count = max(2, min(MOST, -(-BYTES // sum(a.nbytes for a in jax.tree.leaves(one)))))
    expected = np.asarray(jax.jit(operation.reference)(*one), np.float32)
    make = jax.jit(operation.make)
    sets = [make(10 * index) for index in range(count)]
    for name, way in operation.ways.items():
        try:
            got = np.asarray(jax.jit(way)(*one), np.float32)
            row[f"{name}_error"] = float(np.abs(got - expected).max() / np.abs(expected).max())
            microseconds = row[f"{name}_us"] = 1e6 * seconds_of(way, sets, rounds)
            row[f"{name}_share"] = bound / microseconds
        except Exception as error:  # compiler errors have no common class
            traceback.print_exc()
            row[f"{name}_failure"] = str(error).partition("\n")[0][:200]
    return row


def line_of(row: dict[str, Any]) -> str:
    """A row of the table as text."""
    parts = [f"{row['operation']:36} bound {row['bound_us']:8.1f} us"]
    for name in ("hfax", "cudnn", "xla"):
        if f"{name}_us" in row:
            time_us, share, error = (row[f"{name}_{what}"] for what in ("us", "share", "error"))
            parts.append(f"{name} {time_us:8.1f} us, {share:4.0%} of the bound, error {error:.1e}")
        elif f"{name}_failure" in row:
            parts.append(f"{name} FAILED {row[f'{name}_failure']}")
    return "; ".join(parts)


def main() -> int:
    """Measure and print; 1 when something failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="operations whose names contain this")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of the products with packed weights")
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.error(f"these are kernels for NVIDIA GPUs, and JAX's first device is {device}")
    bandwidth, rate = limits.read_bandwidth(device), limits.matrix_operations(device, "bfloat16")
    print(f"{device.device_kind}: {bandwidth / 1e9:.0f} GB/s read, {rate / 1e12:.0f} TFLOP/s in bfloat16", flush=True)
    rows = []
    for operation in (*linear_operations(tuple(options.rows)), *attention_operations(), *expert_operations()):
        if options.only in operation.name:
            rows.append(measure(operation, bandwidth, rate, options.rounds))
            print(line_of(rows[-1]), flush=True)
    if options.json_file:
        found = {"device": device.device_kind, "jax": jax.__version__, "read_bandwidth": bandwidth}
        found |= {"matrix_operations": rate, "rows": rows}
        options.json_file.write_text(json.dumps(found, indent=2) + "\n")
    errors = [value for row in rows for name, value in row.items() if name.endswith("_error")]
    return int(any(name.endswith("_failure") for row in rows for name in row) or max(errors, default=0) > 0.02)


if __name__ == "__main__":
    raise SystemExit(main())
