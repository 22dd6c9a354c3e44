"""torch_xla's attention beside torch's own."""

import torch

from hfax.patches.torch_xla import attention


def test_rows_that_may_attend_to_nothing_are_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key, value = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[2] = False
    for mask in (seen, torch.where(seen, 0.0, float("-inf"))):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        assert not expected[:, :, 2].any()
        torch.testing.assert_close(attention(query, key, value, mask), expected)
