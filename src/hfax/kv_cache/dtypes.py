"""The dtype of cached keys and values, as users name it. Independent of the backend."""

from __future__ import annotations

from typing import Any

from hfax.errors import InvalidInputError

CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""The names that users pass, and the dtypes that they stand for; None: the model's own."""


def cache_dtype_of(kv_cache_dtype: Any) -> str | None:
    """The name of the dtype of cached keys and values; None for the model's own.

    Args:
        kv_cache_dtype: None, or vLLM's names: "auto", "fp8", "fp8_e4m3".

    Raises:
        InvalidInputError: it is something else.
    """
    if kv_cache_dtype is None:
        return None
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in CACHE_DTYPES:
        raise InvalidInputError(
            f"kv_cache_dtype={kv_cache_dtype!r}.",
            "The KV cache holds keys and values in the model's own dtype or in float8_e4m3fn.",
            'Pass "auto", or "fp8" (the same as "fp8_e4m3").',
        )
    return CACHE_DTYPES[kv_cache_dtype]
