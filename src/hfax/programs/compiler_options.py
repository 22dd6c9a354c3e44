"""XLA compiler options for decoding loops, by platform."""

from __future__ import annotations

DECODE_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion",
    }
}
"""Without it XLA hoists the conversion of all weights to float32 out of a decoding loop: twice the model size in temporaries and
half the speed, measured on CPU (docs/log/xla.md)."""
