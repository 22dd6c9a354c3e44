"""transformers' experts interface on JAX: grouped matrix products, without a loop over the routed experts."""

from __future__ import annotations

from typing import Any

from hfax.kernels.experts import grouped_linear, sum_over_devices
from hfax.tracing.operands import as_array


def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Weighted sum of the routed experts' outputs, with the signature of transformers' experts functions.

    Args:
        self: a module with `gate_up_proj` or `up_proj` and `down_proj`, [experts, out, in] (or [experts, in, out] if
            `is_transposed`).
        hidden_states: [tokens, width].
        top_k_index: [tokens, k], the experts of each token; indices at or above `num_experts` mean no expert.
        top_k_weights: [tokens, k].

    Returns:
        [tokens, width].
    """
    tokens, k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    weights = top_k_weights.reshape(-1)
    if self._is_expert_parallel:
        weights = weights.masked_fill(chosen >= self.num_experts, 0.0)
        chosen = chosen.clamp(0, self.num_experts - 1)
    rows = hidden_states.repeat_interleave(k, dim=0)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    # of experts that are split over devices, only the sum of a token's experts is sent: an axis of devices comes first until then
    inner = _with_bias(self, name, _product(self, name, rows, chosen, is_summed=False), chosen)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _product(self, "down_proj", inner, chosen, is_summed=self.has_post_expert_norm)
    is_split = out.ndim > hidden_states.ndim
    if not is_split:
        out = _with_bias(self, "down_proj", out, chosen)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)

    def of_tokens(rows: Any) -> Any:
        return (rows * weights.unsqueeze(-1)).unflatten(-2, (tokens, k)).sum(dim=-2).to(hidden_states.dtype)

    if not is_split:
        return of_tokens(out)
    total = out._env.wrap(sum_over_devices(as_array(of_tokens(out)), getattr(self, name).shape[0]))
    return total + of_tokens(self.down_proj_bias[chosen]) if self.has_bias else total


def _product(module: Any, name: str, rows: Any, chosen: Any, *, is_summed: bool) -> Any:
    weight = getattr(module, name)
    out = grouped_linear(
        as_array(rows),
        getattr(weight, "quantized", None) or as_array(weight),
        as_array(chosen),
        is_transposed=module.is_transposed,
        is_summed=is_summed,
    )
    return rows._env.wrap(out)


def _with_bias(module: Any, name: str, rows: Any, chosen: Any) -> Any:
    return rows + getattr(module, f"{name}_bias")[chosen] if module.has_bias else rows
