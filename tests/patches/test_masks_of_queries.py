"""EoMT masks its queries in the blocks whose probability, a buffer of the checkpoint, is above zero."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import hfax
from hfax.matrix.case import draw_weights


@pytest.mark.parametrize("probabilities", [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
def test_blocks_with_and_without_a_mask(tmp_path: Path, probabilities: list[float]) -> None:
    config = hfax.shrink_config(transformers.EomtConfig())
    config.num_blocks = 2
    torch.manual_seed(0)
    plain = transformers.EomtForUniversalSegmentation(config).eval()
    draw_weights(plain)
    plain.attn_mask_probs.copy_(torch.tensor(probabilities))
    plain.save_pretrained(tmp_path)
    ours = hfax.AutoModelForTPU.from_pretrained(tmp_path)
    size = config.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(pixel_values=pixels)
    found = ours(pixel_values=pixels)
    for name in ("masks_queries_logits", "class_queries_logits"):
        np.testing.assert_allclose(np.asarray(found[name]), expected[name].numpy(), atol=1e-4)
