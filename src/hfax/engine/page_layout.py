"""What a page of the KV cache holds for a model, and whether the model's attention supports pages at all."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hfax.engine.scheduler import Limits
from hfax.errors import HfaxError, InvalidInputError, UnsupportedModelError
from hfax.kernels.pool import pool_shapes
from hfax.kernels.rows import TABLE_BYTES, Rows, size_of_pages
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import environment_parts
from hfax.programs.program_files import is_enabled
from hfax.stored.records import key_of, read_record, record_file, write_into_bundle, write_record
from hfax.tracing.traits import why_not_pages

_KIND = "pages"
_PAGE_SIZES = {"tpu": 128}
_PAGE_SIZE = 32
_ROWS = 8
"""Tokens of the step that is traced to see whether a model supports pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The arrays of a paged KV cache.

    Args:
        page_size: tokens per page.
        layers: key shape, value shape and dtype of each layer's cache for one sequence, by name.
        is_for_tpu: the platform is TPU.
    """

    page_size: int
    layers: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]]
    is_for_tpu: bool

    def arrays(self, num_pages: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array, by name."""
        return {
            f"{layer}.{name}": (shape, dtype)
            for layer, (key, value, dtype) in self.layers.items()
            for name, shape in pool_shapes(
                num_pages, self.page_size, key, value, dtype, is_for_tpu=self.is_for_tpu
            ).items()
        }

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all layers and devices."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays(1).values())

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a sequence."""
        return -(-num_tokens // self.page_size)


def page_size_for(platform: str, limits: Limits, wanted: int | None = None) -> int:
    """Tokens per page; on TPU larger ones where there are many long sequences, whose page tables are limited.

    Args:
        platform: "cpu", "gpu" or "tpu".
        limits: limits of a step.
        wanted: `block_size` of the engine's configuration.

    Raises:
        InvalidInputError: page tables for pages of the size that is wanted are too large.
    """
    size = wanted or _PAGE_SIZES.get(platform, _PAGE_SIZE)
    if platform == "tpu":
        size = size_of_pages(size, limits.max_num_seqs, limits.max_model_len)
    if wanted is not None and size > wanted:
        raise InvalidInputError(
            f"block_size={wanted} is too small for {limits.max_num_seqs} sequences of {limits.max_model_len} tokens.",
            f"On TPU their page tables must fit {TABLE_BYTES >> 10} KB.",
            f"Use block_size={size}, or reduce max_num_seqs or max_model_len.",
        )
    return size


def read_page_layout(
    parts: ModelParts, limits: Limits, page_size: int | None = None, dtype: jnp.dtype | None = None
) -> tuple[PageLayout, None] | tuple[None, str]:
    """The layout of a model's pages, or why its attention does not support them.

    Args:
        parts: the model's parts.
        limits: limits of a step.
        page_size: tokens per page; None: the platform's default.
        dtype: of the keys and values; None: the model's.

    Returns:
        The layout and None, or None and the reason.
    """
    depends_on = _depends_on(parts, limits, page_size, dtype)
    bundled = None if parts.programs.bundled is None else parts.programs.bundled / _bundled_name(depends_on)
    if bundled is not None and (found := read_record(bundled, is_of_cache=False)) is not None:
        return _from_content(found[0])
    record = record_file(_KIND, "", key_of(_KIND, [*depends_on, repr(environment_parts(parts.layout.device))]))
    if is_enabled() and not parts.layout.is_described and (found := read_record(record)) is not None:
        return _from_content(found[0])
    layout, why = _traced_layout(parts, limits, page_size, dtype)
    if is_enabled() and not parts.layout.is_described:
        write_record(record, _as_content(layout, why), b"")
    return (layout, None) if layout is not None else (None, why or "")


def store_page_layout(
    folder: Path, parts: ModelParts, limits: Limits, page_size: int | None, dtype: jnp.dtype | None
) -> None:
    """Write what `read_page_layout` returns into a bundle's folder of programs, where it is looked for first."""
    layout, why = read_page_layout(parts, limits, page_size, dtype)
    record = folder / _bundled_name(_depends_on(parts, limits, page_size, dtype))
    write_into_bundle(record, _as_content(layout, why), b"")


def _bundled_name(depends_on: list[str]) -> str:
    """The file of a layout in a bundle, which is of one environment, and may run where torch has no version."""
    return f"{_KIND}-{hashlib.sha256(repr(depends_on).encode()).hexdigest()}.json"


def _depends_on(parts: ModelParts, limits: Limits, page_size: int | None, dtype: jnp.dtype | None) -> list[str]:
    """What a trace of a step depends on, besides the environment."""
    weights = [
        (jax.tree_util.keystr(path), a.shape, str(a.dtype))
        for path, a in jax.tree.leaves_with_path(dict(parts.weights))
    ]
    limits = dataclasses.replace(limits, max_waiting=None)  # no trace depends on it
    return [parts.traced.key, parts.layout.key, repr(weights), repr(limits), str(page_size), str(dtype)]


def _as_content(layout: PageLayout | None, why: str | None) -> dict[str, Any]:
    """JSON values of a layout, or of why there is none."""
    if layout is None:
        return {"why": why}
    layers = {name: [list(key), list(value), dtype.name] for name, (key, value, dtype) in layout.layers.items()}
    return {"page_size": layout.page_size, "layers": layers, "is_for_tpu": layout.is_for_tpu}


def _from_content(content: dict[str, Any]) -> tuple[PageLayout, None] | tuple[None, str]:
    if "why" in content:
        return None, content["why"]
    layers = {
        name: (tuple(key), tuple(value), jnp.dtype(dtype)) for name, (key, value, dtype) in content["layers"].items()
    }
    return PageLayout(page_size=content["page_size"], layers=layers, is_for_tpu=content["is_for_tpu"]), None


def _traced_layout(
    parts: ModelParts, limits: Limits, page_size: int | None, dtype: jnp.dtype | None
) -> tuple[PageLayout, None] | tuple[None, str]:
    """`read_page_layout` from traces."""
    if (why := why_not_pages(parts.traced.module, parts.traced.traits)) is not None:
        return None, why
    platform = parts.layout.device.platform
    try:
        layers = {name: (key, value, dtype or own) for name, (key, value, own) in _layers(parts).items()}
        layout = PageLayout(
            page_size=page_size_for(platform, limits, page_size),
            layers=layers,
            is_for_tpu=platform == "tpu",
        )
        _trace_step(parts, limits, layout)
    except UnsupportedModelError as error:
        return None, error.what
    except HfaxError:
        raise
    except Exception as error:  # modelling code that expects one sequence's keys can raise anything
        first = str(error).partition(chr(10))[0]
        return None, f"Its modelling code does not support pages ({type(error).__name__}: {first})."
    return layout, None


def _layers(parts: ModelParts) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]]:
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    inputs = {"input_ids": ids, "attention_mask": ids}
    _, cache = jax.eval_shape(
        lambda params, inputs: parts.traced.prefill(params, inputs, {}, 16, keeps_windows=False),
        dict(parts.weights),
        inputs,
    )
    found = {}
    for name, keys in cache.items():
        layer, _, kind = name.rpartition(".")
        if kind == "keys":
            found[layer] = keys.shape, cache[f"{layer}.values"].shape, keys.dtype
    return found


def _trace_step(parts: ModelParts, limits: Limits, layout: PageLayout) -> None:
    """Trace a step abstractly: only a trace shows whether attention supports pages."""
    sequences = min(_ROWS, limits.max_num_seqs)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    rows = Rows(
        starts=ints(sequences + 1),
        lengths=ints(sequences),
        tables=ints(sequences, layout.pages_for(limits.max_model_len)),
    )
    pools = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in layout.arrays(2).items()}
    jax.eval_shape(parts.traced.run_rows, dict(parts.weights), pools, ints(_ROWS), rows, ints(sequences))
