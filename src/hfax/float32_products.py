"""The precision of float32 products that torch has been told, in the words of JAX and torch_xla. Imports nothing heavy."""

from __future__ import annotations

import sys
from typing import Any, Literal

_OF_LEGACY: dict[str, Literal["highest", "high", "default"]] = {
    "highest": "highest",
    "high": "high",
    "medium": "default",
}


def told_torch() -> Literal["highest", "high", "default"]:
    """What this process has told torch of float32 products.

    Returns:
        "highest": float32, as without being told. "high": TF32 on a GPU, three products in bfloat16 on a TPU. "default": the
        platform's fastest.
    """
    torch: Any = sys.modules.get("torch")  # who has not imported it has not told it anything
    if torch is None:
        return "highest"
    try:
        return _OF_LEGACY[torch.get_float32_matmul_precision()]
    except RuntimeError:  # told by its newer settings, one for each library: the one for products on a GPU counts
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
